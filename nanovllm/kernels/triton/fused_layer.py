"""Triton kernels of a decoder layer for a few rows: each linear, with the norm before it, and with
the activation or the residual behind it.

Each program reads a part of the weight, so all rows must fit into one tile. The result for a row
does not depend on the other rows: what is split is split by the weight's shape alone. Knows no
attention and no model.
"""

import torch
import triton
import triton.language as tl

MAX_ROWS = 16
"""Rows of a tile of the tensor cores."""

_PROGRAMS = 128
"""Programs that read one weight, at least, where its shape allows: about the SMs of a large GPU."""
_SPLIT_STEP = 256
"""A split of a linear's inputs is a multiple of this; a multiple of the inputs of a `tl.dot`."""
_NORM_BLOCK = 1024
"""Numbers of a row that are squared at once: 8 for each thread. So the threads lie along the row,
and the order of the sum does not depend on the number of rows."""
_FETCH_BYTES = 1024
"""Bytes of each output's weights that a program fetches ahead, at most."""
_PIECES = 128
"""Pieces in which a program fetches ahead: one for each thread."""
_FETCH_PIECES = tl.constexpr(_PIECES)


def norm_linear(
    x: torch.Tensor,
    partials: torch.Tensor | None,
    partials_bias: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    gated: bool,
    chained: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Finish the previous linear, add it to the residual `x`, normalise, and multiply by `weight`.

    Rounds at the same places as the layers: after the linear, the sum, the norm, its weight, and
    the parts of the activation.

    Args:
        x: [R, size], R at most MAX_ROWS.
        partials: [splits, R, size] float32, which `linear_partials` returned; None: add nothing.
        partials_bias: [size], the bias of that linear.
        norm_weight: [size].
        weight: [outputs, size]; if `gated`, its halves are SwiGLU's gate and up.
        bias: [outputs].
        chained: see `launch_options`.

    Returns:
        [R, outputs], or [R, outputs / 2] of SwiGLU's product; and the new residual [R, size].
    """
    (rows, size), outputs = x.shape, len(weight) // (1 + gated)
    width = _outputs_per_program(outputs, gated)
    is_small = rows <= 4 and width * (1 + gated) <= 32
    out = x.new_empty(rows, outputs)
    total = x if partials is None else torch.empty_like(x)
    _norm_linear[(triton.cdiv(outputs, width),)](
        x, partials, partials_bias, total, norm_weight, eps, weight, bias, out, rows,
        SIZE=size, OUTPUTS=outputs, SPLITS=0 if partials is None else len(partials), GATED=gated,
        NORM_BLOCK=min(triton.next_power_of_2(size), _NORM_BLOCK),
        **_tile(x, weight, width, size), num_stages=4 if is_small else 3,
        **launch_options(chained),
    )  # fmt: skip
    return out, total


def linear_partials(x: torch.Tensor, weight: torch.Tensor, *, chained: bool) -> torch.Tensor:
    """Return parts of x times the transpose of `weight`, for `norm_linear` to add up.

    Args:
        x: [R, size], R at most MAX_ROWS.
        weight: [outputs, size].
        chained: see `launch_options`.

    Returns:
        [splits, R, outputs] float32; each part sums over some of the inputs.
    """
    (rows, size), outputs = x.shape, len(weight)
    width = _outputs_per_program(outputs, False)
    tiles = triton.cdiv(outputs, width)
    steps = triton.cdiv(size, _SPLIT_STEP)
    split = triton.cdiv(steps, triton.cdiv(_PROGRAMS, tiles)) * _SPLIT_STEP
    splits = triton.cdiv(size, split)
    partials = x.new_empty(splits, rows, outputs, dtype=torch.float32)
    _linear_partials[(tiles, splits)](
        x, weight, partials, rows, SIZE=size, OUTPUTS=outputs, SPLIT=split,
        **_tile(x, weight, width, split), num_stages=4, **launch_options(chained),
    )  # fmt: skip
    return partials


def launch_options(chained: bool) -> dict[str, bool]:
    """Return launch options: whether the kernel may begin before the previous one has ended.

    A chained kernel waits for the previous one before it touches anything but weights. This is
    programmatic dependent launch, which needs compute capability 9.0.
    """
    return {"CHAINED": True, "launch_pdl": True} if chained else {"CHAINED": False}


@triton.jit
def wait_for_previous(CHAINED: tl.constexpr):
    """Wait until the previous kernel has ended and its stores are visible.

    Only then let the next kernel begin. So it follows that the kernels before the previous one have
    ended as well.
    """
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def _outputs_per_program(outputs: int, gated: bool) -> int:
    """Return the outputs of a program: as many as leave _PROGRAMS programs, from 16 on."""
    fitting = [n for n in (64, 32) if outputs >= n * _PROGRAMS and n * (1 + gated) <= 64]
    return fitting[0] if fitting else 16


def _inputs_per_step(x: torch.Tensor) -> int:
    """Return the inputs of one `tl.dot`: 512 bytes of a few rows, 256 of more, or all."""
    num_bytes = 512 if len(x) <= 4 else 256
    return max(min(num_bytes // x.itemsize, int(triton.next_power_of_2(x.shape[1]))), 16)


def _tile(x: torch.Tensor, weight: torch.Tensor, width: int, inputs: int) -> dict[str, int]:
    """Return the size of a program: R rows, N outputs, K inputs at once; FETCH, how many inputs of
    each output it fetches ahead; and its warps.

    Few values of R, because each is another compilation.

    Args:
        inputs: that a program reads.
    """
    assert x.is_contiguous()
    assert weight.is_contiguous()
    is_aligned = (weight.data_ptr() | weight.stride(0) * x.itemsize) % 16 == 0
    step = 16 * _PIECES // width  # each piece is a multiple of 16 bytes
    fetch = min(min(inputs, x.shape[1]) * x.itemsize, _FETCH_BYTES) // step * step
    return {
        "R": next(rows for rows in (1, 4, MAX_ROWS) if len(x) <= rows),
        "N": width,
        "K": _inputs_per_step(x),
        "FETCH": fetch // x.itemsize if is_aligned else 0,
        "num_warps": 2 * x.itemsize,  # float32 takes twice the registers
    }


@triton.jit
def _fetch_ahead(
    weight, output, start, OUTPUTS: tl.constexpr, SIZE: tl.constexpr, FETCH: tl.constexpr
):
    """Let the L2 cache fetch FETCH weights of each `output` [N], from input `start` on."""
    PIECES: tl.constexpr = _FETCH_PIECES // output.shape[0]
    column = tl.minimum(start, SIZE - FETCH) + tl.arange(0, PIECES) * (FETCH // PIECES)
    place = weight + tl.minimum(output, OUTPUTS - 1)[:, None] * SIZE + column[None, :]
    num_bytes = FETCH // PIECES * (weight.dtype.element_ty.primitive_bitwidth // 8)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; // $0", "=r,l,r",
        [place.to(tl.int64), tl.full(place.shape, num_bytes, tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _sum(x, partials, bias, row, column, inside, stride, SIZE: tl.constexpr, SPLITS: tl.constexpr):
    """Return [R, columns] float32: x plus the linear that `partials` are parts of, rounded."""
    place = row * SIZE + column
    dtype = x.dtype.element_ty
    total = tl.load(x + place, inside, 0.0).to(tl.float32)
    if SPLITS:
        added = tl.load(partials + place, inside, 0.0)
        for split in tl.static_range(1, SPLITS):
            added += tl.load(partials + split * stride + place, inside, 0.0)
        if bias is not None:
            added += tl.load(bias + column, column < SIZE, 0.0).to(tl.float32)
        total = (total + added.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["rows"])
def _norm_linear(
    x, partials, partials_bias, total_out, norm_weight, eps, weight, bias, out, rows,
    SIZE: tl.constexpr, OUTPUTS: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr,
    NORM_BLOCK: tl.constexpr, R: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    FETCH: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Compute N outputs of all rows. Each program normalises the rows anew."""
    dtype = x.dtype.element_ty
    output = (tl.program_id(0) * N + tl.arange(0, N)).to(tl.int64)
    if CHAINED and FETCH:
        _fetch_ahead(weight, output, 0, OUTPUTS, SIZE, FETCH)
        if GATED:
            _fetch_ahead(weight + OUTPUTS * SIZE, output, 0, OUTPUTS, SIZE, FETCH)
    wait_for_previous(CHAINED)
    row = tl.arange(0, R)[:, None]
    stride = rows * SIZE
    squares = tl.zeros([R], tl.float32)
    for start in range(0, SIZE, NORM_BLOCK):
        column = start + tl.arange(0, NORM_BLOCK)[None, :]
        inside = (row < rows) & (column < SIZE)
        total = _sum(x, partials, partials_bias, row, column, inside, stride, SIZE, SPLITS)
        if SPLITS:  # each block is stored by one program
            is_ours = start // NORM_BLOCK % tl.num_programs(0) == tl.program_id(0)
            tl.store(total_out + row * SIZE + column, total.to(dtype), inside & is_ours)
        squares += tl.sum(total * total, 1)
    scale = tl.rsqrt(squares / SIZE + eps)[:, None]

    is_output = (output < OUTPUTS)[:, None]
    acc = tl.zeros([R, N], tl.float32)
    up_acc = tl.zeros([R, N], tl.float32)
    for start in range(0, SIZE, K):
        column = start + tl.arange(0, K)[None, :]
        inside = (row < rows) & (column < SIZE)
        total = _sum(x, partials, partials_bias, row, column, inside, stride, SIZE, SPLITS)
        factors = tl.load(norm_weight + column, column < SIZE, 0.0).to(tl.float32)
        normed = ((total * scale).to(dtype).to(tl.float32) * factors).to(dtype)
        place = weight + output[:, None] * SIZE + column
        part = tl.load(place, is_output & (column < SIZE), 0.0)
        acc = tl.dot(normed, tl.trans(part), acc, input_precision="tf32x3")
        if GATED:
            part = tl.load(place + OUTPUTS * SIZE, is_output & (column < SIZE), 0.0)
            up_acc = tl.dot(normed, tl.trans(part), up_acc, input_precision="tf32x3")

    if bias is not None:
        acc += tl.load(bias + output, output < OUTPUTS, 0.0).to(tl.float32)[None, :]
    if GATED:
        if bias is not None:
            up_acc += tl.load(bias + OUTPUTS + output, output < OUTPUTS, 0.0).to(tl.float32)[
                None, :
            ]
        gate, up = acc.to(dtype).to(tl.float32), up_acc.to(dtype).to(tl.float32)
        acc = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up
    place = out + row * OUTPUTS + output[None, :]
    tl.store(place, acc.to(dtype), (row < rows) & (output < OUTPUTS)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _linear_partials(
    x, weight, partials, rows, SIZE: tl.constexpr, OUTPUTS: tl.constexpr, SPLIT: tl.constexpr,
    R: tl.constexpr, N: tl.constexpr, K: tl.constexpr, FETCH: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Compute one part of N outputs of all rows: the sum over SPLIT inputs."""
    output = (tl.program_id(0) * N + tl.arange(0, N)).to(tl.int64)
    first = tl.program_id(1) * SPLIT
    if CHAINED and FETCH:
        _fetch_ahead(weight, output, first, OUTPUTS, SIZE, FETCH)
    wait_for_previous(CHAINED)
    row = tl.arange(0, R)[:, None]
    is_output = (output < OUTPUTS)[:, None]
    acc = tl.zeros([R, N], tl.float32)
    for start in range(first, tl.minimum(first + SPLIT, SIZE), K):
        column = start + tl.arange(0, K)[None, :]
        inputs = tl.load(x + row * SIZE + column, (row < rows) & (column < SIZE), 0.0)
        place = weight + output[:, None] * SIZE + column
        part = tl.load(place, is_output & (column < SIZE), 0.0)
        acc = tl.dot(inputs, tl.trans(part), acc, input_precision="tf32x3")
    place = partials + (tl.program_id(1) * rows + row) * OUTPUTS + output[None, :]
    tl.store(place, acc, (row < rows) & (output < OUTPUTS)[None, :])
