"""A tower on the C kernels beside one in float64 with norms in float32, and its bits in parts."""

import functools
from typing import Any

import pytest
import torch

from nanovllm.attention.cpu import CPUBackend
from nanovllm.attention.torch_sdpa import TorchBackend
from nanovllm.features.vision.tower import Merger, TowerConfig, VisionTower, axial_frequencies
from nanovllm.kernels.cpu.kernels import CKernels
from nanovllm.kernels.torch_math import NORM_WIDE
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.worker.model_loader import WeightForms, default_dtype, use_kernels
from tests.kernels.cpu.helpers import native

pytestmark = [native, pytest.mark.usefixtures("inference_mode")]

RMS = functools.partial(RMSNorm, kind=NORM_WIDE)
KINDS: dict[str, dict[str, Any]] = {
    "heads of 64": {"hidden_size": 128, "num_heads": 2},
    "heads of 72, scaled": {"hidden_size": 144, "num_heads": 2, "scale": 0.1},
    "heads of 80, windows": {"hidden_size": 160, "num_heads": 2, "windowed": {1}, "window": 3},
    "normed, gated": {"norm": RMS, "qk_norm": True, "v_norm": True, "gated": True, "bias": False},
    "convolutions": {"norm": RMS, "qk_norm": True, "num_kv_heads": 2, "convolved": {0}},
}


def make_tower(dtype: torch.dtype, kind: str) -> VisionTower:
    sizes = {"hidden_size": 128, "num_heads": 4, "num_layers": 2, "intermediate_size": 96}
    options = {**sizes, "patch_shape": (24,), "activation": "gelu_tanh", "merge": 2, **KINDS[kind]}
    config = TowerConfig(**options)
    with default_dtype(dtype):
        merger = Merger(config, 4, 48, config.norm(config.hidden_size, config.eps))
        deep = {0: Merger(config, 4, 48, config.norm(4 * config.hidden_size, config.eps))}
        inv_freq = axial_frequencies(config.head_dim, 10000.0)
        tower = VisionTower(config, None, merger, deep, inv_freq=inv_freq, fused=True)
    return tower.eval().requires_grad_(False)


def encode(tower: VisionTower, patches: torch.Tensor, num_parts: int = 1) -> torch.Tensor:
    """Return the embeddings of 26 x 10 patches, from two layers in as many parts each."""
    dtype = tower.attention.spec.dtype
    *before, found = tower.encode(patches.to(dtype), 26, 10, num_parts)
    assert before == [None] * (2 * num_parts - 1)
    assert found is not None
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_tower(kind: str) -> None:
    random = torch.Generator().manual_seed(0)
    exact, tower = make_tower(torch.float64, kind), make_tower(torch.bfloat16, kind)
    device = torch.device("cpu")
    exact.attention = TorchBackend(exact.attention_spec(torch.float64, device))
    tower.attention = CPUBackend(tower.attention_spec(torch.bfloat16, device))
    for wide, narrow in zip(exact.parameters(), tower.parameters(), strict=True):
        numbers = torch.randn(wide.shape, generator=random)
        narrow.data = (numbers / 8 if wide.ndim > 1 else 1 + numbers / 4).bfloat16()
        wide.data = narrow.double()
    kernels = CKernels()
    use_kernels(tower, kernels)
    forms = WeightForms(tower, torch.bfloat16, kernels)
    for module in tower.modules():
        forms.finish(module)
    patches = torch.randn(260, 24, generator=random).bfloat16()
    found = encode(tower, patches)
    expected = encode(exact, patches)
    assert (found - expected).norm() < 0.02 * expected.norm()
    for num_parts in (3, 7, 9):
        assert torch.equal(encode(tower, patches, num_parts), found)
