"""Draft networks whose steps are replayed as graphs propose the same drafts as eager ones. The
graphs are recordings that run on the CPU.
"""

import dataclasses
import functools
import gc
import json
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import SamplingParams, demo_model
from nanovllm.core.messages import Row
from nanovllm.core.worker_info import WorkerInfo
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.factory import make_engine
from nanovllm.features.graphs.cuda_graph import draft_graph_sizes
from nanovllm.features.speculation.draft_controller import DraftController
from nanovllm.features.speculation.proposers.draft_network import DraftNetwork
from nanovllm.features.speculation.proposers.proposer import Proposer
from nanovllm.options.config import Config
from nanovllm.parallel import in_process
from nanovllm.worker import warm_up
from nanovllm.worker.model_runner import ModelRunner
from nanovllm.worker.warm_up import KINDS as KINDS_AT_START, reach_peak
from tests.glossary import QUESTIONS
from tests.graphs.fake_graphs import FakeCapture, use_fake_graphs, use_triton
from tests.kernels.triton.interpreter import patch_interpreter

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "native_kernels": False,
    "max_model_len": 96,
    "kvcache_block_size": 4,
    "num_kvcache_blocks": 100,
    "max_num_seqs": 3,
}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "repetition_penalty": 1.3},
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 0.3, "top_k": 5},
]
METHODS = ("draft_model", "eagle3")
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@dataclasses.dataclass
class Proposals:
    """What the proposer was asked, and what the tables held afterwards."""

    drafts: list[list[list[int]]] = dataclasses.field(default_factory=list)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        propose = DraftNetwork.propose

        def watched(network: DraftNetwork, rows: list[Row]) -> list[int]:
            counts = propose(network, rows)
            table = network._tables.token_ids  # type: ignore[union-attr]
            self.drafts.append(
                [
                    table[row.table_idx, row.sample_position :][:count].tolist()
                    for row, count in zip(rows, counts, strict=True)
                ]
            )
            return counts

        monkeypatch.setattr(DraftNetwork, "propose", watched)


@functools.cache
def checkpoint(method: str) -> str:
    """Return a draft network for the demo model. The head reads the inputs of three layers."""
    if method == "draft_model":
        return demo_model.DRAFT_MODEL
    path = Path(tempfile.mkdtemp())
    shutil.copytree(demo_model.EAGLE3, path, dirs_exist_ok=True)
    config = json.loads((path / "config.json").read_text())
    config.pop("eagle_config", None)
    config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def started(
    method: str, queue_depth: int = 0, num_speculative_tokens: int = 4, **options: Any
) -> LLMEngine:
    speculative = {
        "method": method,
        "model": checkpoint(method),
        "num_speculative_tokens": num_speculative_tokens,
    }
    config = Config(demo_model.MODEL, speculative_config=speculative, **OPTIONS | options)
    return make_engine(config, queue_depth=queue_depth)


def generate(
    method: str,
    queue_depth: int = 0,
    count: int = 6,
    max_tokens: int = 12,
    num_speculative_tokens: int = 4,
    **options: Any,
) -> tuple[list[Any], Any]:
    """Return the tokens of `count` requests, and the counts of drafts."""
    engine = started(method, queue_depth, num_speculative_tokens, **options)
    ids = []
    for index in range(count):
        params = SamplingParams(max_tokens=max_tokens, seed=index, **KINDS[index % len(KINDS)])
        ids.append(engine.add_request(QUESTIONS[index % len(QUESTIONS)], params))
    found: dict[int, list[int]] = {}
    while not engine.is_finished():
        for output in engine.step():
            found[output.request_id] = output.token_ids
    engine.shutdown()
    return [found[request] for request in ids], engine.scheduler.drafting.counts


@pytest.fixture
def every_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for drafts in every step, and measure nothing."""
    monkeypatch.setattr(
        DraftController,
        "choose",
        lambda self, candidates, _: [
            max(0, min(limit, 1 + i % 4)) for i, (_, limit) in enumerate(candidates)
        ],
    )
    monkeypatch.setattr(Proposer, "add_costs", lambda self, info, *_: info)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Tokens and known tokens that a row may have, of each graph that a draft network replayed."""
    found: list[tuple[int, int]] = []
    replay = DraftNetwork._replay

    def watched(self: DraftNetwork, graphs: Any, rows: list[Row], hidden: Any) -> Any:
        longest = max(row.num_scheduled_tokens for row in rows)
        found.append((sum(row.num_scheduled_tokens for row in rows), longest))
        return replay(self, graphs, rows, hidden)

    monkeypatch.setattr(DraftNetwork, "_replay", watched)
    return found


