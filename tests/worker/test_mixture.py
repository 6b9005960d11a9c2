"""A model of full and latent attention, windows and states beside float64: see tests/mixture.py.

Runs hand-made schedules: tests/test_mixture.py has the engine.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from nanovllm.core.messages import Admission, NewBlocks, Row, Schedule
from nanovllm.core.worker_info import num_tables
from nanovllm.kernels.cpu.library import library
from nanovllm.loading.hub import configured_checkpoint
from nanovllm.options.config import Config
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.parallel.rank_setup import check_networks, make_runner
from nanovllm.platform.cpu import CPU
from nanovllm.worker.kv_cache import require_one_sequence
from nanovllm.worker.model_runner import ModelRunner
from nanovllm.worker.warm_up import allocate, measure
from tests import mixture
from tests.helpers import random_prompt
from tests.models.comparison import run_in_chunks

GREEDY = SamplingParams(temperature=0.0, logprobs=5)
BLOCK_SIZE = 32
WIDTH = 4
"""Blocks of a block table."""


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    with mixture.registered():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return mixture.make_checkpoint(tmp_path_factory.mktemp("mixture"))


def prompts_of(lengths: list[int]) -> list[list[int]]:
    rng = random.Random(1)
    return [random_prompt(rng, length) for length in lengths]


@pytest.mark.parametrize("block_size", [1, 16])
def test_logits_are_those_of_float64(model: str, block_size: int) -> None:
    """Prompts in two mixed steps, cut inside windows, blocks and what a convolution remembers."""
    prompts = prompts_of([1, 2, 23, 64, 120])
    weights = mixture.read_weights(model)
    found = run_in_chunks(model, prompts, [1, 1, 22, 9, 61], block_size)
    for prompt, own in zip(prompts, found, strict=True):
        expected = mixture.logits(weights, prompt)
        assert (own - expected).abs().max() < 1e-4 * expected.abs().max(), len(prompt)


def make_model_runner(model: str, **options: Any) -> ModelRunner:
    config = Config(
        model,
        device="cpu",
        max_model_len=BLOCK_SIZE * WIDTH,
        kvcache_block_size=BLOCK_SIZE,
        num_kvcache_blocks=400,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        **options,
    )
    target, _ = check_networks(config, configured_checkpoint(config))
    runner = make_runner(target, CPU())
    info = measure(runner)
    require_one_sequence(info)
    assert [group.window for group in info.kv.windows] == [8, 40]
    assert info.kv.state_pages > 0
    allocate(runner, info)
    return runner


def admitting(runner: ModelRunner, prompts: list[list[int]]) -> Schedule:
    """Return a step that computes whole prompts, each with all pages that it will ever need."""
    attention = runner.network.attention
    tables = num_tables(attention.layout.windows)
    pages = iter(random.Random(2).sample(range(400), 400))
    admissions = []
    new_blocks = []
    rows = []
    fresh: list[int] = []
    for index, prompt in enumerate(prompts):
        table = [next(pages) for _ in range(WIDTH)]
        admissions.append(
            Admission(index, index, prompt, len(prompt), table, GREEDY, 0, frozenset(), ())
        )
        for further in range(1, tables):
            own = [next(pages) for _ in range(WIDTH)]
            new_blocks.append(NewBlocks(index, further * WIDTH, own))
        state = [next(pages) for _ in range(attention.states.num_pages)]
        new_blocks.append(NewBlocks(index, tables * WIDTH, state))
        fresh += state
        rows.append(Row(index, index, 0, len(prompt), samples=True))
    return Schedule(0, admissions, new_blocks, rows, fresh)


def test_the_runner_generates_the_likeliest_tokens(model: str) -> None:
    runner = make_model_runner(model)
    texts = prompts_of([1, 9, 55])
    schedule = admitting(runner, texts)
    for step in range(1, 20):
        result = runner.execute(schedule).result()
        for text, [token] in zip(texts, result.token_ids, strict=True):
            text.append(token)
        rows = [Row(i, i, len(text) - 1, 1, samples=True) for i, text in enumerate(texts)]
        schedule = Schedule(step, [], [], rows)
    weights = mixture.read_weights(model)
    for text in texts:
        assert text[-19:] == mixture.logits(weights, text)[-20:-1].argmax(-1).tolist()


@pytest.mark.skipif(library() is None, reason="no compiler here")
def test_a_recording_computes_the_same_bits(model: str) -> None:
    """Small steps in bfloat16 are replays."""
    found = []
    for eager in (False, True):
        runner = make_model_runner(model, dtype="bfloat16", enforce_eager=eager)
        assert bool(runner.step_runners) != eager
        schedule = admitting(runner, prompts_of([1, 9, 55]))
        found.append([])
        for step in range(1, 20):
            result = runner.execute(schedule).result()
            found[-1].append((result.token_ids, result.details))
            rows = [row._replace(num_computed_tokens=row.end) for row in schedule.rows]
            rows = [row._replace(num_scheduled_tokens=1) for row in rows]
            schedule = Schedule(step, [], [], rows)
    assert found[0] == found[1]
    assert all(len(details) == 3 for _, details in found[0])
