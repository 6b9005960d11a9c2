"""Steps that verify drafts, replayed as graphs: the same tokens, log-probabilities and KV as eager
steps. The graphs are recordings that run on the CPU.
"""

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.scripted import Scripted
from nanovllm import SamplingParams
from nanovllm.core.messages import Row, Schedule
from nanovllm.core.sequence import Sequence
from nanovllm.features.graphs.cuda_graph import GraphRunner, draft_graph_sizes, graph_sizes
from nanovllm.features.speculation import proposers
from nanovllm.features.speculation.draft_controller import DraftController
from nanovllm.features.speculation.proposers.ngram import Ngram
from nanovllm.features.speculation.proposers.proposer import Proposer
from nanovllm.kernels.triton import ngram
from nanovllm.platform.cpu import CPU
from nanovllm.scheduler.scheduler import Scheduler
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.model_runner import ModelRunner
from tests.graphs.fake_graphs import FakeCapture, StepKernels, use_fake_graphs, use_triton
from tests.graphs.test_cuda_graph import (
    NEEDS_CUDA,
    WORKLOADS,
    Bench,
    Outputs,
    Workload,
    generate,
)
from tests.kernels.triton.interpreter import patch_interpreter

SPECULATIVE: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 5}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 3}
RULES: dict[str, Any] = {
    "temperature": 0.8,
    "allowed_token_ids": [3, 7, 9, 11, 13],  # the graph, which knows no rules, takes others
    "frequency_penalty": 1.5,
}
BLOCKS_PER_ROW = 10
REPEATING: Workload = (
    [[5, 6, 7, 8] * 4, [300, 301] * 6, [9, 9, 9], [1, 2, 3, 1, 2]],
    [SamplingParams(temperature=0.0, max_tokens=24 + i) for i in range(4)],
)


class NoProposer(Proposer):
    """Leaves the drafts that a test wrote into the tables."""

    def allocate(self, tables: DeviceTables, num_blocks: int) -> None:
        pass

    def propose(self, rows: list[Row]) -> list[int]:
        return [row.num_draft_tokens for row in rows]


class DraftBench(Bench):
    """A bench whose steps verify drafts that the test chooses."""

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(model, speculative_config=SPECULATIVE, **options)

    def start(self, *kinds: dict[str, Any]) -> list[int]:
        """Admit a prompt for each of `kinds`; return their first sampled tokens."""
        tokens = []
        for table_idx, kind in enumerate(kinds):
            prompt = [table_idx * 10 + i for i in range(5 + table_idx)]
            first = table_idx * BLOCKS_PER_ROW
            blocks = list(range(first, first + BLOCKS_PER_ROW))
            params = SamplingParams(max_tokens=50, **kind)
            tokens.append(self.admit(table_idx, prompt, params, blocks))
        return tokens

    def verify(self, drafts: dict[int, list[int]]) -> Any:
        """Verify `drafts` by table row; return the pending result. Keeps the accepted tokens."""
        rows = []
        for table_idx, tokens in drafts.items():
            start = self.lengths[table_idx]
            rows.append(Row(table_idx, table_idx, start, 1 + len(tokens), True, len(tokens)))
            with torch.inference_mode():
                place = self.tables.token_ids[table_idx, start + 1 : start + 1 + len(tokens)]
                place.copy_(torch.tensor(tokens, dtype=torch.int32))
        pending = self.runner.execute(Schedule(0, [], [], rows))
        for row, accepted in zip(rows, pending.result().token_ids, strict=True):
            self.lengths[row.table_idx] += len(accepted)
        return pending


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[FakeCapture]:
    monkeypatch.setattr(proposers, "make_proposer", lambda *_: NoProposer())
    return use_fake_graphs(monkeypatch)


