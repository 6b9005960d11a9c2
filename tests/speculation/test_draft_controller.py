"""How many draft tokens each row gets: near the best speed where drafts pay, no loss where not.

Simulated steps take what a cost curve says; a scripted proposer is right with a given probability.
"""

import dataclasses
import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from nanovllm.features.speculation.draft_controller import Acceptance, DraftController
from tests.every_case import EVERY_CASE, examples

Curve = Callable[[int], float]
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)


def through(*points: tuple[int, float]) -> Curve:
    """Return the curve that joins the points; beyond them it keeps the last slope."""

    def seconds(size: int) -> float:
        for (n0, t0), (n1, t1) in pairwise(points):
            if size <= n1 or n1 == points[-1][0]:
                return t0 + (t1 - t0) * (size - n0) / (n1 - n0)
        raise AssertionError

    return seconds


CURVES: dict[str, Curve] = {
    "flat to 12 tokens": through((1, 1), (12, 1), (16, 1.1), (24, 1.19), (32, 1.53), (64, 2.2)),
    "slow rise": through((1, 1), (8, 1.3), (64, 3.7)),
    "steep rise": through((1, 1), (2, 1.3)),
    "stairs": lambda size: 1 + 0.25 * ((size - 1) // 16),
    "flat to 256 tokens": through((1, 1), (256, 1), (512, 2)),
}
curves = pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)


@dataclasses.dataclass
class Simulation:
    """Runs a controller; counts tokens and seconds."""

    curve: Curve
    step_seconds: tuple[tuple[int, float], ...] = ()
    draft_seconds: float = 0.0
    """Seconds of a network's pass, for any number of rows."""
    draft_overhead: float = 0.0
    """Seconds that a proposal takes in addition to its passes."""
    noise: Callable[[random.Random], float] = lambda rng: 1.0
    availability: float = 1.0
    queue_depth: int = 0
    max_drafts: int = 16

    def __post_init__(self) -> None:
        measured = self.step_seconds or tuple((n, self.curve(n)) for n in SIZES)
        seconds = self.draft_overhead + self.draft_seconds, self.draft_seconds
        drafts = ((1, *seconds), (64, *seconds)) if self.draft_seconds else ()
        self.controller = DraftController(self.max_drafts, measured, drafts)
        self.rng = random.Random(0)
        self.choices: list[list[int]] = []
        self.tokens = self.seconds = 0.0
        self._pending: list[tuple[list[tuple[Acceptance, int, int, int]], float, float]] = []

    def run(self, rows: list[Acceptance], rates: list[float], num_steps: int) -> None:
        for _ in range(num_steps):
            choice = self.controller.choose([(row, self.max_drafts) for row in rows], len(rows))
            self.choices.append(choice)
            results = []
            for row, rate, allowed in zip(rows, rates, choice, strict=True):
                proposed = allowed if self.rng.random() < self.availability else 0
                accepted = 0
                while accepted < proposed and self.rng.random() < rate:
                    accepted += 1
                results.append((row, allowed, proposed, accepted))
            seconds = self.curve(len(rows) + sum(result[2] for result in results))
            overhead = self.draft_overhead * any(choice)
            draft_seconds = overhead + self.draft_seconds * max(choice)
            self.tokens += len(rows) + sum(result[3] for result in results)
            self.seconds += seconds + draft_seconds
            self._pending.append((results, seconds * self.noise(self.rng), draft_seconds))
            if len(self._pending) > self.queue_depth:
                self._record(*self._pending.pop(0))

    def _record(
        self,
        results: list[tuple[Acceptance, int, int, int]],
        seconds: float,
        draft_seconds: float,
    ) -> None:
        for result in results:
            self.controller.record(*result)
        num_tokens = len(results) + sum(result[2] for result in results)
        asked = [result[1] for result in results if result[1]]
        self.controller.record_step(num_tokens, seconds, len(asked), sum(asked), draft_seconds)


def speedup(simulation: Simulation, rate: float, batch: int, num_steps: int = 200) -> float:
    """Return the speed relative to steps without drafts."""
    simulation.run([Acceptance() for _ in range(batch)], [rate] * batch, num_steps)
    return simulation.tokens / simulation.seconds * simulation.curve(batch) / batch


def ideal(curve: Curve, rate: float, batch: int, draft_seconds: float = 0.0) -> float:
    """Return the speed-up of the best constant number of drafts."""
    return max(
        sum(rate**j for j in range(k + 1))
        * curve(batch)
        / (curve(batch * (k + 1)) + k * draft_seconds)
        for k in range(17)
    )


