"""`nanovllm prove` finds faults that are planted in the engine, and nothing without them."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm.apps.cli import main as cli
from nanovllm.features.lora.adapter_registry import AdapterRegistry
from nanovllm.features.lora.rank_adapters import AdapterSlots
from nanovllm.features.tiers import directory
from nanovllm.kernels.cpu import ops
from nanovllm.kernels.cpu.packed import PanelWeight
from nanovllm.kv.groups.state import StateGroup
from nanovllm.worker.step_output import StepOutput
from nanovllm.worker.step_sampler import StepSampler
from tests.lora.adapters import linears_of, write_adapter

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler here")

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "dtype": "bfloat16",
}
STATES: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "eos_token_id": 7,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
Patch = pytest.MonkeyPatch


def sums_in_the_order_of_the_rows(patch: Patch) -> None:
    apply = PanelWeight.apply

    def wrong(self: PanelWeight, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        if len(x) < 3:
            return apply(self, x, bias)
        first, second = x.clone(), x.clone()
        first[:, x.shape[1] // 2 :] = 0
        second[:, : x.shape[1] // 2] = 0
        return apply(self, first, bias) + apply(self, second)

    patch.setattr(PanelWeight, "apply", wrong)


def forgets_the_mask_of_a_chunk(patch: Patch) -> None:
    attention = ops.attention

    def wrong(q: torch.Tensor, cache: Any, tables: Any, starts: Any, lens: Any, **more: Any) -> Any:
        found = attention(q, cache, tables, starts, lens, **more)
        for row in range(len(lens)):
            first, end = int(starts[row]), int(starts[row + 1])
            if 1 < end - first < int(lens[row]):  # a chunk behind another one
                one = torch.tensor([0, 1], dtype=starts.dtype)
                alone = q[first : first + 1].contiguous(), cache, tables[row : row + 1].contiguous()
                found[first] = attention(*alone, one, lens[row : row + 1].contiguous(), **more)[0]
        return found

    patch.setattr(ops, "attention", wrong)


def seeds_by_row(patch: Patch) -> None:
    parameters = StepSampler.parameters

    def wrong(self: StepSampler) -> Any:
        return dataclasses.replace(parameters(self), seeds=self._table_indices.clone())

    patch.setattr(StepSampler, "parameters", wrong)


def takes_snapshots_a_token_late(patch: Patch) -> None:
    row_length, fill_step = StateGroup.row_length, StateGroup.fill_step

    def late_end(self: StateGroup, seq: Any, most: int) -> int:
        length = row_length(self, seq, most)
        return length + (length < most)

    def late(self: StateGroup, step: Any) -> None:
        given = step.rows
        step.rows = [r._replace(num_computed_tokens=r.num_computed_tokens - 1) for r in given]
        fill_step(self, step)
        step.rows = given

    patch.setattr(StateGroup, "row_length", late_end)
    patch.setattr(StateGroup, "fill_step", late)


def keeps_a_stale_adapter(patch: Patch) -> None:
    def wrong(self: AdapterSlots, adapter: Any) -> bool:
        return self._digests[adapter.slot] is not None

    patch.setattr(AdapterSlots, "holds", wrong)


def keeps_a_replaced_adapter(patch: Patch) -> None:
    def wrong(self: AdapterRegistry, adapter: Any) -> Any:
        known = self._known.get(adapter.lora_int_id)
        return None if known is None else known[1]

    patch.setattr(AdapterRegistry, "_same", wrong)


def accepts_drafts_unchecked(patch: Patch) -> None:
    def wrong(output: Any, sampled: Any, drafts: Any, first: int, last: int) -> Any:
        return [*drafts[first:last], sampled[last]], None

    patch.setattr(StepOutput, "_accepted", wrong)


def believes_torn_files(patch: Patch) -> None:
    write_file, read_file = directory.write_file, directory.read_file

    def torn(file: Any, owner: bytes, key: bytes, buffers: Any) -> None:
        write_file(file, owner, key, buffers)
        size = file.tell()
        file.truncate(size // 2)
        file.truncate(size)  # zeros

    def believed(file: Any, owner: bytes, key: bytes, buffers: Any) -> bool:
        read_file(file, owner, key, buffers)
        return True

    patch.setattr(directory, "write_file", torn)
    patch.setattr(directory, "read_file", believed)


FAULTS: dict[Callable[[Patch], None], tuple[str, dict[str, Any]]] = {
    sums_in_the_order_of_the_rows: ("batches of 5", {}),
    forgets_the_mask_of_a_chunk: ("chunks of 17", {}),
    seeds_by_row: ("batches of 5", {}),
    takes_snapshots_a_token_late: ("half warm", STATES),
    keeps_a_stale_adapter: ("adapters in turn", {}),
    keeps_a_replaced_adapter: ("adapters loaded again", {}),
    accepts_drafts_unchecked: ("n-gram drafts", {}),
    believes_torn_files: ("KV in files", {}),
}
"""By fault: a way that shows it, and the model."""


@pytest.mark.thinned(3)
@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_finds_a_planted_fault(
    plant: Callable[[Patch], None],
    shared_checkpoint: Callable[..., str],
    monkeypatch: Patch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    way, changes = FAULTS[plant]
    model = shared_checkpoint(**{**SMALL, **changes})
    arguments = ["prove", model, "--ways", way, "--num-requests", "8"]
    if "adapters" in way:
        for seed in (1, 2):
            path = write_adapter(tmp_path / str(seed), linears_of(model), seed=seed)
            arguments += ["--lora-modules", f"a{seed}={path}"]
    with monkeypatch.context() as patch:
        plant(patch)
        assert cli.main(arguments) == 1, capsys.readouterr().out
        assert f"the first difference: {way}" in capsys.readouterr().out
    assert cli.main(arguments) == 0