@pytest.fixture
def graph_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The drafts of each step that ran as a graph."""
    found: list[int] = []
    run = GraphRunner.run

    def watched(self: GraphRunner, rows: list[Row]) -> Any:
        found.append(sum(row.num_draft_tokens for row in rows))
        return run(self, rows)

    monkeypatch.setattr(GraphRunner, "run", watched)
    return found


def right_tokens(model: str, kinds: list[dict[str, Any]], count: int) -> list[list[int]]:
    """Return the next tokens of the prompts of `DraftBench.start`, without drafts and graphs."""
    bench = DraftBench(model, enforce_eager=True)
    found = [[token] for token in bench.start(*kinds)]
    for _ in range(count - 1):
        for tokens, token in zip(found, bench.decode(*range(len(kinds))), strict=True):
            tokens.append(token)
    return found


@pytest.mark.parametrize("kind", [SAMPLED, {**SAMPLED, "logprobs": 2}, {**RULES, "logprobs": 0}])
def test_a_verifying_step_is_that_of_the_eager_path(
    random_model: str, captures: Any, graph_steps: list[int], kind: dict[str, Any]
) -> None:
    """Symptom: the drafts that count, or the rules' history, are those that the graph overwrote."""
    right = right_tokens(random_model, [kind] * 4, 6)
    drafts = {
        0: right[0][1:4],  # all right
        1: [],
        2: [*right[2][1:3], right[2][3] ^ 1, right[2][4]],  # wrong at the third
        3: [right[3][1] ^ 1, 7],  # wrong at once
    }
    graph, eager = DraftBench(random_model), DraftBench(random_model, enforce_eager=True)
    benches = [graph, eager]
    found, expected = [(bench.start(*[kind] * 4), bench.verify(drafts))[1] for bench in benches]
    assert graph_steps[-1] == 9
    result = found.result()
    assert result.token_ids == expected.result().token_ids
    assert result.token_ids == [right[0][1:5], right[1][1:2], right[2][1:4], right[3][1:2]]
    samples = [0, 1, 2, 3, 4, 5, 6, 7, 10]  # the others follow a wrong draft: 8, 9, 11, 12
    assert torch.equal(found._output.token_ids[samples], expected._output.token_ids[samples])
    assert result.details.keys() == expected.result().details.keys()
    for seq_id, details in expected.result().details.items():
        entries = result.details[seq_id].logprobs or []
        for entry, other in zip(entries, details.logprobs or [], strict=True):
            assert entry.token_ids[0] == other.token_ids[0]
            assert entry.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    torch.testing.assert_close(graph.kv()[:, :, :100], eager.kv()[:, :, :100])
    for table_idx, length in graph.lengths.items():
        known = graph.tables.token_ids[table_idx, : length + 1]
        assert torch.equal(known, eager.tables.token_ids[table_idx, : length + 1])


def test_any_steps_in_a_row_give_the_right_tokens(
    random_model: str, captures: Any, graph_steps: list[int]
) -> None:
    """Symptom: after a verifying step, the positions on the device are not those of the host."""
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, SAMPLED, RULES, {**RULES, "seed": 1}]
    right = right_tokens(random_model, kinds, 30)
    bench, rng = DraftBench(random_model), random.Random(0)
    found = [[token] for token in bench.start(*kinds)]
    rows = [0, 1, 2, 3]
    while unfinished := [row for row in rows if len(found[row]) < 24]:
        if rng.random() < 0.7:  # else the same rows go on
            rows = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        drafts = {}
        for row in rows:
            known = len(found[row])
            tokens = right[row][known : known + rng.choice([0, 0, 1, 3, 5])]
            drafts[row] = [token ^ (rng.random() < 0.3) for token in tokens]
        result = bench.verify(drafts).result()
        for row, tokens in zip(rows, result.token_ids, strict=True):
            found[row] += tokens
        rows = [row for row in rows if len(found[row]) < 24] or [0, 1, 2, 3]
    for tokens, expected in zip(found, right, strict=True):
        assert tokens == expected[: len(tokens)]
    assert len(graph_steps) > 20


