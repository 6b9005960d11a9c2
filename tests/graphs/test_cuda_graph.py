"""Decode steps replayed as graphs give the same tokens as eager steps, and write no memory of other
sequences. The graphs are recordings that run on the CPU; with a GPU, real graphs are tested too.
"""

import gc
import random
import sys
from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.core.messages import Admission, NewBlocks, Row, Schedule
from nanovllm.core.worker_info import WorkerInfo
from nanovllm.factory import make_engine
from nanovllm.features.graphs.cuda_graph import GraphRunner, graph_sizes
from nanovllm.loading.hub import open_checkpoint, weight_files
from nanovllm.models.model_config import ModelConfig
from nanovllm.options.config import Config
from nanovllm.parallel.rank_setup import make_runner
from nanovllm.platform.cpu import CPU
from nanovllm.testing.invariants import check_scheduler
from nanovllm.worker import model_runner
from nanovllm.worker.hooks import LAPS
from nanovllm.worker.model_loader import NetworkSpec
from nanovllm.worker.model_runner import ModelRunner
from nanovllm.worker.step_output import StepOutput
from nanovllm.worker.step_sampler import StepSampler
from nanovllm.worker.warm_up import allocate
from tests.graphs.fake_graphs import FakeCapture, use_triton
from tests.kernels.triton.interpreter import patch_interpreter

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
BLOCK_SIZE = 4
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 64,
    "kvcache_block_size": BLOCK_SIZE,
    "num_kvcache_blocks": 100,
    "max_num_seqs": 6,
}
PLAIN = [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.2, "min_p": 0.1}]
OTHERS: list[dict[str, Any]] = [
    {"temperature": 0.9, "top_k": 5},
    {"temperature": 0.9, "top_p": 0.7},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.7, "logprobs": 2},
    {"temperature": 0.0, "logprobs": 0},
]

Workload = tuple[list[list[int]], list[SamplingParams]]
Outputs = list[tuple[list[int], str | None]]


def make_workload(kinds: list[dict[str, Any]], count: int) -> Workload:
    """Return `count` prompts of 1 to 20 tokens and params for 1 to 24 tokens. Many outputs end at a
    stop token.
    """
    rng = random.Random(len(kinds))
    prompts = [[rng.randrange(1003) for _ in range(rng.randint(1, 20))] for _ in range(count)]
    params = [
        SamplingParams(
            seed=index,
            max_tokens=rng.randint(1, 24),
            stop_token_ids=tuple(range(rng.choice([0, 100]))),
            **kinds[index % len(kinds)],
        )
        for index in range(count)
    ]
    return prompts, params


WORKLOADS = {"plain": make_workload(PLAIN, 12), "mixed": make_workload(PLAIN + OTHERS, 16)}


def generate(
    model: str,
    workload: Workload,
    *,
    queue_depth: int | None = None,
    seed: int | None = None,
    **options: Any,
) -> Outputs:
    """Return the outputs of a workload.

    All requests are added at once. With `seed`, they arrive over time in random order, and some are
    aborted and added again.
    """
    prompts, params = workload
    engine = make_engine(Config(model=model, **{**OPTIONS, **options}), queue_depth=queue_depth)
    rng = random.Random(seed)
    waiting = list(range(len(prompts)))
    if seed is not None:
        rng.shuffle(waiting)
    index_of: dict[int, int] = {}
    found: dict[int, tuple[list[int], str | None]] = {}
    while waiting or not engine.is_finished():
        for _ in range(len(waiting) if seed is None else min(len(waiting), rng.choice([0, 0, 3]))):
            index = waiting.pop()
            index_of[engine.add_request(prompts[index], params[index])] = index
        if seed is not None and index_of and rng.random() < 0.1:
            aborted = rng.choice(list(index_of))
            if engine.abort(aborted) is not None:
                waiting.append(index_of.pop(aborted))
        for output in engine.step():
            found[index_of[output.request_id]] = (output.token_ids, output.finish_reason)
            check_logprobs(output, params[index_of[output.request_id]])
        check_scheduler(engine.scheduler)
    engine.shutdown()
    return [found[index] for index in range(len(prompts))]


