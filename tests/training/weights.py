"""Random weights for checkpoints: what a trainer would give. Knows no engine."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.test_native_invariance import MODEL, OTHER_FAMILIES

SMALL = {**MODEL, "num_hidden_layers": 2}
FAMILIES = {
    "qwen3": SMALL,
    **{
        family: {
            **MODEL,
            **OTHER_FAMILIES[family],
            "model_type": family,
            "eos_token_id": 7,
            "pad_token_id": 0,
            "bos_token_id": 1,
        }
        for family in ("qwen3_5_text", "qwen3_moe", "glm4_moe_lite", "gpt2")
    },
}
"""Configs of small models in bfloat16, with shapes that the C kernels take."""

Weights = dict[str, torch.Tensor]


def read_weights(model: str) -> Weights:
    return load_file(Path(model) / "model.safetensors")


def changed(weights: Weights, seed: int) -> Weights:
    """Return other weights of about the same sizes, in the same dtypes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (tensor.float() * (0.5 + torch.rand(tensor.shape, generator=generator)).sqrt()).to(
            tensor.dtype
        )
        for name, tensor in weights.items()
    }


def checkpoint_of(model: str, weights: Weights, path: Path) -> str:
    """Save `weights` as a checkpoint with the config of `model`; return its path."""
    shutil.copytree(model, path, dirs_exist_ok=True)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return str(path)