def test_steps_that_fit_no_graph(random_model: str, captures: Any, graph_steps: list[int]) -> None:
    bench = DraftBench(random_model, max_num_seqs=2)
    assert bench.graphs.sizes == graph_sizes(12)
    rows = [Row(0, 0, 9, 6, True, 5), Row(1, 1, 9, 6, True, 5)]
    assert bench.graphs.fits(rows)
    assert not bench.graphs.fits([rows[0]._replace(num_scheduled_tokens=7), rows[1]])
    assert not bench.graphs.fits([*rows, Row(2, 2, 9, 1, True)])  # 13 tokens
    assert not bench.graphs.fits([Row(0, 0, 0, 2, True)])  # two known tokens
    assert not bench.graphs.fits([Row(0, 0, 0, 1, False)])


@pytest.mark.parametrize(
    ("max_num_seqs", "max_drafts", "largest"),
    [(1, 24, 25), (4, 8, 36), (512, 8, 512), (64, 8, 256)],
)
def test_sizes_of_an_engine_with_speculation(
    random_model: str,
    captures: Any,
    monkeypatch: pytest.MonkeyPatch,
    max_num_seqs: int,
    max_drafts: int,
    largest: int,
) -> None:
    made: list[list[int]] = []
    monkeypatch.setattr(GraphRunner, "capture", lambda self, sizes, **_: made.append(sizes))
    monkeypatch.setattr(Proposer, "add_costs", lambda self, info, *_: info)
    options = {"method": "ngram", "num_speculative_tokens": max_drafts}
    Bench(
        random_model,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=512,
        speculative_config=options,
    )
    assert made == [graph_sizes(largest)]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 8, 100, 128])
def test_sizes_of_a_draft_network(max_tokens: int) -> None:
    sizes = draft_graph_sizes(max_tokens)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == max_tokens
    assert all(larger <= 2 * smaller for smaller, larger in itertools.pairwise(sizes))


@pytest.fixture(scope="module")
def eager(random_model: str) -> Callable[..., tuple[Outputs, list[Sequence]]]:
    """Return a function of a workload's name that returns outputs without speculation and graphs,
    and the sequences.
    """

    @functools.cache
    def outputs(name: str) -> tuple[Outputs, list[Sequence]]:
        sequences: list[Sequence] = []
        add = Scheduler.add
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                Scheduler, "add", lambda self, seq: (sequences.append(seq), add(self, seq))[1]
            )
            return generate(random_model, WORKLOADS[name], enforce_eager=True), sequences

    return outputs


def script(monkeypatch: pytest.MonkeyPatch, sequences: list[Sequence]) -> None:
    """Let every row have drafts, of which some are wrong."""
    proposer = Scripted(0.7)
    proposer.learn(sequences)
    monkeypatch.setattr(proposers, "make_proposer", lambda *_: proposer)
    monkeypatch.setattr(DraftController, "choose", every_draft)


def every_draft(self: DraftController, candidates: Any, num_tokens: int) -> list[int]:
    return [max(0, min(limit, 5)) for _, limit in candidates]


