"""Adapters that requests name: checked once, kept by id, and many more than have slots."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nanovllm import LoRARequest
from nanovllm.errors import InvalidRequestError
from nanovllm.features.lora.adapter_registry import AdapterRegistry
from tests.lora.adapters import slices_of
from tests.lora.fake_adapters import AdapterEngine

LINEARS = {"model.layers.0.self_attn.q_proj": (6, 4)}


def save(path: Path, number: int = 0, rank: int = 2, fill: float | None = None) -> str:
    """Write a tiny adapter, which differs by `number`, and return its directory."""
    path.mkdir()
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(fields))
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    value = float(number) if fill is None else fill
    tensors = {
        f"{key}A.weight": torch.full((rank, 4), value),
        f"{key}B.weight": torch.ones(6, rank),
    }
    save_file(tensors, path / "adapter_model.safetensors")
    return str(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("", 1, "p"), "lora_name must be 1 to 256"),
        (("a\n", 1, "p"), "lora_name must be"),
        (("a", 0, "p"), "lora_int_id must be an integer"),
        (("a", -1, "p"), "lora_int_id must be an integer"),
        (("a", True, "p"), "lora_int_id must be an integer"),
        (("a", 1, ""), "lora_path must be"),
        (("a", 1, None), "lora_path must be"),
    ],
)
def test_fields_of_a_request_are_checked(fields: tuple[str, int, str], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        LoRARequest(*fields)


def test_an_id_is_one_adapter_until_it_is_replaced(tmp_path: Path) -> None:
    registry = AdapterRegistry(slices_of(LINEARS), 8)
    first, second = save(tmp_path / "a", 1), save(tmp_path / "b", 2)
    found = registry.find(LoRARequest("a", 1, first))
    assert found is not None
    assert registry.find(LoRARequest("a", 1, first)) is found
    with pytest.raises(InvalidRequestError, match="lora_int_id 1 is that of adapter 'a'"):
        registry.find(LoRARequest("b", 1, second))
    replaced = registry.find(LoRARequest("b", 1, second, load_inplace=True))
    assert replaced is not None
    assert replaced.digest != found.digest


def test_bad_adapters_are_refused_by_name_and_not_kept(tmp_path: Path) -> None:
    registry = AdapterRegistry(slices_of(LINEARS), 2)
    bad = [
        LoRARequest("large", 1, save(tmp_path / "large", rank=3)),
        LoRARequest("nan", 1, save(tmp_path / "nan", fill=float("nan"))),
        LoRARequest("gone", 1, str(tmp_path / "gone")),
        LoRARequest("file", 1, str(tmp_path / "large" / "adapter_config.json")),
    ]
    for request in bad:
        with pytest.raises(InvalidRequestError, match=f"lora_request '{request.lora_name}'"):
            registry.find(request)
    assert len(registry._known) == 0
    other = AdapterRegistry(slices_of({"model.layers.0.self_attn.q_proj": (6, 5)}), 2)
    with pytest.raises(InvalidRequestError, match="does not fit the model"):
        other.find(LoRARequest("shape", 1, save(tmp_path / "shape")))


def test_many_adapters_in_eight_slots(tmp_path: Path) -> None:
    registry = AdapterRegistry(slices_of(LINEARS), 2)
    engine = AdapterEngine(max_loras=8, max_num_seqs=16, num_blocks=200)
    for number in range(100):
        adapter = registry.find(LoRARequest("a", 1 + number, save(tmp_path / str(number), number)))
        engine.add([1, 2, 3], max_tokens=2, adapter=adapter)
    engine.run()
    assert engine.worker.num_loaded == 100
    assert len(engine.adapters.slots.slots) == 8
    assert len({*engine.adapters.slots.slots.values()}) == 8
    assert len(registry._known) == 100
