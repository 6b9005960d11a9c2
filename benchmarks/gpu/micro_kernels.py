"""Triton kernels that only benchmarks use: a tiny one, a grid barrier, a product with split K.

Knows tensors only. Imports triton, so import it where there is a GPU.
"""

import torch
import triton
import triton.language as tl

TINY_SIZE = 1024
"""Numbers that a program of `tiny` adds 1 to."""


@triton.jit
def _tiny(x, y, LAUNCH: tl.constexpr, SIZE: tl.constexpr):
    if LAUNCH == 2:  # the next kernel's programs may start at once; they wait for all of this one
        tl.extra.cuda.gdc_launch_dependents()
    if LAUNCH >= 1:
        tl.extra.cuda.gdc_wait()
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + place) + 1
    if LAUNCH == 1:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(y + place, value)


def tiny(x: torch.Tensor, y: torch.Tensor, launch: int) -> None:
    """Write x + 1 to y.

    Args:
        x: [n * TINY_SIZE] float32, for n programs.
        y: like `x`.
        launch: 0: plain; 1: dependent, the next kernel may start when all programs have read; 2:
            dependent, the next kernel may start when all programs have started.
    """
    programs = len(x) // TINY_SIZE
    _tiny[(programs,)](
        x, y, LAUNCH=launch, SIZE=TINY_SIZE, num_warps=4, **({"launch_pdl": True} if launch else {})
    )


@triton.jit(do_not_specialize=["count"])
def _barriers(counter, count):
    for turn in range(count):
        tl.debug_barrier()
        tl.atomic_add(counter, 1, sem="acq_rel")
        while tl.load(counter, volatile=True) < (turn + 1) * tl.num_programs(0):
            pass
        tl.debug_barrier()


def barriers(counter: torch.Tensor, programs: int, count: int) -> None:
    """Let `programs` programs, all on the GPU at once, meet `count` times.

    Args:
        counter: [1] int32, set to 0 first.
    """
    counter.zero_()
    _barriers[(programs,)](counter, count, num_warps=4, launch_cooperative_grid=True)


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x, w, out, rows, N: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    DEPENDENT: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(2) * BM + tl.arange(0, BM)
    first: tl.constexpr = K // SPLITS
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    if PREFETCH:  # a line of the L2 is 128 bytes, 64 weights
        for start in range(0, first, BK):
            line = split * first + start + tl.arange(0, BK // 64) * 64
            place = (w + column[:, None] * K + line[None, :]).to(tl.int64)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place], tl.int32, False, 1
            )
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, first, BK):
        k = split * first + start + tl.arange(0, BK)
        a = tl.load(x + row[:, None] * K + k[None, :], mask=(row < rows)[:, None], other=0.0)
        b = tl.load(w + column[None, :] * K + k[:, None])
        acc = tl.dot(a, b, acc)
    place = (split * rows + row)[:, None] * N + column[None, :]
    tl.store(out + place, acc, mask=(row < rows)[:, None])


def num_splits(outputs: int, inputs: int, processors: int) -> int:
    """Return into how many parts K is cut: until there are 1.5 programs for each processor."""
    splits = 1
    while outputs // _BN * splits < 1.5 * processors and inputs % (2 * splits * _BK) == 0:
        splits *= 2
    return splits


def linear(
    x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, dependent: bool, prefetch: bool
) -> None:
    """Write the partial sums of x @ w.T; their sum over the first dimension is the product.

    Args:
        x: [M, K].
        w: [N, K]; N is a multiple of 32.
        out: [splits, M, N] float32; splits as from `num_splits`.
        dependent: start while the kernel before is running, and wait for it before reading x.
        prefetch: fetch the weights into the L2 cache before waiting.
    """
    splits, rows, outputs = out.shape
    bm = min(64, max(16, triton.next_power_of_2(rows)))
    grid = (outputs // _BN, splits, triton.cdiv(rows, bm))
    _linear[grid](
        x, w, out, rows, N=outputs, K=w.shape[1], SPLITS=splits, BM=bm, BN=_BN, BK=_BK,
        DEPENDENT=dependent, PREFETCH=prefetch, num_warps=4, num_stages=4,
        **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip


_BN = 32
_BK = 128
