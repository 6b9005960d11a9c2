"""Rejected drafts leave no trace in a state, and accepted ones are computed as if they were known:
bit for bit, in every pattern of chunks, drafts and acceptance.
"""

import random
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from hypothesis import given, settings, strategies as st

from nanovllm.core.messages import Admission, Row, Schedule
from nanovllm.kernels.states import StatePart, StateRows
from nanovllm.layers.state_layer import StateLayer
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.platform.cpu import CPU
from nanovllm.worker.state_table import Replays
from tests.kernels.state_cases import make_rows, make_states

NUM_ROWS, NUM_DRAFTS, LENGTH = 3, 4, 30
KEY_HEADS, HEADS, DK, DV, TAPS = 1, 2, 3, 2, 4
CHANNELS = 2 * KEY_HEADS * DK + HEADS * DV


class Mixer(StateLayer):
    """A gated delta layer behind its projections: its inputs are what goes into the log."""

    def __init__(self) -> None:
        heads = (StatePart((DK, DV), torch.float32),) * HEADS
        super().__init__((StatePart((TAPS - 1, CHANNELS), torch.float32), *heads))
        generator = torch.Generator().manual_seed(0)
        self._weight = torch.randn(CHANNELS, TAPS, generator=generator)
        self._gates = torch.randn(2, HEADS, generator=generator)
        self.bind(make_states(list(self.parts), 2 * NUM_ROWS, 2))
        self.states.pool.zero_()

    def forward(self, inputs: torch.Tensor, rows: StateRows) -> torch.Tensor:
        (inputs,) = self.extended([inputs], rows)
        x, a, b = inputs.split([CHANNELS, HEADS, HEADS], dim=1)
        kernels, states = self.kernels, self.states
        x = kernels.causal_conv(x.contiguous(), self._weight, None, True, states, rows)
        return self.own(kernels.gated_delta(x, a, b, *self._gates, states, rows), rows)


def pages_of(table_idx: int) -> list[int]:
    return [2 * table_idx, 2 * table_idx + 1]


class Truth(NamedTuple):
    """What a sequence gives without drafts, one token after the other."""

    inputs: torch.Tensor
    outputs: torch.Tensor
    states: list[torch.Tensor]
    """The bytes of its pages after so many tokens."""


def truth(seed: int) -> Truth:
    mixer, outputs = Mixer(), []
    inputs = torch.randn(
        LENGTH, CHANNELS + 2 * HEADS, generator=torch.Generator().manual_seed(seed)
    )
    states = [mixer.states.pool[:2].clone()]
    for token in inputs:
        outputs.append(mixer(token[None], make_rows([pages_of(0)], [1])))
        states.append(mixer.states.pool[:2].clone())
    return Truth(inputs, torch.cat(outputs), states)


TRUTHS = [truth(seed) for seed in range(4)]


def schedule(rows: list[Row], admitted: Seq[int] = ()) -> Schedule:
    empty = Admission(0, 0, [], 0, [], SamplingParams(), 0, frozenset(), ())
    return Schedule(0, [empty._replace(table_idx=index) for index in admitted], [], rows)


