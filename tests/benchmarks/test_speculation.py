"""benchmarks.speculation compares with the best fixed number of drafts."""

import pytest

from benchmarks.speculation import ideal_speedup, interpolated

FLAT = {1: 1.0, 16: 1.0, 32: 8.0}
"""Seconds of steps that cost the same up to 16 tokens."""


def test_cost_between_two_sizes() -> None:
    assert interpolated(FLAT, 16) == 1.0
    assert interpolated(FLAT, 24) == pytest.approx(4.5)


@pytest.mark.parametrize(
    ("batch", "acceptance", "expected"),
    [
        (1, 0.0, (1.0, 0)),  # no draft pays
        (1, 0.5, (2 - 0.5**15, 15)),  # sixteen tokens for the price of one
        (4, 0.5, (1.875, 3)),
        (16, 0.95, (1.0, 0)),  # twice the tokens for eight times the price
    ],
)
def test_ideal(batch: int, acceptance: float, expected: tuple[float, int]) -> None:
    speedup, drafts = ideal_speedup(batch, acceptance, FLAT, 24)
    assert (pytest.approx(speedup), drafts) == expected