@pytest.mark.usefixtures("every_draft")
@pytest.mark.parametrize("method", METHODS)
def test_graphs_propose_the_same_drafts(
    method: str, replays: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, graph = Proposals(), Proposals()
    with pytest.MonkeyPatch.context() as patch:
        eager.watch(patch)
        expected = generate(method, enforce_eager=True)
    assert not replays
    use_fake_graphs(monkeypatch)
    graph.watch(monkeypatch)
    assert generate(method) == expected
    assert graph.drafts == eager.drafts
    assert len(replays) > 10
    assert any(longest > 1 for _, longest in replays)  # catches up with accepted drafts
    replays.clear()
    tokens, counts = generate(method, queue_depth=1)
    assert tokens == expected[0]
    assert counts.num_accepted_tokens > 5
    assert replays


@pytest.mark.usefixtures("every_draft")
@pytest.mark.parametrize("method", METHODS)
def test_few_graphs_and_a_block_for_padding(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[FakeCapture] = use_fake_graphs(monkeypatch)
    engine = started(method)
    runner: Any = engine.executor._runner  # type: ignore[attr-defined]
    draft = runner.drafter
    sizes = [graphs.sizes for graphs in draft._graphs]
    assert sizes == [draft_graph_sizes(48), draft_graph_sizes(3)][: len(sizes)]
    assert len(sizes) == (1 if method == "draft_model" else 2)
    made = [len(capture.graphs) for capture in captures]
    graphs, pieces = runner.step_runners
    assert made == [*map(len, sizes), len(graphs.sizes), len(pieces.sizes)]
    assert {layer.kv_cache.shape[1] for layer in draft._network.attention.layers} == {101}
    engine.shutdown()


@pytest.mark.parametrize(
    ("method", "graphs"), [("draft_model", True), ("eagle3", True), ("eagle3", False)]
)
def test_warming_up_leaves_nothing(
    method: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: the pools of the warm-up stay when the real ones are allocated."""
    if graphs:
        use_fake_graphs(monkeypatch)
    seen: list[Any] = []

    def measured(sizes: list[int], capture: Callable[[int], None], device: Any) -> int:
        seen.append(sizes)
        capture(sizes[-1])
        return 1000

    monkeypatch.setattr("nanovllm.features.graphs.step_runners.graph_bytes", measured)
    engine = started(method)
    runner: Any = engine.executor._runner  # type: ignore[attr-defined]
    with torch.inference_mode():
        num_captures = graphs * (3 if method == "draft_model" else 4)
        assert reach_peak(runner, engine.worker_info) == 1000 * num_captures
    assert len(seen) == num_captures
    for held in (runner.network, runner.drafter._network):
        assert not any(hasattr(layer, "kv_cache") for layer in held.attention.layers)
    assert getattr(runner.drafter, "_features", None) is None
    engine.shutdown()


@pytest.mark.usefixtures("every_draft")
def test_steps_at_start_draft_and_change_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels of a draft network compile there as well."""
    expected = generate("eagle3", count=3)
    proposals = Proposals()
    allocate = warm_up.allocate

    def warm(runner: ModelRunner, info: WorkerInfo) -> WorkerInfo:
        allocated = allocate(runner, info)
        with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
            proposals.watch(patch)
            warm_up.compile_kernels(runner, info)
        return allocated

    monkeypatch.setattr(in_process, "allocate", warm)
    assert generate("eagle3", count=3) == expected
    assert len(proposals.drafts) == len(KINDS_AT_START)
    assert {len(drafts) for step in proposals.drafts for drafts in step} == {4}


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted, which a GPU turns off")
@pytest.mark.usefixtures("every_draft")
def test_through_the_kernels_of_a_gpu(
    replays: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the Triton kernels that gather, attend, sample and advance in a graph. A draft model has
    those of the head, and one graph fewer.
    """
    patch_interpreter()
    options = {"max_num_seqs": 1, "kvcache_block_size": 16, "num_kvcache_blocks": 8, "count": 1}
    options |= {"max_tokens": 3, "num_speculative_tokens": 2}
    expected = generate("eagle3", enforce_eager=True, **options)
    use_fake_graphs(monkeypatch)
    use_triton(monkeypatch)
    assert generate("eagle3", **options) == expected
    assert replays


def test_graphs_and_pools_are_freed_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: graphs refer to their proposer, and only the garbage collector frees its memory."""
    captures: list[FakeCapture] = use_fake_graphs(monkeypatch)
    gc.collect()
    gc.disable()
    try:
        engine = started("eagle3")
        runner: Any = engine.executor._runner  # type: ignore[attr-defined]
        held = [weakref.ref(runner.drafter), weakref.ref(runner.drafter._network.pool)]
        held.append(weakref.ref(runner.drafter._graphs[0]))
        captures.clear()
        engine.shutdown()
        del engine, runner
        assert [ref() for ref in held] == [None] * 3
    finally:
        gc.enable()


@NEEDS_CUDA
@pytest.mark.usefixtures("every_draft")
@pytest.mark.parametrize("queue_depth", [0, 1])
@pytest.mark.parametrize("method", METHODS)
def test_cuda_same_tokens(method: str, queue_depth: int) -> None:
    options = {"device": "cuda", "native_kernels": True, "kvcache_block_size": None}
    expected, _ = generate(method, enforce_eager=True, **options)
    tokens, counts = generate(method, queue_depth, **options)
    assert tokens == expected
    assert counts.num_accepted_tokens > 10


@NEEDS_CUDA
@pytest.mark.usefixtures("every_draft")
@pytest.mark.parametrize("method", METHODS)
def test_cuda_launching_a_step_waits_for_nothing(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = ModelRunner.execute

    def watched(*args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return execute(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(ModelRunner, "execute", watched)
    generate(method, 1, device="cuda", native_kernels=True, kvcache_block_size=None)
