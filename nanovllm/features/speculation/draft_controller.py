"""Decides how many draft tokens each decode row of a step may get.

It chooses the drafts that maximise the expected tokens per second, from what steps cost and how
often each request's drafts are accepted. It never reads a clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from math import inf

from nanovllm.features.speculation.cost_curve import CostCurve, DraftCosts

_PRIOR_WEIGHT = 6.0
"""Number of proposals as which a new request counts the engine-wide experience."""


@dataclass(slots=True, eq=False)
class Acceptance:
    """How one request's drafts fared lately, as decayed counts.

    The first draft of a proposal is counted apart from the later ones: it often tells whether the
    whole proposal is right.
    """

    prior_weight: float = _PRIOR_WEIGHT
    num_asked: float = 0.0  # times that drafts were allowed
    num_proposals: float = 0.0  # times that any were proposed then
    first_accepted: float = 0.0
    first_tried: float = 0.0
    later_accepted: float = 0.0
    later_tried: float = 0.0
    is_probe: bool = False  # whether the last drafts allowed were a probe
    probe_interval: int = 1  # steps from the last probe to the next; 0: it succeeded
    next_probe: int = 0  # step from which a probe may happen

    def add(self, num_proposed: int, num_accepted: int, weight: float, decay: float) -> None:
        """Count one answer of the proposer, and how many of its first drafts were accepted."""
        self.num_asked = self.num_asked * decay + weight
        self.num_proposals *= decay
        if num_proposed == 0:
            return
        self.num_proposals += weight
        self.prior_weight *= decay
        self.first_tried = self.first_tried * decay + weight
        self.first_accepted *= decay
        self.later_tried *= decay
        self.later_accepted *= decay
        if num_accepted:
            self.first_accepted += weight
            # The first rejected draft was tried too; nothing is known about those after it.
            self.later_tried += weight * (min(num_accepted + 1, num_proposed) - 1)
            self.later_accepted += weight * (num_accepted - 1)

    def rates(self, prior: tuple[float, float, float]) -> tuple[float, float, float]:
        """Return the probabilities of a proposal, of its first draft, of each later draft."""
        n = self.prior_weight
        return (
            (self.num_proposals + n * prior[0]) / (self.num_asked + n),
            (self.first_accepted + n * prior[1]) / (self.first_tried + n),
            (self.later_accepted + n * prior[2]) / (self.later_tried + n),
        )


_DECAY = 0.96
"""What a request's counts keep at each new proposal: about the last 25 proposals matter."""
_ENGINE_DECAY = 0.98
"""The same for the engine-wide counts, whose records are of many requests."""
_FIRST_GUESS = 0.7
"""Acceptance before the first record: high enough that a good proposer is tried at once."""
_GUESS_WEIGHT = 2.0
"""Number of proposals as which the first guess counts."""
_FEW_RECORDS = 4
"""Until drafts of so many rows were tried, all but one may add at most _FIRST_SHARE to a step."""
_FIRST_SHARE = 0.4
_LEAST_GAIN = 0.01
"""A draft that is accepted less often than this is never worth its bookkeeping."""
_MARGIN = 1.01
"""Drafts must promise this much more tokens per second: estimates that look best are optimistic."""
_PROBE_SHARE = 0.0075
"""Share of the time that may go to probes, drafts that are not expected to pay."""
_PROBE_PAUSE = 8
"""Number of steps that save time for the next probes."""
_PROBE_DEBT = 0.25
"""Part of a plain step by which probes that succeed may exceed their time before they pause."""
_PROBE_INTERVAL = 16
"""Steps from a probe that failed to the row's next one."""
_CHOICE_SECONDS = 40e-6
"""What a choice costs the host, with all that follows from it, until that is measured."""
_CHOICE_RATE = 0.05
"""Weight of a new measurement in the running mean of what a choice costs. A measurement counts as
ten times the mean at most."""
_CHOICE_SHARE = 0.005
"""Share of the time that may go to choices that are not expected to pay."""
_FEW_DRAFTS = 64
"""Up to so many drafts, every number of passes of a draft network is tried."""
_FINE_DRAFTS = 128
"""Beyond each such number of drafts, one more draft is planned at a time, to bound the work."""


