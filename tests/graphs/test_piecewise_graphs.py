"""Steps with prompts, whose forward pass is graphs with attention between them: the same tokens, KV
and hidden states as without. The graphs are recordings that run on the CPU.
"""

from typing import Any

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.attention.batch import Batch
from nanovllm.core.messages import Admission, Row, Schedule
from nanovllm.features.graphs.piecewise_graphs import PiecewiseGraphs, piece_sizes
from nanovllm.features.graphs.step_runners import StepRunners
from nanovllm.features.speculation.proposers.eagle3_head import capture_features
from nanovllm.models.decoder import Decoder, DecoderForCausalLM
from tests.graphs.fake_graphs import FakeCapture
from tests.graphs.test_cuda_graph import BLOCK_SIZE, Bench

GREEDY = SamplingParams(temperature=0.0, max_tokens=50, logprobs=1, prompt_logprobs=1)
PADDING_SLOT = 100 * BLOCK_SIZE
"""Of a bench: the first slot of the block that the scheduler does not know of."""


@pytest.fixture
def model_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each forward pass that runs kernel by kernel, or that a graph captures."""
    found: list[int] = []
    forward = Decoder.forward

    def watched(self: Decoder, batch: Batch) -> torch.Tensor:
        found.append(len(batch.input_ids))
        return forward(self, batch)

    monkeypatch.setattr(Decoder, "forward", watched)
    return found


@pytest.mark.parametrize(
    ("max_tokens", "expected"),
    [
        (1, [1]),
        (16, [16]),
        (1300, [16, 32, 64, 128, *range(256, 512, 64), *range(512, 1281, 128), 1300]),
        (
            16384,
            [
                *(16, 32, 64, 128, *range(256, 512, 64), *range(512, 1281, 128)),
                *(1536, 1792, 2048, 2560, 3072, 3584, 4096),
            ],
        ),
    ],
)
def test_sizes(max_tokens: int, expected: list[int]) -> None:
    assert piece_sizes(max_tokens) == expected


def admission(table_idx: int, num_tokens: int) -> Admission:
    prompt = [(table_idx * 17 + i * 3) % 1003 for i in range(num_tokens)]
    blocks = list(range(table_idx * 16, table_idx * 16 + 16))
    stops = frozenset[int]()
    return Admission(table_idx, table_idx, prompt, num_tokens, blocks, GREEDY, 5, stops, ())


def row(table_idx: int, start: int, size: int, *, samples: bool = True) -> Row:
    return Row(table_idx, table_idx, start, size, samples)


STEPS = [
    Schedule(0, [admission(0, 21)], [], [row(0, 0, 21)]),
    Schedule(1, [admission(1, 40)], [], [row(0, 21, 1), row(1, 0, 14, samples=False)]),
    Schedule(2, [admission(2, 3)], [], [row(1, 14, 26), row(2, 0, 3), row(0, 22, 1)]),
    Schedule(3, [admission(3, 64)], [], [row(3, 0, 16, samples=False)]),  # no padding
    Schedule(4, [], [], [row(3, 16, 48), row(0, 23, 1), row(1, 40, 1), row(2, 3, 1)]),
]
"""Prompts whole and in chunks, beside single tokens: 21, 15, 30, 16 and 51 tokens."""


def test_prompts_run_in_pieces_and_give_the_same(
    random_model: str, captures: Any, model_calls: list[int]
) -> None:
    bench, eager = Bench(random_model), Bench(random_model, enforce_eager=True)
    model_calls.clear()
    for schedule in STEPS:
        found = bench.runner.execute(schedule).result()
        assert not model_calls
        expected = eager.runner.execute(schedule).result()
        assert model_calls.pop() == schedule.num_tokens
        assert found.token_ids == expected.token_ids
        assert found.details.keys() == expected.details.keys()
        for seq_id, details in found.details.items():
            others = expected.details[seq_id]
            assert (details.logprobs is None) == (others.logprobs is None)
            for (place, entry), (_, wanted) in zip(
                details.prompt_logprobs or [], others.prompt_logprobs or [], strict=True
            ):
                assert entry.token_ids == wanted.token_ids, place
                assert entry.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
    torch.testing.assert_close(bench.kv()[:, :, :100], eager.kv())
    assert torch.equal(bench.tables.token_ids[:-1], eager.tables.token_ids[:-1])


def test_a_step_larger_than_the_graphs_runs_kernel_by_kernel(
    random_model: str, captures: Any, model_calls: list[int]
) -> None:
    bench = Bench(random_model, max_num_batched_tokens=20)
    model_calls.clear()
    bench.runner.execute(STEPS[1])
    assert not model_calls
    bench.runner.execute(STEPS[0])
    assert model_calls == [21]


def test_stored_hidden_states_are_those_of_the_step(random_model: str, captures: Any) -> None:
    """Symptom: padding overwrites hidden states that an earlier step stored for a draft head."""

    def run(**options: Any) -> torch.Tensor:
        bench = Bench(random_model, **options)
        network = bench.runner.network
        assert isinstance(network.model, DecoderForCausalLM)
        width = 2 * network.model_config.hidden_size
        pool = torch.zeros(PADDING_SLOT + BLOCK_SIZE, width)
        capture_features(network.model, [0, 1], pool)
        if bench.graphs is not None:
            with torch.inference_mode():
                steps = StepRunners(network, 64)
                bench.runner.step_runners = steps.make(bench.tables, accepts=False)
        for schedule in STEPS[:3]:
            bench.runner.execute(schedule)
        return pool[:PADDING_SLOT]

    stored = run()
    assert stored.any(1).sum() == 23 + 40 + 3
    torch.testing.assert_close(stored, run(enforce_eager=True))


class FakeModel:
    """Counts the tokens of its calls; its time is what the test says."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, batch: Batch) -> torch.Tensor:
        self.calls.append(len(batch.input_ids))
        return batch.input_ids[:, None].float()