def check_logprobs(output: Any, params: SamplingParams) -> None:
    """Check that each token has log-probabilities, and that a greedy token has rank 1."""
    logprobs = output.outputs[0].logprobs
    assert (logprobs is None) == (params.logprobs is None)
    for token, entries in zip(output.token_ids, logprobs or [], strict=logprobs is not None):
        if params.is_greedy:
            assert entries[token].rank == 1


@pytest.fixture(params=WORKLOADS)
def workload(request: pytest.FixtureRequest) -> Workload:
    return WORKLOADS[request.param]


@pytest.fixture(scope="module")
def eager(random_model: str) -> Callable[[Workload], Outputs]:
    """Return a function that returns the outputs of a workload in eager mode, and caches them."""
    known: dict[int, Outputs] = {}

    def outputs(workload: Workload) -> Outputs:
        if id(workload) not in known:
            known[id(workload)] = generate(random_model, workload, enforce_eager=True)
        return known[id(workload)]

    return outputs


def num_replays(captures: list[FakeCapture]) -> int:
    return sum(graph.num_replays for capture in captures for graph in capture.graphs)


@pytest.mark.parametrize("max_rows", [1, 3, 4, 9, 65, 512, 513, 700])
def test_sizes(max_rows: int) -> None:
    """Symptom: if max_num_seqs is no multiple of 8, the largest batch has no graph (nano-vllm)."""
    sizes = graph_sizes(max_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_rows
    assert {1, 2, 4, *range(8, 513, 8)} & set(range(max_rows + 1)) <= set(sizes)
    assert len(sizes) <= 3 + 64 + -(-max_rows // 64)


@pytest.mark.parametrize("queue_depth", [1, 3])
def test_same_tokens_whatever_comes_and_goes(
    random_model: str, workload: Workload, eager: Any, captures: Any, queue_depth: int
) -> None:
    outputs = generate(random_model, workload, queue_depth=queue_depth, seed=queue_depth)
    assert outputs == eager(workload)
    assert num_replays(captures) > 10


@pytest.mark.parametrize("queue_depth", [0, 4])
def test_same_tokens_with_preemption(
    random_model: str,
    workload: Workload,
    eager: Any,
    captures: Any,
    queue_depth: int,
    preempted: list[Any],
) -> None:
    options = {"num_kvcache_blocks": 16, "queue_depth": queue_depth}
    assert generate(random_model, workload, **options) == eager(workload)
    assert preempted
    assert num_replays(captures) > 10


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "options", [{"max_num_seqs": 1}, {"max_num_seqs": 24}, {"max_num_batched_tokens": 5}]
)
def test_same_tokens_at_any_size(
    random_model: str, workload: Workload, eager: Any, captures: Any, options: dict[str, int]
) -> None:
    assert generate(random_model, workload, queue_depth=1, **options) == eager(workload)
    assert num_replays(captures)


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted, which a GPU turns off")
def test_same_tokens_through_the_kernels_of_a_gpu(
    gpu_model: str, captures: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step with all Triton kernels that a GPU would run: gather, KV store, attention, sampling
    and advance.
    """
    patch_interpreter()
    prompts = [[1, 2, 3], [6] * 6]
    kinds = [{"temperature": 0.0}, {"top_k": 20, "top_p": 0.9}]
    params = [SamplingParams(seed=i, max_tokens=5, **kind) for i, kind in enumerate(kinds)]
    options = {"max_num_seqs": 2, "kvcache_block_size": 16, "num_kvcache_blocks": 12}
    expected = generate(gpu_model, (prompts, params), enforce_eager=True, **options)
    use_triton(monkeypatch)
    assert generate(gpu_model, (prompts, params), queue_depth=1, **options) == expected
    assert num_replays(captures) > 3


def test_enforce_eager_captures_nothing(random_model: str, captures: Any) -> None:
    generate(random_model, WORKLOADS["plain"], enforce_eager=True)
    assert not captures


def test_capturing_shows_progress(
    random_model: str,
    captures: Any,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    LLM(random_model, **OPTIONS).shutdown()
    shown = capfd.readouterr()
    assert "Capturing CUDA graphs: 100%" in shown.err
    assert shown.out == ""


def test_the_user_gets_every_block_asked_for(
    make_llm: Any, random_model: str, captures: Any
) -> None:
    llm = make_llm(random_model, **OPTIONS)
    assert llm.engine.worker_info.num_blocks == 100
    assert llm.engine.executor._runner.network.attention.layers[0].kv_cache.shape[1] == 101


def test_del_llm_frees_graphs_and_pool(random_model: str, captures: Any) -> None:
    """Symptom: graphs and runner form a reference cycle, and memory is freed only by the garbage
    collector.
    """
    gc.collect()
    gc.disable()
    try:
        llm = LLM(random_model, **OPTIONS)
        llm.generate([[1, 2, 3]] * 3, SamplingParams(max_tokens=4), use_tqdm=False)
        before = Counter(type(x).__name__ for x in gc.get_objects())
        captures.clear()
        del llm
        after = Counter(type(x).__name__ for x in gc.get_objects())
    finally:
        gc.enable()
    owners = ("LLMEngine", "ModelRunner", "GraphRunner", "PiecewiseGraphs", "DeviceTables")
    for name in (*owners, "Attention"):
        assert before[name] == after[name] + (3 if name == "Attention" else 1)


class Bench:
    """A runner with graphs that executes hand-made schedules; each table row holds one prompt."""

    def __init__(self, model: str, **options: Any) -> None:
        checkpoint = open_checkpoint(model, None)
        config = Config(model=model, **{**OPTIONS, **options})
        model_config = ModelConfig.from_hf(checkpoint.config, config.dtype)
        files = weight_files(checkpoint, model, None)
        self.runner = make_runner(NetworkSpec(config, model_config, files), CPU())
        allocate(self.runner, WorkerInfo(100, BLOCK_SIZE, 64, model_config.vocab_size, 64))
        self.tables = self.runner.tables
        self.graphs: Any = next(iter(self.runner.step_runners), None)  # None with enforce_eager
        self.lengths: dict[int, int] = {}

    def admit(
        self, table_idx: int, prompt: list[int], params: SamplingParams, blocks: list[int]
    ) -> int:
        """Compute a prompt in table row `table_idx` and return its first sampled token."""
        admission = Admission(
            table_idx, table_idx, prompt, len(prompt), blocks, params, 5, frozenset(), ()
        )
        self.lengths[table_idx] = len(prompt)
        row = Row(table_idx, table_idx, 0, len(prompt), samples=True)
        return self.execute(Schedule(0, [admission], [], [row]))[0]

    def decode(self, *table_indices: int, new_blocks: tuple[NewBlocks, ...] = ()) -> list[int]:
        """Compute the last token of each table row and return the next ones."""
        rows = []
        for table_idx in table_indices:
            rows.append(Row(table_idx, table_idx, self.lengths[table_idx], 1, samples=True))
            self.lengths[table_idx] += 1
        return self.execute(Schedule(0, [], list(new_blocks), rows))

    def execute(self, schedule: Schedule) -> list[int]:
        return list(chain.from_iterable(self.runner.execute(schedule).result().token_ids))

    def kv(self) -> torch.Tensor:
        """Every layer's cache: [layers, 2, blocks, block_size, heads, head_dim]."""
        layers = self.runner.network.attention.layers
        return torch.stack([layer.kv_cache.clone() for layer in layers])


@pytest.fixture
def bench(random_model: str, captures: Any) -> Bench:
    return Bench(random_model)


GREEDY = SamplingParams(temperature=0.0, max_tokens=50)


def fill(bench: Bench, num_table_rows: int) -> list[list[int]]:
    """Admit `num_table_rows` prompts of 5 to 10 tokens with 10 blocks each; return their tokens."""
    tokens = []
    for table_idx in range(num_table_rows):
        prompt = [table_idx * 10 + i for i in range(5 + table_idx)]
        blocks = list(range(table_idx * 10, table_idx * 10 + 10))
        tokens.append([*prompt, bench.admit(table_idx, prompt, GREEDY, blocks)])
    return tokens


def test_padding_touches_nothing_of_others(bench: Bench) -> None:
    """Symptom: rows that pad a batch overwrite the KV or a token of a sequence."""
    fill(bench, 6)
    before, tokens = bench.kv(), bench.tables.token_ids.clone()
    for _ in range(3):
        bench.decode(1, 3, 4, 0, 5)  # five rows, replayed by the graph of six rows
    changed = (bench.kv() != before).flatten(-2).any(-1).any(0).any(0)  # [blocks, block_size]
    positions = [(table_idx, 5 + table_idx + i) for table_idx in (0, 1, 3, 4, 5) for i in range(3)]
    places = {(table_idx * 10 + position // 4, position % 4) for table_idx, position in positions}
    scratch = (100, 0)  # padding writes there, perhaps the same numbers as before
    assert {(block, place) for block, place in changed.nonzero().tolist()} - {scratch} == places
    written = (bench.tables.token_ids != tokens).nonzero().tolist()
    scratch_idx = 6
    assert {table_idx for table_idx, _ in written} <= {0, 1, 3, 4, 5, scratch_idx}
    for table_idx, column in written:
        assert (table_idx, column - 1) in positions or (table_idx, column) == (scratch_idx, 1)


@pytest.mark.parametrize("stale", [-1, 2**31 - 1, 3])
def test_stale_columns_are_harmless(bench: Bench, stale: int) -> None:
    """Symptom: a step reads old block ids of a table row, or columns past its last block."""
    alone = [bench.admit(0, [1, 2, 3], GREEDY, [7])]
    alone += [bench.decode(0, new_blocks=(NewBlocks(0, 1, [8]),))[0]]
    alone += [bench.decode(0)[0] for _ in range(3)]
    fill(bench, 6)
    with torch.inference_mode():
        bench.tables.block_tables[:6] = stale
    again = [bench.admit(0, [1, 2, 3], GREEDY, [97])]
    again += [bench.decode(0, new_blocks=(NewBlocks(0, 1, [91]),))[0]]
    again += [bench.decode(0)[0] for _ in range(3)]
    assert again == alone


def test_a_full_sequence_overruns_nothing(bench: Bench) -> None:
    """Symptom: a graph reads past the end of its block table (nano-vllm)."""
    blocks = list(range(30, 46))
    prompt = [i % 1003 for i in range(60)]
    bench.admit(5, prompt, GREEDY, blocks)  # the last table row, next to the scratch table row
    before = bench.tables._table[6].clone()
    for _ in range(4):
        bench.decode(5)
    assert bench.lengths[5] == 64
    assert torch.equal(bench.tables._table[6], before)
    assert bench.tables.block_tables[5].tolist() == blocks


def test_a_step_that_goes_on_uploads_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(bench, 4)
    uploads: list[str] = []
    upload = GraphRunner._upload
    monkeypatch.setattr(
        GraphRunner, "_upload", lambda *args: (uploads.append("state"), upload(*args))
    )
    to_tables = CPU.upload
    monkeypatch.setattr(
        CPU, "upload", lambda *args: (uploads.append("tables"), to_tables(*args))[1]
    )

    def during(*table_indices: int, **options: Any) -> list[str]:
        uploads.clear()
        bench.decode(*table_indices, **options)
        return list(uploads)

    assert during(0, 1, 2) == ["state"]
    assert during(0, 1, 2) == []
    assert during(0, 1, 2) == []
    assert during(0, 1, 2, new_blocks=(NewBlocks(0, 2, [60]), NewBlocks(1, 2, [61]))) == ["tables"]
    assert during(0, 1) == ["state"]  # one row fewer
    assert during(0, 1) == []
    assert during(0, 3) == ["state"]  # the same number of rows, but another row
    assert during(3, 0) == ["state"]
    assert during(3, 0) == []


def test_a_failed_replay_is_not_believed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: after an error, the positions on the device differ from the host's copy."""
    fill(bench, 2)
    expected = [bench.decode(0, 1), bench.decode(0, 1), bench.decode(0, 1)]
    fill(bench, 2)
    assert bench.decode(0, 1) == expected[0]
    graph, logits = bench.graphs._graphs[2]

    class Failing:
        def replay(self) -> None:
            bench.graphs._state.fill_(3)  # a wrong position for every row
            raise ZeroDivisionError

    bench.graphs._graphs[2] = (Failing(), logits)
    with pytest.raises(ZeroDivisionError):
        bench.decode(0, 1)
    bench.graphs._graphs[2] = (graph, logits)
    bench.lengths = {0: 6, 1: 7}
    assert [bench.decode(0, 1), bench.decode(0, 1)] == expected[1:]


def test_no_step_overwrites_tokens_that_nobody_has_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: a deep queue reads the tokens of a later step, where steps write to the host."""

    class Event:
        def record(self) -> None: ...

        def synchronize(self) -> None: ...

    fill(bench, 2)
    expected = [bench.decode(0, 1) for _ in range(3 * LAPS)]
    fill(bench, 2)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(
        model_runner, "StepOutput", lambda *args, **kw: StepOutput(*args, **{**kw, "on_host": True})
    )
    pending = []
    for _ in range(3 * LAPS):
        rows = [Row(i, i, bench.lengths[i], 1, samples=True) for i in range(2)]
        bench.lengths = {i: length + 1 for i, length in bench.lengths.items()}
        pending.append(bench.runner.execute(Schedule(0, [], [], rows)))
    assert [[token for (token,) in step.result().token_ids] for step in pending] == expected


def test_only_rules_and_logprobs_leave_the_graph(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without rules and logprobs, all rows take the graph's tokens. With one such row in the batch,
    the batch is sampled again.
    """
    kinds = [*PLAIN, *OTHERS[:2], {"top_k": 20, "top_p": 0.9, "min_p": 0.01}]
    for table_idx, kind in enumerate(kinds):
        blocks = list(range(table_idx * 10, table_idx * 10 + 10))
        bench.admit(table_idx, [table_idx, 1], SamplingParams(max_tokens=50, **kind), blocks)
    sampled: list[int] = []
    sample = StepSampler.sample
    monkeypatch.setattr(
        StepSampler, "sample", lambda *args: (sampled.append(len(args[0])), sample(*args))[1]
    )
    for _ in range(3):
        bench.decode(*range(len(kinds)))
    assert not sampled
    for kind in OTHERS[2:]:
        bench.admit(0, [2, 3], SamplingParams(max_tokens=50, **kind), list(range(10)))
        sampled.clear()
        bench.decode(0, 1)
        assert sampled == [2]


@NEEDS_CUDA
@pytest.mark.parametrize("queue_depth", [0, 1, 4])
def test_cuda_same_tokens(gpu_model: str, workload: Workload, queue_depth: int) -> None:
    options = {"device": "cuda", "queue_depth": queue_depth, "kvcache_block_size": None}
    expected = generate(gpu_model, workload, enforce_eager=True, **options)
    assert generate(gpu_model, workload, **options) == expected
    assert generate(gpu_model, workload, seed=queue_depth, **options) == expected


@NEEDS_CUDA
def test_cuda_graphs_are_used_and_freed(gpu_model: str) -> None:
    """Symptom: after `del llm` the graphs' pool, the KV pool or the weights stay on the GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    free_before = torch.cuda.mem_get_info()[0]
    llm = LLM(gpu_model, dtype="float32", kv_cache_memory_bytes=2**30, max_num_seqs=64)
    runner = llm.engine.executor._runner  # type: ignore[attr-defined]
    graphs = runner.step_runners[0]
    assert graphs.sizes == graph_sizes(64)
    assert graphs._tokens.is_pinned()  # the last kernel writes to the host's memory
    llm.generate([[1, 2, 3]] * 5, SamplingParams(max_tokens=8), use_tqdm=False)
    del llm, runner, graphs
    torch.cuda.empty_cache()
    # cuBLAS keeps a workspace of 32 MiB for each of the two streams that all engines share.
    assert torch.cuda.memory_allocated() - before < 2**27
    assert free_before - torch.cuda.mem_get_info()[0] < 2**29


@NEEDS_CUDA
def test_cuda_launching_a_step_waits_for_nothing(
    gpu_model: str, make_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = ModelRunner.execute

    def watched(*args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return execute(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    llm = make_llm(gpu_model, device="cuda", max_num_seqs=4)
    monkeypatch.setattr(ModelRunner, "execute", watched)
    limits = {"min_tokens": 4, "logit_bias": {3: 1.0}, "allowed_token_ids": [3, 7, 9]}
    for kind in [*PLAIN, *OTHERS, {"presence_penalty": 0.5, "prompt_logprobs": 1}, limits]:
        params = SamplingParams(max_tokens=6, **kind)
        llm.generate([[1, 2, 3], [4] * 20, [5] * 40], params, use_tqdm=False)