class DraftController:
    """Chooses the drafts of each step so that the expected tokens per second are largest.

    A step without drafts is always among the choices. A row whose drafts do not pay is probed with
    one draft now and then. Probes take about 0.75% of the time in sum, whatever the number of rows.

    Attributes:
        takes_all: whether each row gets all drafts that it can take, whatever they cost.
    """

    def __init__(
        self,
        max_draft_tokens: int,
        step_seconds: Sequence[tuple[int, float]],
        draft_seconds: Sequence[tuple[int, float, float]],
    ) -> None:
        self.max_draft_tokens = max_draft_tokens
        self.takes_all = False
        self._step_costs = CostCurve(step_seconds)
        self._draft_costs = DraftCosts(draft_seconds)
        self._experience = Acceptance(_GUESS_WEIGHT)
        self._num_steps = 0
        self._choice_seconds = _CHOICE_SECONDS
        self._host_seconds = 0.0  # what the last choice has cost so far
        self._next_choice = 0  # step from which drafts may be chosen again
        self._num_skipped = 0  # steps since the last choice
        self._probe_seconds = 0.0  # what probes may spend now

    def choose(self, candidates: Sequence[tuple[Acceptance, int]], num_tokens: int) -> list[int]:
        """Return how many draft tokens each candidate may get in the next step.

        Args:
            candidates: all decode rows of the step, with the most drafts that each could take.
            num_tokens: tokens of the step without any drafts.
        """
        self._num_steps += 1
        if not candidates:
            return []
        if self._host_seconds > 0:
            most = 10 * self._choice_seconds
            change = min(self._host_seconds, most) - self._choice_seconds
            self._choice_seconds += _CHOICE_RATE * change
            self._host_seconds = 0.0
        limits = [min(limit, self.max_draft_tokens) for _, limit in candidates]
        if self.takes_all:
            choice = [max(0, limit) for limit in limits]
            self._draft_costs.plan(choice)
            return choice
        prior = self._experience.rates((1.0, _FIRST_GUESS, _FIRST_GUESS))
        rates = [acceptance.rates(prior) for acceptance, _ in candidates]
        choice = self._best_choice(rates, limits, num_tokens)
        if any(choice) and self._step_costs.is_stale(num_tokens):
            return [0] * len(choice)
        self._add_probes(choice, candidates, rates, limits, num_tokens)
        self._set_next_choice(choice, rates)
        self._draft_costs.plan(choice)
        return choice

    def skips_step(self) -> bool:
        """Return whether the next step gets no drafts without a choice; count it if so."""
        skips = self._num_steps + 1 < self._next_choice
        self._num_steps += skips
        self._num_skipped += skips
        return skips

    def add_host_seconds(self, seconds: float) -> None:
        """Count time that the last choice, or what follows from it, took besides the steps."""
        self._host_seconds += seconds

    def record(
        self, acceptance: Acceptance, num_allowed: int, num_proposed: int, num_accepted: int
    ) -> None:
        """Learn from one row of a step: its drafts allowed, proposed and accepted."""
        assert 0 <= num_accepted <= num_proposed <= num_allowed
        if num_allowed == 0:
            return
        # Each request counts about as much as any other, however many of its drafts are tried.
        weight = 1 / (1 + acceptance.first_tried)
        decay = 1 - weight * (1 - _ENGINE_DECAY)
        self._experience.add(num_proposed, num_accepted, weight, decay)
        if num_accepted and acceptance.is_probe:
            # The text has changed since the failures that stopped this request's drafts.
            old = 1 / max(acceptance.first_tried, 1.0)
            acceptance.first_accepted *= old
            acceptance.first_tried *= old
        acceptance.add(num_proposed, num_accepted, 1.0, _DECAY)
        acceptance.next_probe = self._num_steps
        if num_accepted:
            acceptance.probe_interval = 0 if acceptance.is_probe else 1
        elif num_proposed:
            acceptance.probe_interval = _PROBE_INTERVAL
            acceptance.next_probe += _PROBE_INTERVAL
        acceptance.is_probe = False

    def record_step(
        self,
        num_tokens: int,
        seconds: float,
        num_draft_rows: int,
        num_draft_tokens: int,
        draft_seconds: float,
    ) -> None:
        """Learn from a step's durations.

        Args:
            num_tokens: tokens that the target computed, drafts included.
        """
        self._step_costs.observe(num_tokens, seconds)
        # A network that had to catch up took time which the plan does not contain.
        excess = self._draft_costs.observe(num_draft_rows, num_draft_tokens, draft_seconds)
        self._probe_seconds -= min(excess, 100 * self._step_costs.at(1))

    def _best_choice(
        self, rates: list[tuple[float, float, float]], limits: list[int], num_tokens: int
    ) -> list[int]:
        """Return the drafts of each row with the largest expected tokens per second."""
        num_rows = len(rates)
        plain_seconds = self._step_costs.at(num_rows)
        # Steps without drafts need no choice, and save its time.
        plain_seconds -= min(self._choice_seconds, plain_seconds / 2)
        speed = _MARGIN * num_rows / plain_seconds
        choice = [0] * num_rows
        least = max(_LEAST_GAIN, speed * self._step_costs.least_slope(num_tokens))
        rows = [i for i in range(num_rows) if rates[i][1] > least and limits[i] > 0]
        if not rows:
            return choice
        most = max(limits[i] for i in rows)
        if self._draft_costs.is_free:
            return self._scan(rows, rates, limits, num_tokens, speed)[1] or choice
        # All rows share the time of a network's pass, so each number of passes is tried.
        for num_passes in range(1, most + 1):
            capped = [min(limit, num_passes) for limit in limits]
            speed, better = self._scan(rows, rates, capped, num_tokens, speed)
            if better is None and num_passes * len(rows) > _FEW_DRAFTS:
                break
            choice = better or choice
        return choice

    def _scan(
        self,
        rows: list[int],
        rates: list[tuple[float, float, float]],
        limits: list[int],
        num_tokens: int,
        best_speed: float,
    ) -> tuple[float, list[int] | None]:
        """Find the choice with more tokens per second than `best_speed`, if there is one.

        Drafts are added in the order of their probabilities. Cost is neither convex nor concave in
        the size, so every prefix of this order is compared.
        """
        costs = self._step_costs
        # Before any draft: a token a row, and the seconds of a step without its prompt chunks, so
        # that only what drafts add to the real size counts.
        tokens = float(len(rates))
        size = float(num_tokens)
        seconds = costs.at(len(rates)) - costs.at(num_tokens)
        scale = _scale([rates[i][0] for i in rows])
        heap = sorted((-rates[i][1], i) for i in rows)  # each row's next draft, likeliest first
        first_costs, later_costs = self._draft_costs.by_rows(len(rates))
        rows_by_depth = [0] * (max(limits) + 1)
        choice = [0] * len(rates)
        order: list[int] = []  # the row of each draft added
        best_count = 0
        most_seconds = self._most_seconds(len(rates))
        while heap:
            # No longer prefix is better once a draft gains less than the cheapest token costs.
            negative, row = heap[0]
            gain = -negative
            if len(order) % 16 == 0:
                slope = costs.least_slope(size)
            if gain <= best_speed * slope:
                break
            # Add the row's next draft, or several at once in a large step.
            share = min(scale * rates[row][0], 1.0)
            later = rates[row][2]
            for _ in range(min(1 + len(order) // _FINE_DRAFTS, limits[row] - choice[row])):
                depth = choice[row] = choice[row] + 1
                count = rows_by_depth[depth] = rows_by_depth[depth] + 1
                draft_costs = first_costs if depth == 1 else later_costs
                seconds += draft_costs[count] - draft_costs[count - 1]
                tokens += share * gain
                size += share
                order.append(row)
                gain *= later
            total = costs.at(size) + seconds
            if total > most_seconds and len(order) > 1:
                break
            if tokens > best_speed * total:
                best_speed = tokens / total
                best_count = len(order)
            if choice[row] < limits[row] and gain > _LEAST_GAIN:
                heapreplace(heap, (-gain, row))
            else:
                heappop(heap)
        for row in order[best_count:]:
            choice[row] -= 1
        return best_speed, choice if best_count else None

    def _most_seconds(self, num_rows: int) -> float:
        """Return how long a step of more than one draft may take: not long, at first."""
        if self._experience.first_tried < _FEW_RECORDS:
            return (1 + _FIRST_SHARE) * self._step_costs.at(num_rows)
        return inf

    def _set_next_choice(self, choice: list[int], rates: list[tuple[float, float, float]]) -> None:
        """Pause if the expected gain of `choice` does not pay for choosing in every step."""
        step_seconds = self._step_costs.at(len(choice))
        gain = sum(
            found * first * (1 - later**count) / (1 - min(later, 0.999))
            for count, (found, first, later) in zip(choice, rates, strict=True)
            if count
        )
        if gain * step_seconds / len(choice) < self._choice_seconds:
            pause = int(self._choice_seconds / (_CHOICE_SHARE * step_seconds))
            self._next_choice = self._num_steps + pause

    def _add_probes(
        self,
        choice: list[int],
        candidates: Sequence[tuple[Acceptance, int]],
        rates: list[tuple[float, float, float]],
        limits: list[int],
        num_tokens: int,
    ) -> None:
        """Give one draft to rows that were not probed for long, as far as probes may cost."""
        # What probes may spend grows with each step. It is saved for several steps, so that most
        # steps are plain and tell what a plain one costs.
        plain_seconds = self._step_costs.at(len(choice))
        earned = self._probe_seconds + _PROBE_SHARE * plain_seconds * (1 + self._num_skipped)
        self._num_skipped = 0
        self._probe_seconds = min(earned, plain_seconds / 4)
        can_pay = self._probe_seconds >= _PROBE_PAUSE * _PROBE_SHARE * plain_seconds
        # Rows whose last probe succeeded come first, then those that wait longest.
        due = [
            (acceptance.probe_interval > 0, acceptance.next_probe, i)
            for i, (acceptance, _) in enumerate(candidates)
            if choice[i] == 0 and limits[i] > 0 and acceptance.next_probe <= self._num_steps
        ]
        size = num_tokens + sum(choice)
        num_rows = len(choice) - choice.count(0)
        heapify(due)
        while due:
            is_new, _, i = heappop(due)
            cost = self._step_costs.at(size + 1) - self._step_costs.at(size)
            cost += self._draft_costs.of_another_row(num_rows)
            # A row whose last probe succeeded goes on. Its time is made up later, so it may not be
            # much.
            if is_new and not (can_pay and self._probe_seconds > 0):
                break
            if self._probe_seconds < -_PROBE_DEBT * plain_seconds:
                break
            # The row is probed; the proposer may find nothing, which costs nothing.
            acceptance = candidates[i][0]
            acceptance.next_probe = self._num_steps + max(acceptance.probe_interval, 1)
            acceptance.is_probe = True
            choice[i] = 1
            size += 1
            num_rows += 1
            self._probe_seconds -= rates[i][0] * cost


def _scale(shares: Sequence[float]) -> float:
    """Return the factor on the rows' `shares`, how often each finds a proposal.

    If few rows find one, the choice matters in the steps in which one does.
    """
    return max(1.0, 1 / max(sum(shares), 1e-3))
