"""Sums over inputs that several programs share: each writes its part, and the last one to finish
adds them up in order. So the bits do not depend on which program finishes first.
"""

import torch
import triton
import triton.language as tl

FEW = 64  # maximum rows of x for which the inputs are split
MIN_TILE = 32  # minimum outputs of a tile whose inputs are split
_MIN_STEPS = 2  # minimum blocks of inputs of a split
_MAX_SPLITS = 16  # maximum splits, whose sums one program adds up


def split_options(rows: int, outputs: int, steps: int, most_programs: int) -> dict[str, int]:
    """Return the launch options for up to FEW rows. A tile is M rows times N outputs, of SPLITS
    parts of the inputs.

    With few rows the tiles are narrow, so that more programs read the weight. SPLITS depends on
    the shape of the weight, so the bits of a row do not depend on the number of rows up to 16.

    Args:
        steps: blocks of inputs.
        most_programs: of a tile of rows whose inputs are split.
    """
    m, n = (16, MIN_TILE) if rows <= 16 else (32, 2 * MIN_TILE)
    most = most_programs // triton.cdiv(outputs, n), steps // _MIN_STEPS, _MAX_SPLITS
    return {"M": m, "N": n, "SPLITS": max(1, min(most)), "num_warps": 4, "num_stages": 4}


def plan_launch(
    x: torch.Tensor, outputs: int, steps: int, most_programs: int, many: dict[str, int]
) -> tuple[int, torch.Tensor, dict[str, int]]:
    """Return the number of programs, the memory `partial` of `add_splits`, and launch options.

    Args:
        steps, most_programs: see `split_options`.
        many: the options for more than FEW rows of x.
    """
    options = many if len(x) > FEW else split_options(len(x), outputs, steps, most_programs)
    m = options["M"]
    n = options["N"]
    splits = options["SPLITS"]
    programs = triton.cdiv(len(x), m) * triton.cdiv(outputs, n) * splits
    partial = x.new_empty(programs if splits > 1 else 0, m, n, dtype=torch.float32)
    return programs, partial, options


def new_counters(outputs: int, device: torch.device) -> torch.Tensor:
    """Return the counters for a weight of `outputs` rows, all 0 between two launches.

    They count the finished splits of each tile, for up to FEW rows of x in tiles of at least 16 by
    2 * MIN_TILE, or one tile of rows by MIN_TILE. Launches that share them must run one after
    another.
    """
    return torch.zeros(2 * triton.cdiv(outputs, 2 * MIN_TILE), dtype=torch.int32, device=device)


@triton.jit
def add_splits(acc, partial, splits_done, tile, split, SPLITS: tl.constexpr):
    """Return the sum [M, N] of all splits of `tile`, and whether this program ended last.

    Only then is the sum one. The counter is 0 again afterwards.

    Args:
        acc: [M, N] float32, this program's part.
        partial: [tiles, SPLITS, M, N] float32 to work in.
    """
    M: tl.constexpr = acc.shape[0]
    N: tl.constexpr = acc.shape[1]
    cell = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    first = partial + tile * SPLITS * M * N + cell
    tl.store(first + split * M * N, acc)
    tl.debug_barrier()  # all threads must have stored before the split counts as done
    is_last = tl.atomic_add(splits_done + tile, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        acc = tl.zeros([M, N], tl.float32)
        for part in tl.static_range(SPLITS):
            # ".cg" reads from the L2. The other programs' stores are there.
            acc += tl.load(first + part * M * N, cache_modifier=".cg")
        tl.store(splits_done + tile, 0)
    return acc, is_last
