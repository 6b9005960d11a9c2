"""A simulated engine schedules what a real one did, step for step."""

import dataclasses
import pickle
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from nanovllm import SamplingParams, demo_model
from nanovllm.apps.plan.planned_requests import PlannedRequest, Run
from nanovllm.apps.plan.replica import Replica
from nanovllm.apps.plan.step_cost import KNOTS, StepCost
from nanovllm.core.messages import Schedule, StepResult
from nanovllm.core.worker_info import WorkerInfo
from nanovllm.engine.llm_engine import Observer
from nanovllm.factory import make_engine, make_scheduler
from nanovllm.features.tiers.traffic import TierTraffic
from nanovllm.options.config import Config
from nanovllm.scheduler.scheduler import Scheduler
from tests import mixture
from tests.speculation.proposers.drafting import allow_all

SEEDS = range(20)
MUST_SHOW = {
    0: ("drafts", "loads", "preemptions"),
    1: ("accepted drafts", "in flight", "preemptions"),
    7: ("loads", "states"),
    14: ("in flight", "loads", "preemptions"),
    15: ("drafts", "in flight", "states"),
}
"""What the runs of some seeds have, so that it is tried at all."""
MAX_MODEL_LEN = 160
Arrival = tuple[int, list[int], int]
"""Before which turn of the loop a request comes, its prompt, and how many tokens it gets."""


class Recorder(Observer):
    def __init__(self) -> None:
        self.schedules: list[Schedule] = []
        self.results: list[StepResult] = []

    def scheduled(self, schedule: Schedule, scheduler: Scheduler) -> None:
        self.schedules.append(pickle.loads(pickle.dumps(schedule)))

    def waited(self, result: StepResult) -> None:
        self.results.append(result)


class RealRun(NamedTuple):
    recorder: Recorder
    outputs: list[list[int]]
    info: WorkerInfo
    num_preemptions: int


def arrivals_of(rng: random.Random) -> list[Arrival]:
    """Return requests of which some share a beginning, and some continue another."""
    prompts: list[list[int]] = []
    arrivals = []
    turn = 0
    words = rng.choice([3, 200])  # of few, n-grams repeat, and drafts are right
    for _ in range(rng.randint(8, 24)):
        turn += rng.choice([0, 0, 1, 3, 12, 60])
        prompt = list(rng.choice(prompts)) if prompts and rng.random() < 0.7 else []
        prompt += [rng.randrange(words) for _ in range(rng.randint(1, 40))]
        prompt = prompt[: MAX_MODEL_LEN - 30]
        prompts.append(prompt)
        arrivals.append((turn, prompt, rng.randint(1, 25)))
    return arrivals


def real_run(config: Config, queue_depth: int, arrivals: list[Arrival]) -> RealRun:
    engine = make_engine(config, queue_depth=queue_depth)
    recorder = Recorder()
    engine.observers.append(recorder)
    outputs: dict[Any, list[int]] = {}
    try:
        waiting, turn, ids = list(arrivals), 0, []
        while waiting or not engine.is_finished():
            while waiting and waiting[0][0] <= turn:
                _, prompt, count = waiting.pop(0)
                params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
                ids.append(engine.add_request(prompt, params))
            for output in engine.step():
                outputs[output.request_id] = list(output.outputs[0].token_ids)
            turn += 1
        tokens = [outputs[each] for each in ids]
        return RealRun(recorder, tokens, engine.worker_info, engine.stats.num_preemptions)
    finally:
        engine.shutdown()


