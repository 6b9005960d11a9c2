"""What steps and proposing cost: interpolation, and corrections that noise does not mislead."""

import pytest

from nanovllm.features.speculation.cost_curve import CostCurve, DraftCosts

DRAFTS = ((1, 0.3, 0.1), (4, 0.6, 0.2))
MEASURED = ((1, 1.0), (8, 1.0), (16, 2.0), (32, 4.0))


def ratio(curve: CostCurve, size: int, other: int) -> float:
    return curve.at(size) / curve.at(other)


def test_interpolates_and_extrapolates_by_the_last_slope() -> None:
    curve = CostCurve(MEASURED)
    assert [curve.at(size) for size in (1, 4, 12, 24, 40)] == pytest.approx([1, 1, 1.5, 3, 5])


def test_without_measurements_cost_is_proportional() -> None:
    curve = CostCurve(())
    assert ratio(curve, 7, 1) == pytest.approx(7)


def test_never_falls_with_the_size() -> None:
    curve = CostCurve(((1, 1.0), (8, 1.5), (16, 1.2), (32, 1.3)))
    costs = [curve.at(size) for size in range(1, 40)]
    assert costs == sorted(costs)


def test_least_slope_is_a_lower_bound() -> None:
    curve = CostCurve(((1, 1.0), (8, 1.0), (12, 3.0), (16, 3.0), (64, 5.0)))
    for size in (1, 5, 9, 12, 20, 70):
        slope = curve.least_slope(size)
        for larger in range(size + 1, 100):
            assert curve.at(larger) >= curve.at(size) + slope * (larger - size) - 1e-9


def test_a_stair_between_measured_sizes_is_found() -> None:
    curve = CostCurve(((1, 1.0), (16, 1.0), (32, 2.0)))
    for _ in range(10):
        curve.observe(16, 1.0)
        curve.observe(17, 2.0)
    assert curve.at(17) == pytest.approx(2, rel=0.1)
    assert curve.at(16) == pytest.approx(1, rel=0.1)
    assert curve.at(25) == pytest.approx(2, rel=0.1)


def test_added_sizes_are_bounded() -> None:
    curve = CostCurve(((1, 1.0), (512, 2.0)))
    for step in range(4000):
        size = 1 + step // 2 % 511
        curve.observe(size, 1.0 + size % 2)
    assert len(curve.sizes) <= 40


def test_learns_the_slope_beyond_the_largest_size() -> None:
    curve = CostCurve(((1, 1.0), (64, 1.0)))
    for step in range(40):
        curve.observe(512, (1 + (512 - 64) / 50) * (10 if step % 20 == 7 else 1))
    assert curve.at(128) - curve.at(64) == pytest.approx(64 / 50, rel=0.1)


def test_asks_for_sizes_that_are_not_observed() -> None:
    curve = CostCurve(MEASURED)
    for _ in range(8):
        curve.observe(32, 4.0)
    assert curve.is_stale(8)
    assert not curve.is_stale(32)
    assert not curve.is_stale(100)
    curve.observe(8, 1.0)
    assert not curve.is_stale(8)


def test_the_first_steps_tell_the_scale_of_all_sizes() -> None:
    """Symptom: the first size observed was corrected alone. The others looked cheap and were tried,
    at 64 sequences for 9% of the time.
    """
    curve = CostCurve(MEASURED)
    assert curve.is_stale(16)
    for _ in range(4):
        curve.observe(16, 3.0)
    assert not curve.is_stale(16)
    assert curve.at(16) == pytest.approx(3, rel=0.02)
    assert curve.at(32) == pytest.approx(6, rel=0.1)


def test_a_stair_beside_a_known_size_leaves_that_size_alone() -> None:
    """Symptom: 2 drafts beside 64 sequences cost a stair; plain steps seemed to cost as much."""
    curve = CostCurve(((1, 1.0), (64, 4.0), (128, 8.0)))
    for _ in range(5):
        curve.observe(64, 4.0)
    for _ in range(20):
        curve.observe(66, 5.0)
    assert curve.at(66) == pytest.approx(5, rel=0.02)
    assert curve.at(64) == pytest.approx(4, rel=0.03)


def test_without_a_network_proposing_is_free() -> None:
    costs = DraftCosts(())
    costs.plan([3, 1])
    assert costs.by_rows(2) == ([0.0] * 3, [0.0] * 3)
    assert costs.of_another_row(5) == costs.observe(2, 4, 1.0) == 0.0


def test_rows_share_a_pass() -> None:
    first, later = DraftCosts(DRAFTS).by_rows(4)
    assert first == pytest.approx([0.0, 0.3, 0.4, 0.5, 0.6])
    assert later[3] - later[2] == pytest.approx(0.1 / 3)
    assert DraftCosts(DRAFTS).of_another_row(0) == pytest.approx(0.3)
    assert DraftCosts(DRAFTS).of_another_row(1) == pytest.approx(0.1)


def test_a_step_is_compared_with_its_own_plan() -> None:
    """Symptom: a step is compared with a later one's plan, because steps overlap."""
    costs = DraftCosts(DRAFTS)
    costs.plan([1, 0, 0])
    costs.plan([0, 0, 0])
    costs.plan([2, 0, 1])
    expected = costs.by_rows(2)[0][2] + costs.by_rows(2)[1][1]
    assert costs.observe(1, 1, 0.3) == pytest.approx(0.0)
    assert costs.observe(2, 3, expected + 0.25) == pytest.approx(0.25)
    assert costs.observe(2, 3, 9.0) == 0.0, "a plan was used twice"


def test_two_slow_steps_make_both_passes_dearer() -> None:
    costs = DraftCosts(DRAFTS)
    for _ in range(2):
        costs.plan([1])
        costs.observe(1, 1, 0.6)
    first, later = costs.by_rows(1)
    assert first[1] > 0.3
    assert first[1] / later[1] == pytest.approx(3)