@curves
@pytest.mark.parametrize("draft_seconds", [0.0, 0.1], ids=["free", "network"])
def test_speed_is_near_the_ideal(curve: Curve, draft_seconds: float) -> None:
    for batch, num_steps in ((1, 300), (16, 100), *([(64, 30)] if EVERY_CASE else [])):
        for rate in (0.3, 0.7, 0.95):
            simulation = Simulation(curve, draft_seconds=draft_seconds)
            found = speedup(simulation, rate, batch, num_steps)
            assert found >= 0.88 * ideal(curve, rate, batch, draft_seconds), (batch, rate)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.8, 0.95])
def test_little_is_lost_behind_the_largest_measured_size(rate: float) -> None:
    """Symptom: with 64 sequences, steps of 256 tokens are tried, at three times the cost of a plain
    one: a size that is untried counts as cheaper, and the slope behind it as a quarter.
    """
    curve = through((1, 35), (12, 36), (16, 43), (32, 59), (64, 101), (128, 194), (256, 380))
    measured = tuple((size, curve(size)) for size in SIZES if size <= 128)
    simulation = Simulation(curve, step_seconds=measured)
    assert speedup(simulation, rate, 64, 60) >= 0.97
    assert max(sum(choice) for choice in simulation.choices) <= 128


def test_probes_that_succeed_and_do_not_pay_pause() -> None:
    """Symptom: each draft beside 64 sequences costs a stair; probes that succeeded went on."""
    simulation = Simulation(lambda n: n / 64 if n <= 64 else 0.15 + n / 64)
    assert speedup(simulation, 0.95, 64, 100) >= 0.98


def test_a_first_draft_that_costs_more_than_the_others() -> None:
    """Symptom: one draft a step for ever, because each further one seemed to cost as much."""
    curve = CURVES["flat to 12 tokens"]
    simulation = Simulation(curve, draft_seconds=0.4, draft_overhead=0.2)
    simulation.run([Acceptance()], [1.0], 400)
    assert simulation.choices[-1] == [16]


@pytest.mark.thinned(2)
@curves
@pytest.mark.parametrize("draft_seconds", [0.0, 0.1], ids=["free", "network"])
def test_useless_proposals_cost_two_percent(curve: Curve, draft_seconds: float) -> None:
    for batch in (1, 8, 64):
        simulation = Simulation(curve, draft_seconds=draft_seconds, queue_depth=batch > 1)
        assert speedup(simulation, 0.0, batch, 300) >= 1 / 1.02, batch


def test_a_request_that_turns_predictable_is_found_again() -> None:
    simulation = Simulation(CURVES["steep rise"])
    row = [Acceptance()]
    simulation.run(row, [0.9], 100)
    assert sum(map(sum, simulation.choices[-50:])) > 40
    simulation.run(row, [0.0], 300)
    assert sum(map(sum, simulation.choices[-250:])) <= 10
    simulation.run(row, [0.95], 200)
    assert sum(map(sum, simulation.choices[-50:])) > 40


def test_a_proposer_that_finds_nothing_is_asked_until_it_does() -> None:
    """A row without a match costs nothing, so its silence is no failure."""
    simulation = Simulation(CURVES["flat to 12 tokens"], availability=0.0)
    row = [Acceptance()]
    simulation.run(row, [0.0], 300)
    simulation.availability = 1.0
    simulation.run(row, [0.9], 20)
    assert sum(map(sum, simulation.choices[-20:])) > 50
    rare = Simulation(CURVES["slow rise"], availability=0.2)
    assert speedup(rare, 0.9, 1, 400) > 1.2


def test_the_good_rows_get_the_drafts() -> None:
    simulation = Simulation(CURVES["flat to 12 tokens"])
    rows = [Acceptance() for _ in range(16)]
    simulation.run(rows, [0.9] * 4 + [0.0] * 12, 150)
    late = simulation.choices[-100:]
    assert sum(sum(choice[:4]) for choice in late) > 1000
    assert sum(sum(choice[4:]) for choice in late) < 100


@pytest.mark.thinned(4)
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("rate", [0.0, 0.6, 0.9])
@curves
def test_slow_steps_do_not_mislead(curve: Curve, rate: float, batch: int) -> None:
    simulation = Simulation(
        curve, noise=lambda rng: 10.0 if rng.random() < 0.05 else rng.uniform(0.96, 1.04)
    )
    found = speedup(simulation, rate, batch, 300)
    assert found >= (0.97 if rate == 0 else 0.85) * ideal(curve, rate, batch)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("error", [0.8, 2.0])
