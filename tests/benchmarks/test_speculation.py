"""benchmarks.speculation compares with the best fixed number of drafts."""

import xml.etree.ElementTree
from pathlib import Path

import pytest

from benchmarks.speedups import Speedup, Speedups, ideal_speedup, interpolated
from tools.pictures import speculation

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


def test_saved_speedups_load(tmp_path: Path) -> None:
    point = Speedup(1, 0.8, 3.0, 4.0, 11, 5.0, [2.9, 3.0, 3.1])
    found = Speedups("python -m x", "2026-01-02", "a processor", "a model", 2, [point])
    found.save(tmp_path / "found.json")
    assert Speedups.load(tmp_path / "found.json") == found
    assert point.share == 0.75


def test_picture_has_a_panel_for_each_batch_size() -> None:
    tree = xml.etree.ElementTree.fromstring(speculation.draw())
    texts = [element.text for element in tree.iter("{http://www.w3.org/2000/svg}text")]
    for batch in {point.batch for point in Speedups.load(speculation.DATA).points}:
        assert f"{batch} sequence{'s' if batch > 1 else ''}" in texts