@pytest.fixture
def followers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each step that were launched before their positions were known."""
    found: list[int] = []
    execute = ModelRunner.execute

    def watched(self: ModelRunner, schedule: Schedule) -> Any:
        found.append(sum(row.num_unverified_tokens > 0 for row in schedule.rows))
        return execute(self, schedule)

    monkeypatch.setattr(ModelRunner, "execute", watched)
    return found


@pytest.mark.parametrize(("name", "queue_depth"), [("mixed", 0), ("plain", 4)])
def test_an_engine_with_drafts_and_graphs(
    random_model: str,
    eager: Any,
    captures: Any,
    graph_steps: list[int],
    followers: list[int],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    queue_depth: int,
) -> None:
    expected, sequences = eager(name)
    script(monkeypatch, sequences)
    options = {"queue_depth": queue_depth, "speculative_config": SPECULATIVE}
    assert generate(random_model, WORKLOADS[name], **options) == expected
    assert sum(count > 0 for count in graph_steps) > 10
    if queue_depth == 0:
        assert not any(followers)
    elif name == "plain":  # in the other, most steps have a row with rules or log-probabilities
        assert sum(followers) > 20


@pytest.mark.parametrize(("name", "queue_depth"), [("plain", 1), ("mixed", 3)])
def test_an_engine_that_preempts_and_aborts(
    random_model: str,
    eager: Any,
    captures: Any,
    followers: list[int],
    preempted: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    queue_depth: int,
) -> None:
    """With few blocks, chunks of prompts and arrivals in random order."""
    expected, sequences = eager(name)
    script(monkeypatch, sequences)
    options: dict[str, Any] = {
        "num_kvcache_blocks": 16,
        "max_num_batched_tokens": 30,
        "speculative_config": SPECULATIVE,
    }
    found = generate(
        random_model, WORKLOADS[name], queue_depth=queue_depth, seed=queue_depth, **options
    )
    assert found == expected
    assert preempted
    assert any(followers)


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted, which a GPU turns off")
def test_n_grams_behind_drafts_through_the_kernels_of_a_gpu(
    random_model: str, captures: Any, followers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-gram, gather, accept and advance kernels: none knows the positions from the host."""
    patch_interpreter()
    expected = generate(random_model, REPEATING, enforce_eager=True)

    def allocate(self: Ngram, tables: DeviceTables, num_blocks: int) -> None:
        self._tables, self._uses_c, self._triton = tables, False, ngram
        self.follows_drafts = True

    monkeypatch.setattr(Ngram, "allocate", allocate)
    monkeypatch.setattr(proposers, "make_proposer", lambda *_: Ngram(1, 4))
    monkeypatch.setattr(CPU, "kernels", lambda *_, **__: StepKernels())
    monkeypatch.setattr(DraftController, "choose", every_draft)
    options: dict[str, Any] = {"queue_depth": 3, "speculative_config": SPECULATIVE}
    assert generate(random_model, REPEATING, **options) == expected
    assert sum(followers) > 20


@NEEDS_CUDA
@pytest.mark.parametrize("queue_depth", [0, 1, 4])
def test_cuda_n_grams_behind_drafts(
    gpu_model: str, followers: list[int], monkeypatch: pytest.MonkeyPatch, queue_depth: int
) -> None:
    """The same on a GPU, where launching a step waits for nothing."""
    options: dict[str, Any] = {"device": "cuda", "kvcache_block_size": None}
    expected = generate(gpu_model, REPEATING, enforce_eager=True, **options)
    monkeypatch.setattr(DraftController, "choose", every_draft)
    execute = ModelRunner.execute

    def watched(self: ModelRunner, schedule: Schedule) -> Any:
        torch.cuda.set_sync_debug_mode("error" if schedule.step_id > 0 else "default")
        try:
            return execute(self, schedule)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(ModelRunner, "execute", watched)
    options |= {"queue_depth": queue_depth, "speculative_config": SPECULATIVE}
    assert generate(gpu_model, REPEATING, **options) == expected
    assert any(followers) == (queue_depth > 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted, which a GPU turns off")
def test_through_the_kernels_of_a_gpu(
    gpu_model: str,
    captures: Any,
    monkeypatch: pytest.MonkeyPatch,
    graph_steps: list[int],
) -> None:
    """A verifying step with all Triton kernels that a GPU would run."""
    patch_interpreter()
    right = right_tokens(gpu_model, [SAMPLED, SAMPLED], 4)
    use_triton(monkeypatch)
    monkeypatch.setattr(Proposer, "add_costs", lambda self, info, *_: info)
    bench = DraftBench(gpu_model, max_num_seqs=2, max_num_batched_tokens=16)
    assert bench.start(SAMPLED, SAMPLED) == [tokens[0] for tokens in right]
    result = bench.verify({0: right[0][1:3], 1: [right[1][1] ^ 1, 5]}).result()
    assert graph_steps == [4]
    assert result.token_ids == [right[0][1:4], right[1][1:2]]