@pytest.mark.parametrize(
    ("eager_seconds", "kept"),
    [
        ([5.0, 5.0, 5.0], [16, 32, 64]),
        ([5.0, 0.5, 5.0], [16]),  # up to the first that is slower
        ([0.5, 5.0, 5.0], []),
        ([5.0, 5.0, 1.0], [16, 32]),
    ],
)
def test_only_faster_graphs_are_kept(eager_seconds: list[float], kept: list[int]) -> None:
    """Each size is timed with its fewest tokens, for which it pads the most."""
    model = FakeModel()
    sizes: list[int] = []
    left = iter(eager_seconds)

    def make_rows(num_tokens: int) -> list[Row]:
        return [Row(0, 0, 0, num_tokens, samples=False)]

    def make_batch(batch_rows: list[Row]) -> Batch:
        num_tokens = batch_rows[0].num_scheduled_tokens
        sizes.append(num_tokens)
        rows, ids = torch.zeros(1, dtype=torch.int32), torch.arange(num_tokens)
        return Batch(ids, ids, ids, rows, rows, rows)

    def measure(run: Any, measured: list[int]) -> tuple[tuple[int, float], ...]:
        found = []
        for size in measured:
            before = len(model.calls)
            assert run(size)[:, 0].tolist() == list(range(size))
            # a replay does not call the model
            found.append((size, next(left) if len(model.calls) > before else 1.0))
        return tuple(found)

    graphs = PiecewiseGraphs(model, make_batch, FakeCapture(), 0, torch.device("cpu"))
    graphs.capture([16, 32, 64])
    model.calls.clear()
    graphs.keep_faster(make_rows, measure)
    assert sizes == [2, 17, 33]
    assert model.calls == sizes
    assert graphs.sizes == kept
    assert [graphs.fits(make_rows(n)) for n in (1, 16, 17, 64, 65)] == [
        n <= max(kept, default=0) for n in (1, 16, 17, 64, 65)
    ]
