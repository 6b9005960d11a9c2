"""Adapters of an engine whose weights sleep, wake up and change."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import SamplingParams
from tests.helpers import token_ids
from tests.lora.adapters import linears_of, write_adapter
from tests.lora.test_equality import OPTIONS, ask, mixed
from tests.training.weights import SMALL, changed, checkpoint_of, read_weights

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize(
    "options",
    [{}, {"quantization": "int4"}, {"dtype": "float32"}, {"native_kernels": False}],
    ids=str,
)
def test_tokens_are_those_of_a_fresh_engine(
    make_llm: Any, shared_checkpoint: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Slots are neither part of the weights nor lost: one adapter takes the other's between."""
    model = shared_checkpoint(**SMALL)
    linears = linears_of(model)
    adapters = [write_adapter(tmp_path / str(i), linears, seed=i) for i in range(2)]
    options = {**OPTIONS, **options, "max_loras": 1, "device": "cpu"}
    asked = mixed(adapters, 5, lengths=(1, 20))
    llm = make_llm(model, **options)
    old = token_ids(ask(llm, asked, PARAMS))
    for level in (1, 1, 2):
        llm.sleep(level)
        if level == 2:
            llm.wake_up(["weights"])
            llm.update_weights(read_weights(model))
        llm.wake_up()
        for each, expected in zip(asked[2:], old[2:], strict=True):
            assert token_ids(ask(llm, [each], PARAMS)) == [expected]
    weights = changed(read_weights(model), 1)
    llm.update_weights(weights)
    fresh = make_llm(checkpoint_of(model, weights, tmp_path / "new"), **options)
    new = token_ids(ask(fresh, asked, PARAMS))
    assert token_ids(ask(llm, asked, PARAMS)) == new != old


def test_sleep_gives_the_slots_back(make_llm: Any, shared_checkpoint: Any, tmp_path: Path) -> None:
    model = shared_checkpoint(**SMALL)
    path = write_adapter(tmp_path, linears_of(model))
    llm = make_llm(model, **OPTIONS, device="cpu")
    ask(llm, mixed([path], 2), PARAMS)
    tables = list(llm.engine.executor._runner.parts[0].slots._tables.values())
    assert any(torch.any(table.a) for table in tables)
    llm.sleep()
    assert not any(torch.any(table.a) or torch.any(table.b) for table in tables)
