"""What proposing costs: passes that rows share, and plans that a step's seconds correct."""

import pytest

from nanovllm.features.speculation.cost_curve import DraftCosts

MEASURED = ((1, 0.3, 0.1), (4, 0.6, 0.2))


def test_without_a_network_proposing_is_free() -> None:
    costs = DraftCosts(())
    costs.plan([3, 1])
    assert costs.by_rows(2) == ([0.0] * 3, [0.0] * 3)
    assert costs.of_another_row(5) == costs.observe(2, 4, 1.0) == 0.0


def test_rows_share_a_pass() -> None:
    first, later = DraftCosts(MEASURED).by_rows(4)
    assert first == pytest.approx([0.0, 0.3, 0.4, 0.5, 0.6])
    assert later[3] - later[2] == pytest.approx(0.1 / 3)
    assert DraftCosts(MEASURED).of_another_row(0) == pytest.approx(0.3)
    assert DraftCosts(MEASURED).of_another_row(1) == pytest.approx(0.1)


def test_a_step_is_compared_with_its_own_plan() -> None:
    """Symptom: a step is compared with a later one's plan, because steps overlap."""
    costs = DraftCosts(MEASURED)
    costs.plan([1, 0, 0])
    costs.plan([0, 0, 0])
    costs.plan([2, 0, 1])
    expected = costs.by_rows(2)[0][2] + costs.by_rows(2)[1][1]
    assert costs.observe(1, 1, 0.3) == pytest.approx(0.0)
    assert costs.observe(2, 3, expected + 0.25) == pytest.approx(0.25)
    assert costs.observe(2, 3, 9.0) == 0.0, "a plan was used twice"


def test_two_slow_steps_make_both_passes_dearer() -> None:
    costs = DraftCosts(MEASURED)
    for _ in range(2):
        costs.plan([1])
        costs.observe(1, 1, 0.6)
    first, later = costs.by_rows(1)
    assert first[1] > 0.3
    assert first[1] / later[1] == pytest.approx(3)
