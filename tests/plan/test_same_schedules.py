"""A simulated engine schedules what a real one did, step for step."""

import dataclasses
import pickle
import random
from typing import Any

import pytest

from nanovllm import SamplingParams, demo_model
from nanovllm.apps.plan.planned_requests import PlannedRequest, Run
from nanovllm.apps.plan.replica import Replica
from nanovllm.apps.plan.step_cost import KNOTS, StepCost
from nanovllm.core.messages import Schedule
from nanovllm.core.worker_info import WorkerInfo
from nanovllm.engine.llm_engine import Observer
from nanovllm.factory import make_engine, make_scheduler
from nanovllm.options.config import Config
from nanovllm.scheduler.scheduler import Scheduler

Arrival = tuple[int, list[int], int]
"""Before which turn of the loop a request comes, its prompt, and how many tokens it gets."""


class Recorder(Observer):
    def __init__(self) -> None:
        self.schedules: list[Schedule] = []

    def scheduled(self, schedule: Schedule, scheduler: Scheduler) -> None:
        self.schedules.append(pickle.loads(pickle.dumps(schedule)))


def arrivals_of(rng: random.Random, longest: int) -> list[Arrival]:
    """Return requests of which some share a beginning, and some continue another."""
    prompts: list[list[int]] = []
    arrivals = []
    turn = 0
    for _ in range(rng.randint(8, 24)):
        turn += rng.choice([0, 0, 1, 3, 12, 60])
        prompt = list(rng.choice(prompts)) if prompts and rng.random() < 0.5 else []
        prompt += [rng.randrange(200) for _ in range(rng.randint(1, 40))]
        prompt = prompt[: longest - 30]
        prompts.append(prompt)
        arrivals.append((turn, prompt, rng.randint(1, 25)))
    return arrivals


def real_run(
    config: Config, arrivals: list[Arrival]
) -> tuple[list[Schedule], list[list[int]], WorkerInfo]:
    engine = make_engine(config)
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
        return recorder.schedules, [outputs[each] for each in ids], engine.worker_info
    finally:
        engine.shutdown()


def simulated(
    config: Config, info: WorkerInfo, arrivals: list[Arrival], outputs: list[list[int]]
) -> list[Schedule]:
    cost = StepCost((0.0,) * len(KNOTS), 0.0, 0.0, 0.0, 0.0, info, {})
    replica = Replica(make_scheduler(config, info), cost, lambda answered: None)
    schedules: list[Schedule] = []
    waiting, turn = list(zip(arrivals, outputs, strict=True)), 0
    while waiting or replica.num_requests:
        while waiting and waiting[0][0][0] <= turn:
            (_, prompt, count), output = waiting.pop(0)
            runs = tuple(Run(token, 1) for token in prompt)
            replica.add(PlannedRequest(0.0, runs, count), output)
        if replica.clock < float("inf") and (schedule := replica.turn()) is not None:
            schedules.append(schedule)
        turn += 1
    return schedules


def comparable(schedule: Schedule) -> Schedule:
    """Leave out how tokens are drawn."""
    admissions = [
        new._replace(params=SamplingParams(), seed=0, stop_token_ids=frozenset())
        for new in schedule.admissions
    ]
    return dataclasses.replace(schedule, admissions=admissions, may_draft=False)


@pytest.mark.parametrize("seed", range(20))
def test_schedules_are_equal(seed: int) -> None:
    rng = random.Random(seed)
    options: dict[str, Any] = {
        "max_num_seqs": rng.choice([2, 4, 16]),
        "max_num_batched_tokens": rng.choice([16, 64, 512]),
        "max_model_len": 160,
        "kvcache_block_size": 32,
        "num_kvcache_blocks": rng.choice([6, 9, 40]),
        "enable_prefix_caching": rng.random() < 0.8,
    }
    config = Config(model=demo_model.MODEL, **options)
    arrivals = arrivals_of(rng, 160)
    schedules, outputs, info = real_run(config, arrivals)
    found = simulated(config, info, arrivals, outputs)
    assert len(found) == len(schedules)
    for real, virtual in zip(schedules, found, strict=True):
        assert comparable(real) == comparable(virtual)