def simulated(
    config: Config, queue_depth: int, real: RealRun, arrivals: list[Arrival]
) -> list[Schedule]:
    """Return the schedules of a replica which knows when loads ended and which drafts were right,
    for both depend on other things than the schedule.
    """
    cost = StepCost((0.0,) * len(KNOTS), 0.0, 0.0, 0.0, 0.0, 0.0, real.info, {})
    drafts, loaded = drafts_of(real.recorder), (result.loaded for result in real.recorder.results)
    replica = Replica(
        make_scheduler(config, real.info),
        cost,
        lambda *_: None,
        queue_depth=queue_depth,
        drafts=lambda row: next(drafts),
        loads=lambda transfers, begin: (list(next(loaded)), begin),
    )
    schedules: list[Schedule] = []
    waiting, turn = list(zip(arrivals, real.outputs, strict=True)), 0
    while waiting or replica.num_requests:
        while waiting and waiting[0][0][0] <= turn:
            (_, prompt, count), output = waiting.pop(0)
            runs = tuple(Run(token, 1) for token in prompt)
            replica.add(PlannedRequest(0.0, runs, count), output)
        if replica.clock < float("inf") and (schedule := replica.turn()) is not None:
            schedules.append(schedule)
        turn += 1
    return schedules


def drafts_of(recorder: Recorder) -> Iterator[tuple[int, int]]:
    """Yield how many drafts each row that might have some had, and how many were right."""
    for schedule, result in zip(recorder.schedules, recorder.results, strict=False):
        for row, tokens in zip(schedule.rows, result.token_ids, strict=True):
            if row.num_draft_tokens:
                details = result.details.get(row.seq_id)
                yield details.num_draft_tokens if details else 0, len(tokens) - 1


def comparable(schedule: Schedule) -> Schedule:
    """Leave out how tokens are drawn."""
    admissions = [
        new._replace(params=SamplingParams(), seed=0, stop_token_ids=frozenset())
        for new in schedule.admissions
    ]
    return dataclasses.replace(schedule, admissions=admissions)


@pytest.fixture(scope="module")
def mixed_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mixture.registered():
        yield mixture.make_checkpoint(tmp_path_factory.mktemp("mixture"))


@pytest.mark.parametrize("seed", SEEDS)
def test_schedules_are_equal(seed: int, mixed_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    is_mixed = seed % 4 == 3
    options: dict[str, Any] = {
        "max_num_seqs": rng.choice([2, 4, 16]),
        "max_num_batched_tokens": rng.choice([64, 100, 512] if is_mixed else [16, 64, 512]),
        "max_model_len": MAX_MODEL_LEN,
        "kvcache_block_size": 32,
        "num_kvcache_blocks": rng.choice([34, 60] if is_mixed else [6, 6, 9, 40]),
        "enable_prefix_caching": rng.random() < 0.8,
    }
    if rng.random() < 0.6 and options["enable_prefix_caching"]:
        options["kv_offload_gib"] = 0.05
    if rng.random() < 0.5:
        options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 4}
    queue_depth = rng.choice([0, 0, 1])
    monkeypatch.setattr(TierTraffic, "pays", lambda self, *_: True)
    config = Config(model=mixed_model if is_mixed else demo_model.MODEL, **options)
    arrivals = arrivals_of(rng)
    for _ in range(3):  # whether pages are in host memory in time depends on the machine
        allow_all(monkeypatch, seed)
        real = real_run(config, queue_depth, arrivals)
        allow_all(monkeypatch, seed)
        found = simulated(config, queue_depth, real, arrivals)
        assert len(found) == len(real.recorder.schedules)
        for theirs, ours in zip(real.recorder.schedules, found, strict=True):
            assert comparable(theirs) == comparable(ours)
        drafts = list(drafts_of(real.recorder))
        shown = {
            "preemptions": real.num_preemptions,
            "loads": any(result.loaded for result in real.recorder.results),
            "drafts": drafts,
            "accepted drafts": any(num_right for _, num_right in drafts),
            "states": real.info.kv.state_pages,
            "in flight": queue_depth,
        }
        missing = [name for name in MUST_SHOW.get(seed, ()) if not shown[name]]
        if not missing:
            return
    pytest.fail(f"three runs did not show {missing}")
