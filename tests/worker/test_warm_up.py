"""The steps at start use what requests may need, in any engine's limits, and leave nothing."""

from typing import Any

import pytest
import torch

from nanovllm.core.worker_info import WorkerInfo
from nanovllm.features.speculation.proposers.ngram import Ngram
from nanovllm.kernels.torch_kernels import TORCH, Kernels
from nanovllm.layers import sampler
from nanovllm.worker import logprobs
from nanovllm.worker.network import Network
from nanovllm.worker.warm_up import CHUNKS, KINDS, compile_kernels, reach_peak, warm_up_steps
from tests.graphs.test_cuda_graph import BLOCK_SIZE, Bench

INFO = WorkerInfo(100, BLOCK_SIZE, 64, 1003, 64)


def warm_up(bench: Bench) -> None:
    compile_kernels(bench.runner, INFO)


@pytest.mark.parametrize("max_model_len", [1, 2, 3, 5, 44, 150, 4096])
@pytest.mark.parametrize("max_num_batched_tokens", [1, 2, 64, 2048])
def test_steps_keep_to_the_limits(max_model_len: int, max_num_batched_tokens: int) -> None:
    info = WorkerInfo(1, 16, max_model_len, 1000, max_num_batched_tokens)
    steps = list(warm_up_steps(info, num_drafts=3))
    assert {step.admissions[0].params for step in steps} == set(KINDS)
    for step in steps:
        (row,) = step.rows
        assert 0 <= row.num_computed_tokens < row.end <= max_model_len
        assert row.sample_position >= 1
        assert row.num_scheduled_tokens <= max_num_batched_tokens
        assert step.may_draft == bool(row.num_draft_tokens)


def test_a_large_engine_meets_every_shape() -> None:
    rows = [step.rows[0] for step in warm_up_steps(WorkerInfo(9, 16, 4096, 1000, 2048), 3)]
    sizes = {(row.num_scheduled_tokens, row.num_draft_tokens, row.samples) for row in rows}
    assert {(100, 0, False), (40, 0, False), (2, 0, True), (1, 0, True), (4, 3, True)} <= sizes
    assert {row.num_computed_tokens for row in rows} >= {0, CHUNKS[0], 4096 - CHUNKS[0]}


def test_every_way_of_choosing_a_token_is_used(
    random_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each is a kernel, compiled once for the model's dtype and once for float32."""
    bench = Bench(random_model, dtype="bfloat16", speculative_config={"method": "ngram"})
    used: list[tuple[Any, ...]] = []

    def watch(module: Any, name: str, what: Any) -> None:
        function = getattr(module, name)

        def watched(*args: Any, **options: Any) -> Any:
            used.append((name, *what(*args)))
            return function(*args, **options)

        monkeypatch.setattr(module, name, watched)

    watch(Kernels, "greedy", lambda _, logits: [logits.dtype])
    watch(sampler, "draw", lambda logits, _, count=0: [logits.dtype, bool(count)])
    bench.tables.kernels = TORCH
    watch(logprobs, "gather_logprobs", lambda *_: [])
    watch(Network, "forward", lambda _, tables, rows, *rest: [rows[0].samples])
    watch(Ngram, "propose", lambda _, rows: [rows[0].num_draft_tokens > 0])
    with torch.inference_mode():
        warm_up(bench)
    dtypes = torch.bfloat16, torch.float32
    expected: set[tuple[Any, ...]] = {("greedy", dtype) for dtype in dtypes}
    expected |= {("draw", torch.bfloat16, False), ("draw", torch.bfloat16, True)}
    expected |= {("draw", torch.float32, True), ("gather_logprobs",), ("propose", True)}
    assert set(used) >= expected | {("forward", True), ("forward", False)}


def test_nothing_is_left(random_model: str) -> None:
    bench, fresh = Bench(random_model), Bench(random_model)
    with torch.inference_mode():
        warm_up(bench)
    assert torch.equal(bench.tables._table, fresh.tables._table)
    assert not bench.kv().any()
    for found, expected in zip(
        bench.tables.sampling_tensors.columns, fresh.tables.sampling_tensors.columns, strict=True
    ):
        assert torch.equal(found, expected)
    assert bench.tables.rules == fresh.tables.rules
    assert bench.tables.plain == fresh.tables.plain


def test_peak_memory_includes_a_float32_copy_of_all_logits(
    random_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: 512 rows, one with rules, need 311 MB on a GPU that the KV pool has filled."""
    bench = Bench(random_model, dtype="bfloat16", max_num_seqs=24)
    shapes: list[tuple[int, ...]] = []

    def watched(self: Kernels, logits: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(logits.shape))
        return logits.float()

    monkeypatch.setattr(type(bench.runner.network.kernels), "to_float", watched)
    with torch.inference_mode():
        reach_peak(bench.runner, INFO)
    assert (24, bench.runner.network.model_config.vocab_size) in shapes
