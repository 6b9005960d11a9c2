"""The parts of an adapter that each rank holds: together they compute what one rank does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from nanovllm.core.messages import AdapterSlot
from nanovllm.features.lora.adapter_registry import adapter_linears
from nanovllm.features.lora.layer_parts import layer_targets
from nanovllm.features.lora.peft_files import Factors, read_adapter
from nanovllm.features.lora.rank_adapters import AdapterSlots
from nanovllm.kernels.torch_kernels import TORCH
from nanovllm.layers.linear import LinearBase, RowParallelLinear
from nanovllm.models.registry import read_config
from nanovllm.utils import distributed
from nanovllm.utils.distributed import TensorParallel
from nanovllm.worker.model_loader import make_modules
from tests.checkpoints import SMALL
from tests.lora.adapters import write_adapter

CPU = torch.device("cpu")
DELTA = {
    **SMALL,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
SIZES = {
    "qwen3": SMALL,
    "phi3": {**SMALL, "hidden_size": 96, "pad_token_id": 0},
    "qwen3_5_text": DELTA,
    "qwen3_next": {**DELTA, "mlp_only_layers": [0, 1, 2]},
}
ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("family", SIZES)
def test_ranks_together_compute_the_adapter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, num_ranks: int
) -> None:
    """With 4 ranks and 2 KV heads, two ranks hold the same keys and values."""
    fields = AutoConfig.for_model(family, **SIZES[family]).to_dict()
    config = read_config({**fields, "architectures": [ARCHITECTURES[family]]}, "float32")
    linears = {part.name: part.shape for part in adapter_linears(config).values()}
    path = write_adapter(tmp_path, linears, r=3, target_modules="all-linear")
    adapter = read_adapter(path, 4)
    inputs = {name: torch.randn(5, shape[1]) for name, shape in linears.items()}
    found = {name: torch.zeros(5, shape[0]) for name, shape in linears.items()}
    for rank in range(num_ranks):
        monkeypatch.setattr(distributed, "_tensor_parallel", TensorParallel(rank, num_ranks))
        model = make_modules(config, 8, CPU)
        for module in model.modules():
            if isinstance(module, LinearBase):
                assert module.weight is not None
                module.weight.data.zero_()
        targets = layer_targets(model)
        options: dict[str, Any] = {"num_slots": 2, "max_rank": 4, "max_tokens": 8, "device": CPU}
        slots = AdapterSlots(model, targets, TORCH, torch.float32, **options)
        slots.load(AdapterSlot(1, path, adapter.digest))
        slots.step.tokens.fill([1, -1], [4, 1])
        for layer_path, target in targets.items():
            layer = model.get_submodule(layer_path)
            assert isinstance(layer, LinearBase)
            for part in target.slices:
                end = target.input_start + target.inputs
                y = layer.linear(inputs[part.name][:, target.input_start : end])
                for piece in part.pieces:
                    own = y[:, piece.row : piece.row + piece.size]
                    columns = slice(piece.start, piece.start + piece.size)
                    if isinstance(layer, RowParallelLinear):
                        found[part.name][:, columns] += own
                    else:
                        found[part.name][:, columns] = own
    for name, y in found.items():
        assert_is_product(y, inputs[name], adapter.linears[name])


def assert_is_product(y: torch.Tensor, x: torch.Tensor, factors: Factors) -> None:
    """`y` is what the adapter adds for the first 4 tokens `x`; the last one has none."""
    expected = x[:4] @ factors.a.T @ factors.b.T * factors.scale
    torch.testing.assert_close(y[:4], expected, rtol=1e-4, atol=1e-5)
    assert not y[4].any()
