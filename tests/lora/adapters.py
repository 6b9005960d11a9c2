"""Writes adapters as PEFT does, and merges them into a checkpoint. Runs no engine."""

import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.pytorch_utils import Conv1D

from nanovllm.features.lora.layer_parts import Slice
from tests.checkpoints import write_json

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linears of most families' layers."""
PEFT_CONFIG: dict[str, Any] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": "a/model",
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 16,
    "lora_bias": False,
    "lora_dropout": 0.05,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 8,
    "rank_pattern": {},
    "revision": None,
    "target_modules": list(ALL),
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}
"""What PEFT 0.21 writes."""
Linears = Mapping[str, tuple[int, int]]
"""By a linear's path: its outputs and inputs."""


def linears_of(model: str, targets: tuple[str, ...] = ALL) -> dict[str, tuple[int, int]]:
    """Return the linears of checkpoint `model` whose last names are in `targets`."""
    found = {}
    for file in sorted(Path(model).glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            module, _, last = name.rpartition(".")
            if last == "weight" and module.rpartition(".")[2] in targets:
                found[module] = (tensor.shape[0], tensor.shape[1])
    return found


def slices_of(linears: Linears) -> dict[str, Slice]:
    """Return what adapters have to fit, of a model with `linears`."""
    return {name: Slice(name, shape, []) for name, shape in linears.items()}


def write_adapter(
    path: Path,
    linears: Linears,
    *,
    seed: int = 0,
    rank_of: Callable[[str], int] | None = None,
    dtype: torch.dtype = torch.float32,
    size: float = 0.3,
    **config: Any,
) -> str:
    """Write an adapter of random numbers, none of them small; return `path`.

    Args:
        rank_of: the rank of a linear; None: the config's `r`.
        size: of the change of an output, beside inputs of size 1.
    """
    path.mkdir(parents=True, exist_ok=True)
    fields = {**PEFT_CONFIG, **config}
    write_json(path / "adapter_config.json", fields)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (outputs, inputs) in linears.items():
        rank = fields["r"] if rank_of is None else rank_of(module)
        scale = fields["lora_alpha"] / (math.sqrt(rank) if fields["use_rslora"] else rank)
        a = torch.randn(rank, inputs, generator=generator) / math.sqrt(inputs)
        b = torch.randn(outputs, rank, generator=generator) * size / scale / math.sqrt(rank)
        tensors[f"base_model.model.{module}.lora_A.weight"] = a.to(dtype)
        tensors[f"base_model.model.{module}.lora_B.weight"] = b.to(dtype)
    save_file(tensors, path / "adapter_model.safetensors")
    return str(path)


def merge(model: str, adapter: str, path: Path, scales: Callable[[str], float]) -> str:
    """Write checkpoint `model` with `adapter` added in float32; return `path`.

    Args:
        scales: the factor of a linear.
    """
    shutil.copytree(model, path)
    factors = load_file(Path(adapter) / "adapter_model.safetensors")
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            key = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{key}.lora_A.weight" in factors:
                a, b = (factors[f"{key}.lora_{part}.weight"].float() for part in "AB")
                tensors[name] = tensor.float() + b @ a * scales(name.removesuffix(".weight"))
        save_file(tensors, file, metadata={"format": "pt"})
    return str(path)


def adapt(theirs: torch.nn.Module, path: Path, **options: Any) -> str:
    """Write an adapter of all linears of a transformers' model, and merge it there; return `path`.

    Those of pictures, kv_b_proj and the head are left out. transformers' experts are no linears.
    """
    layers = {
        name: module
        for name, module in theirs.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and name.startswith(NETWORKS)
        if not any(part in f"{name}." for part in OTHERS)
    }
    weights = {
        name: layer.weight.data.T if isinstance(layer, Conv1D) else layer.weight.data
        for name, layer in layers.items()
    }
    shapes = {name: (weight.shape[0], weight.shape[1]) for name, weight in weights.items()}
    write_adapter(path, shapes, target_modules="all-linear", **options)
    scale = options.get("lora_alpha", 16) / options.get("r", 8)
    factors = load_file(path / "adapter_model.safetensors")
    for name, weight in weights.items():
        a, b = (factors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        weight += (b.float() @ a.float() * scale).to(weight.dtype)
    return str(path)


NETWORKS = ("model.", "language_model.", "transformer.", "gpt_neox.")
OTHERS = (
    "kv_b_proj",
    "visual",
    "vision",
    "multi_modal",
    "audio",
    "projector",
    ".experts.",
    "router",
    "mlp.gate.",
)
"""Parts of the names of linears that adapters do not change here."""
