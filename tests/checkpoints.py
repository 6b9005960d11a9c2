"""Makes the checkpoints of the tests: small models whose parameters are all random.

Knows transformers and safetensors; knows nothing of the engine.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

SMALL: dict[str, Any] = {
    "vocab_size": 1003,  # odd
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 256,
    "eos_token_id": [7, 11],
    "dtype": "float32",
}
"""The model that most tests use."""

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {"model_type": "qwen2"},
    "llama": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}
"""By the name of a family: what to change in SMALL for a model of it."""

FP8_FORMATS: dict[str, dict[str, Any]] = {
    "blocks": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [8, 16],
        "modules_to_not_convert": ["model.layers.2.mlp"],
    },
    "tensors": {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "weight_block_size": None,
        "modules_to_not_convert": ["model.layers.2.mlp"],
    },
    "channels": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                "input_activations": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "token",
                    "dynamic": True,
                },
            }
        },
        "ignore": ["lm_head", "re:.*layers.2.mlp.*"],
    },
}
"""A config's `quantization_config` by the name of the format."""


def random_model(
    config: PreTrainedConfig, seed: int = 0, model_class: Any = AutoModelForCausalLM
) -> PreTrainedModel:
    """Return transformers' model of the config's family with random parameters.

    Norms and biases are random too: with the ones and zeros that transformers puts there, a test
    would not show that the engine ignores them.
    """
    model = model_class.from_config(config).to(config.dtype or torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    # Where all linears have one, larger biases would make all texts go on alike.
    bias_size = 0.1 if config.model_type in ("gpt2", "gpt_neox") else 0.7
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.lower().endswith(("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")):
            noise = 1.5 + 0.5 * noise
        elif name.endswith("bias"):
            noise = bias_size * noise
        else:
            noise = noise * 1.5 / parameter.shape[-1] ** 0.5
        parameter.data = noise.to(parameter.dtype)
    return model


def make_checkpoint(path: Path, model_type: str = "qwen3", **config: Any) -> str:
    """Save a random model of SMALL's sizes, changed by `config`, without a tokenizer.

    Args:
        model_type: the family, as transformers names it.

    Returns:
        `path`, as `LLM` takes it.
    """
    random_model(AutoConfig.for_model(model_type, **{**SMALL, **config})).save_pretrained(path)
    return str(path)


def copy_checkpoint(
    model: str, path: Path, *, generation_config: Mapping[str, Any] | None = None, **config: Any
) -> str:
    """Copy a checkpoint; change fields of its config, and replace its generation config if given.

    Returns:
        `path`, as `LLM` takes it.
    """
    shutil.copytree(model, path, dirs_exist_ok=True)
    write_json(path / "config.json", {**read_json(path / "config.json"), **config})
    if generation_config is not None:
        write_json(path / "generation_config.json", generation_config)
    return str(path)


def to_fp8(
    weight: torch.Tensor, rows: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the weight in FP8, the scale of each block, and their product in float64."""
    rows, columns = min(rows, weight.shape[0]), min(columns, weight.shape[1])
    scales = torch.zeros(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            scales[i, j] = block.abs().max() / 448
    wide = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    wide = wide[: weight.shape[0], : weight.shape[1]]
    values = (weight / wide).to(torch.float8_e4m3fn)
    return values, scales, values.double() * wide.double()


def make_fp8_checkpoint(model: str, path: Path, kind: str) -> tuple[str, str]:
    """Convert a float32 checkpoint's linears to FP8, all but those of the third layer's MLP.

    Args:
        kind: "blocks", a scale for each block of 8 x 16 weights; "channels", one for each row; or
            "tensors", one for each linear, and one for its inputs.

    Returns:
        The FP8 checkpoint, and a float32 checkpoint that holds its weights exactly.
    """
    rows, columns, scale_name = {
        "blocks": (8, 16, "weight_scale_inv"),
        "channels": (1, 10**6, "weight_scale"),
        "tensors": (200, 200, "weight_scale_inv"),
    }[kind]
    tensors = load_file(Path(model) / "model.safetensors")
    wide = dict(tensors)
    for name in list(tensors):
        if "_proj.weight" in name and "layers.2.mlp" not in name:
            values, scales, exact = to_fp8(tensors[name], rows, columns)
            wide[name] = exact.float()
            tensors[name] = values
            tensors[name.removesuffix("weight") + scale_name] = scales
            if kind == "tensors":
                tensors[name.removesuffix("weight") + scale_name] = scales.reshape(())
                tensors[name.removesuffix("weight") + "activation_scale"] = torch.tensor(0.02)
    fp8 = copy_checkpoint(model, path / "fp8", quantization_config=FP8_FORMATS[kind])
    save_file(tensors, path / "fp8" / "model.safetensors")
    widened = copy_checkpoint(model, path / "wide")
    save_file(wide, path / "wide" / "model.safetensors")
    return fp8, widened


def read_json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
