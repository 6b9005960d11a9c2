"""Compares tensors and, where they differ, says where: the worst number and which indices."""

import itertools
import os
from collections.abc import Sequence

import torch

AXES = {1: ("number",), 2: ("row", "number"), 3: ("token", "head", "number")}
"""What the axes of a tensor are called in a message, by their count, unless the caller says it."""
_MOST_RANGES = 8


def assert_close(
    found: torch.Tensor,
    expected: torch.Tensor,
    *,
    atol: float | torch.Tensor = 0.0,
    rtol: float = 0.0,
    of_largest: float = 0.0,
    axes: Sequence[str] | None = None,
    rows: Sequence[str] | None = None,
) -> None:
    """Check |found - expected| <= atol + rtol * |expected| + of_largest * max |expected|.

    NaN is never close. A reference in float64 may be compared with any dtype. The message has the
    test's name, and in it the variant that ran.

    Args:
        atol: a number, or a tensor that broadcasts to the shape of `expected`.
        axes: the names of the axes, by default those of `AXES`.
        rows: what to call each index of the first axis, such as `token_names` of a batch.
    """
    assert found.shape == expected.shape, f"shape {[*found.shape]}, not {[*expected.shape]}"
    assert expected.dtype in (found.dtype, torch.float64), f"{found.dtype}, not {expected.dtype}"
    if not expected.numel():
        return
    wide, exact = found.double(), expected.double()
    error = torch.where(wide == exact, 0.0, (wide - exact).abs())  # 0 of equal infinities, too
    size = torch.where(exact.isfinite(), exact.abs(), 0.0)
    limit = atol + rtol * size + of_largest * size.max()
    wrong = ~(error <= limit)  # also where the error is NaN
    if not wrong.any():
        return
    names = axes or AXES.get(error.dim()) or [f"axis {axis}" for axis in range(error.dim())]
    excess = torch.where(wrong, error - limit, -torch.inf).nan_to_num(torch.inf, torch.inf)
    worst = [int(i) for i in torch.unravel_index(excess.argmax(), error.shape)]
    place = [f"{name} {index}" for name, index in zip(names, worst, strict=True)]
    if rows is not None:
        place[0] += f" ({rows[worst[0]]})"
    allowed = torch.as_tensor(limit).expand_as(error)[*worst]
    raise AssertionError(
        "\n".join(
            [
                f"{error[*worst]:.3g} apart where {allowed:.3g} is allowed, in {_test_name()}",
                f"worst: {', '.join(place)}: {found[*worst]:.6g}, not {expected[*worst]:.6g}",
                *_wrong_indices(wrong, names, rows),
            ]
        )
    )


def token_names(query_lens: Sequence[int], seq_lens: Sequence[int]) -> list[str]:
    """Return a name for each token of a batch: its row, and its position in the row's sequence."""
    return [
        f"row {row}, position {position} of {seq_len}"
        for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True))
        for position in range(seq_len - query_len, seq_len)
    ]


def _wrong_indices(
    wrong: torch.Tensor, names: Sequence[str], rows: Sequence[str] | None
) -> list[str]:
    """Say for each axis at which indices anything is wrong, and what the first right one is."""
    lines = []
    for axis, name in enumerate(names):
        others = [other for other in range(wrong.dim()) if other != axis]
        has_wrong = wrong.any(others) if others else wrong
        indices = has_wrong.nonzero().flatten().tolist()
        lines.append(f"wrong in {len(indices)} of {len(has_wrong)} {name}s: {_ranges(indices)}")
        if axis == 0 and rows is not None and len(indices) < len(has_wrong):
            right = [rows[index] for index in (~has_wrong).nonzero().flatten().tolist()]
            lines.append(f"right: {'; '.join(right[:_MOST_RANGES])}{', ...' * (len(right) > 8)}")
    return lines


def _ranges(indices: list[int]) -> str:
    """Return ascending numbers as ranges, such as "0-3, 7"; the first of them if there are many."""
    ranges = []
    for _, group in itertools.groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):
        run = [index for _, index in group]
        ranges.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(ranges[:_MOST_RANGES] + ["..."] * (len(ranges) > _MOST_RANGES))


def _test_name() -> str:
    """Return the running test, with its parameters: "test_x.py::test_y[avx2-64]"."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition("/")[2].removesuffix(" (call)")