class Simulation:
    """Sequences in table rows, of which each step computes some tokens."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.mixer = rng, Mixer()
        self.replays = Replays(NUM_ROWS, NUM_DRAFTS, CPU())
        self.num_computed = [0] * NUM_ROWS
        self.truths = [rng.choice(TRUTHS) for _ in range(NUM_ROWS)]

    def admit(self, table_idx: int) -> None:
        """Let a table row have another sequence, behind a prefix whose state is known."""
        self.truths[table_idx] = self.rng.choice(TRUTHS)
        start = self.num_computed[table_idx] = self.rng.choice([0, 0, 3, 8])
        self.mixer.states.pool[pages_of(table_idx)] = self.truths[table_idx].states[start]

    def draw_row(self, table_idx: int) -> Row:
        start = self.num_computed[table_idx]
        num_known = self.rng.choice([1, 1, 1, 2, 5])
        num_drafts = self.rng.choice([0, 1, 2, NUM_DRAFTS])
        num_known = min(num_known, LENGTH - start - num_drafts)
        count = num_known + num_drafts
        return Row(0, table_idx, start, count, samples=True, num_draft_tokens=num_drafts)

    def step(self) -> None:
        rng = self.rng
        tables = rng.sample(range(NUM_ROWS), rng.randint(1, NUM_ROWS))
        admitted = [i for i in tables if self.num_computed[i] > LENGTH - 5 or rng.random() < 0.1]
        for table_idx in admitted:
            self.admit(table_idx)
        allowed = [self.draw_row(table_idx) for table_idx in tables]
        self.replays.begin(schedule(allowed, admitted))
        rows = [row if rng.random() < 0.8 else self.with_fewer_drafts(row) for row in allowed]
        accepted = [rng.randint(0, row.num_draft_tokens) for row in rows]
        inputs = torch.cat([self.inputs_of(*pair) for pair in zip(rows, accepted, strict=True)])
        state = make_rows(
            [pages_of(row.table_idx) for row in rows],
            [row.num_scheduled_tokens for row in rows],
        )
        outputs = self.mixer(inputs, self.replays.extend(state, rows))
        assert len(outputs) == len(inputs)
        for row, count in zip(rows, accepted, strict=True):
            known, outputs = outputs, outputs[row.num_scheduled_tokens :]
            end = row.sample_position + count
            found, expected = known[: end - row.num_computed_tokens], self.truths[row.table_idx]
            assert torch.equal(found, expected.outputs[row.num_computed_tokens : end])
            pages = self.mixer.states.pool[pages_of(row.table_idx)]
            assert torch.equal(pages, expected.states[row.sample_position])
            self.num_computed[row.table_idx] = end

    def with_fewer_drafts(self, row: Row) -> Row:
        count = self.rng.randint(0, row.num_draft_tokens)
        missing = row.num_draft_tokens - count
        num_tokens = row.num_scheduled_tokens - missing
        return row._replace(num_scheduled_tokens=num_tokens, num_draft_tokens=count)

    def inputs_of(self, row: Row, num_accepted: int) -> torch.Tensor:
        """Return the row's tokens: behind the accepted drafts they are those of no sequence."""
        inputs = self.truths[row.table_idx].inputs[row.num_computed_tokens : row.end].clone()
        inputs[len(inputs) - row.num_draft_tokens + num_accepted :] = self.rng.choice([9.0, 1e30])
        return inputs


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32))
def test_a_state_is_that_of_plain_computation(seed: int) -> None:
    simulation = Simulation(random.Random(seed))
    for _ in range(12):
        simulation.step()


def test_a_step_without_drafts_is_as_before() -> None:
    replays, state = Replays(2, 4, CPU()), make_rows([pages_of(0)], [3])

    def concern(start: int, num_tokens: int, num_drafts: int = 0) -> bool:
        rows = [Row(0, 0, start, num_tokens, True, num_drafts)]
        replays.begin(schedule(rows))
        found = replays.extend(state, rows)
        assert (found is not state) == replays.concern(rows) == (found.replay is not None)
        return replays.concern(rows)

    assert not concern(0, 3)
    assert concern(3, 3, num_drafts=2)
    assert concern(5, 1)  # one is accepted
    assert not concern(6, 1)
    assert concern(7, 3, num_drafts=2)
    assert not concern(8, 1)  # none is


def test_more_drafts_than_the_log_holds() -> None:
    """Steps that only measure what a step costs begin at position 0 each time."""
    replays = Replays(2, 4, CPU())
    for table_idx in (1, 1, 0):
        rows = [Row(0, table_idx, 0, 9, True, 8)]
        replay = replays.extend(make_rows([pages_of(0)], [9]), rows).replay
        assert replay is not None
        log_rows = range(4 * table_idx, 4 * table_idx + 4)
        assert replay.kept.tolist() == [-1, *log_rows, -1, -1, -1, -1]
        assert replay.sources.tolist() == replay.own.tolist() == list(range(9))