@pytest.mark.parametrize("wrong", [1, 8, 24, 48])
@curves
def test_a_wrong_measurement_is_repaired(curve: Curve, wrong: int, error: float) -> None:
    measured = tuple((n, curve(n) * (error if n == wrong else 1)) for n in SIZES)
    for rate in (0.0, 0.6):
        simulation = Simulation(curve, step_seconds=measured)
        rows = [Acceptance() for _ in range(8)]
        simulation.run(rows, [rate] * 8, 150)
        simulation.tokens = simulation.seconds = 0.0
        simulation.run(rows, [rate] * 8, 150)
        found = simulation.tokens / simulation.seconds * curve(8) / 8
        assert found >= (0.97 if rate == 0 else 0.85) * ideal(curve, rate, 8)


def test_a_network_that_catches_up_slowly_is_probed_less() -> None:
    """Time beyond the plan is taken from the time for probes."""
    curve = CURVES["flat to 12 tokens"]
    controller = DraftController(8, [(n, curve(n)) for n in SIZES], ((1, 0.1, 0.1), (64, 0.1, 0.1)))
    row, seconds, num_steps = Acceptance(), 0.0, 2000
    for _ in range(num_steps):
        allowed = controller.choose([(row, 8)], 1)[0]
        draft_seconds = 2.0 * (allowed > 0)
        controller.record(row, allowed, allowed, 0)
        controller.record_step(1 + allowed, 1.0, int(allowed > 0), allowed, draft_seconds)
        seconds += draft_seconds
    assert seconds < 0.02 * num_steps


def test_choices_that_cost_more_than_they_gain_are_rare() -> None:
    """Symptom: open chat at 0.97 of the speed, because each step looked for drafts, mostly in vain.

    A choice takes 0.04 of a step. First it gains less, then much more.
    """
    curve = CURVES["slow rise"]
    controller = DraftController(8, [(n, curve(n)) for n in SIZES], ())
    row, rng = Acceptance(), random.Random(0)

    def speed(availability: float, rate: float, num_steps: int) -> float:
        tokens = seconds = 0.0
        for _ in range(num_steps):
            allowed = proposed = accepted = 0
            if not controller.skips_step():
                allowed = controller.choose([(row, 8)], 1)[0]
                proposed = allowed * (rng.random() < availability)
                while accepted < proposed and rng.random() < rate:
                    accepted += 1
                controller.record(row, allowed, proposed, accepted)
                controller.record_step(1 + proposed, curve(1 + proposed) + 0.02, 0, proposed, 0.0)
                controller.add_host_seconds(0.04)
                seconds += 0.04
            tokens += 1 + accepted
            seconds += curve(1 + proposed)
        return tokens / seconds

    assert speed(0.02, 0.3, 3000) > 0.985
    assert speed(1.0, 0.9, 500) > 3.0


def test_a_prompt_chunk_makes_no_draft_cheaper() -> None:
    """Its time is spent with or without drafts."""
    curve = CURVES["steep rise"]
    controller = DraftController(16, [(n, curve(n)) for n in SIZES], ())
    row = Acceptance()
    for _ in range(40):
        controller.record(row, 1, 1, 0)
        controller.record(row, 1, 1, 0)
        controller.record(row, 1, 1, 1)
    assert sum(controller.choose([(row, 16)] * 8, 208)) <= 1


@pytest.mark.parametrize("seed", range(examples(120)))
def test_choices_keep_the_limits_and_are_deterministic(seed: int) -> None:
    draft_costs = [(), ((1, 0.05, 0.05),), ((1, 0.1, 0.05), (16, 0.4, 0.2))][seed % 3]

    def choices() -> list[list[int]]:
        rng = random.Random(seed)
        curve, seconds = rng.choice([*CURVES.values()]), 10 ** rng.uniform(-6, 3)
        controller = DraftController(12, [(n, curve(n)) for n in SIZES], draft_costs)
        rows = [(Acceptance(), rng.randint(0, 20)) for _ in range(rng.randint(0, 12))]
        extra = rng.choice([0, rng.randint(0, 300)])
        found = []
        for _ in range(rng.randint(1, 12)):
            choice = controller.choose(rows, len(rows) + extra)
            assert len(choice) == len(rows)
            found.append(choice)
            for (row, limit), k in zip(rows, choice, strict=True):
                assert 0 <= k <= min(limit, 12)
                proposed = rng.randint(0, k)
                controller.record(row, k, proposed, rng.randint(0, proposed))
            asked = [k for k in choice if k]
            size = len(rows) + extra + sum(asked)
            controller.record_step(size, seconds, len(asked), sum(asked), seconds / 10)
        return found

    assert choices() == choices()
