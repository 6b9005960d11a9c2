"""The gated delta rule on a GPU: a prompt's tokens in cells of 64, all others one by one.

The form inside a cell is that of "Parallelizing Linear Transformers with the Delta Rule over
Sequence Length" (arXiv 2406.06484) and "Gated Delta Networks" (arXiv 2412.06464). Which tokens are
in cells is not decided here: see `Cells`. Imports triton.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.states import CHUNK_SIZE, Cells, StateRows, States
from nanovllm.kernels.triton.states import _part_of, _softplus, delta_by_token

_CELL = tl.constexpr(CHUNK_SIZE)
_BLOCK = tl.constexpr(16)
_VALUES = 16
"""Columns of a head's state that a program takes through a row's cells."""


def gated_delta(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: States,
    rows: StateRows,
    bound: float | None = None,
) -> torch.Tensor:
    value_heads = b.shape[1]
    key_dim, value_dim = states.parts[1].shape
    key_heads, rest = divmod(qkv.shape[1] - value_heads * value_dim, 2 * key_dim)
    assert rest == 0
    assert qkv.is_contiguous()
    if qkv.data_ptr() % 16:  # would be loaded otherwise, and summed in another order
        qkv = qkv.clone()
    assert a.stride(1) == b.stride(1) == 1
    out = qkv.new_empty(len(qkv), value_heads, value_dim)
    sizes = {
        "KEY_HEADS": key_heads,
        "VALUE_HEADS": value_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
    }
    cells = rows.cells
    if cells is not None:
        assert a.shape == b.shape
        assert bound is None
        _delta_by_cell(qkv, (a, b, a_log, dt_bias), out, states, rows, cells, sizes)
    if len(qkv) > (0 if cells is None else cells.num_tokens):
        delta_by_token(qkv, (a, b, a_log, dt_bias), out, states, rows, sizes, bound)
    return out


def _delta_by_cell(
    qkv: torch.Tensor,
    gates: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    states: States,
    rows: StateRows,
    cells: Cells,
    sizes: dict[str, int],
) -> None:
    """Compute the tokens in cells, and write the states after them."""
    a, b, *_ = gates
    num_cells = len(cells.spans)
    heads = sizes["VALUE_HEADS"]
    value_dim = sizes["VALUE_DIM"]
    shape = num_cells, heads, 2 * CHUNK_SIZE + 4, CHUNK_SIZE
    prepared = torch.empty(shape, dtype=torch.float32, device=qkv.device)
    keys = max(triton.next_power_of_2(sizes["KEY_DIM"]), 16)
    values = min(max(triton.next_power_of_2(value_dim), 16), _VALUES)
    _prepare_cells[(num_cells, heads)](
        qkv, *gates, cells.spans, prepared, a.stride(0), b.stride(0),
        SCALE=sizes["KEY_DIM"] ** -0.5, KEYS=keys, **sizes, num_warps=8,
    )  # fmt: skip
    _advance_cells[(triton.cdiv(value_dim, values), heads, len(rows.write_lens))](
        qkv, prepared, out, states.pool, states.places,
        rows.pages, cells.spans, cells.ends, rows.write_lens,
        rows.pages.stride(0), states.pool.stride(0),
        KEYS=keys, VALUES=values, **sizes, num_warps=4, num_stages=1,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["a", "b", "spans"])
def _prepare_cells(
    qkv, a, b, a_log, dt_bias, spans, prepared, a_stride, b_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, SCALE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute all of a cell, for one head, that does not depend on the state before it.

    Let e_i be the decay from the cell's begin to token i, and d_ij that from token j to i.
    `prepared` gets matrices and vectors, row i of them for token i:
    - T = (I + tril(beta_i d_ij k_i k_j, -1))^-1 diag(beta): T (v - e k S) are the changes of S.
    - tril(d_ij q_i k_j): the part of the outputs that comes from the changes.
    - e times the scale of k, and of q; the decay to the cell's end times the scale of k; e.
    """
    cell = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(spans + 2 * cell).to(tl.int64)
    count = tl.load(spans + 2 * cell + 1)
    token = tl.arange(0, _CELL)
    key = tl.arange(0, KEYS)
    exists = token < count
    WIDTH: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    q_at = qkv + (begin + token)[:, None] * WIDTH + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
    inside = exists[:, None] & (key < KEY_DIM)[None, :]
    k = tl.load(q_at + KEY_HEADS * KEY_DIM + key[None, :], inside, 0.0)
    k_scale = _inverse_length(k)
    q = tl.load(q_at + key[None, :], inside, 0.0)
    q_scale = _inverse_length(q) * SCALE
    gate = tl.load(a + (begin + token) * a_stride + head, exists, 0.0).to(tl.float32)
    beta = tl.sigmoid(tl.load(b + (begin + token) * b_stride + head, exists, 0.0).to(tl.float32))
    beta = tl.where(exists, beta, 0.0)  # a token that is missing changes nothing
    log_decay = -tl.exp(tl.load(a_log + head)) * _softplus(gate + tl.load(dt_bias + head))
    log_decay = tl.where(exists, log_decay, 0.0)

    row = token[:, None]
    column = token[None, :]
    # Each is a separate sum: a difference of two sums would lose bits.
    of_later = tl.where(row > column, log_decay[:, None], 0.0)
    decay = tl.exp(tl.cumsum(of_later, 0)) * k_scale[None, :]
    scores = _dot(q, tl.trans(k)) * decay * q_scale[:, None]

    SIZE: tl.constexpr = (2 * _CELL + 4) * _CELL
    target = prepared + (cell.to(tl.int64) * VALUE_HEADS + head) * SIZE
    tl.store(target + (_CELL + row) * _CELL + column, tl.where(row >= column, scores, 0.0))
    vectors = target + 2 * _CELL * _CELL + token
    from_begin = tl.exp(tl.cumsum(log_decay, 0))
    tl.store(vectors, from_begin * k_scale)
    tl.store(vectors + _CELL, from_begin * q_scale)
    tl.store(vectors + 2 * _CELL, tl.exp(tl.sum(of_later, 0)) * k_scale)
    tl.store(vectors + 3 * _CELL, from_begin)
    lower = _dot(k, tl.trans(k)) * decay * (beta * k_scale)[:, None]
    lower = tl.where(row > column, lower, 0.0)
    tl.store(target + row * _CELL + column, lower)
    tl.debug_barrier()
    solved = _inverse_of_unit_lower(lower, target) * beta[None, :]
    tl.debug_barrier()
    tl.store(target + row * _CELL + column, solved)


@triton.jit
def _inverse_of_unit_lower(lower, stored):
    """Return (I + lower)^-1 for a strictly lower triangular matrix of a cell's size, also `stored`.

    Blocks of 16 on the diagonal are inverted row by row, and the others follow block by block. No
    powers are added up: those of tokens that are alike would be huge, and cancel.
    """
    BLOCKS: tl.constexpr = _CELL // _BLOCK
    block = tl.arange(0, BLOCKS)
    inner = tl.arange(0, _BLOCK)
    split = tl.reshape(lower, [BLOCKS, _BLOCK, BLOCKS, _BLOCK])
    on_diagonal = block[:, None, None, None] == block[None, None, :, None]
    diagonal = tl.sum(tl.where(on_diagonal, split, 0.0), 2)
    of_rows = tl.permute(diagonal, (0, 2, 1))
    row = inner[None, :, None]
    column = inner[None, None, :]
    inverse = tl.where(row == column, 1.0, 0.0) + tl.zeros([BLOCKS, _BLOCK, _BLOCK], tl.float32)
    for index in range(1, _BLOCK):
        factors = tl.sum(tl.where(column == index, of_rows, 0.0), 2)
        change = tl.sum(factors[:, :, None] * inverse, 1)
        inverse -= tl.where(row == index, change[:, None, :], 0.0)

    whole = tl.reshape(tl.where(on_diagonal, inverse[:, :, None, :], 0.0), [_CELL, _CELL])
    token = tl.arange(0, _CELL)[None, :]
    for index in tl.static_range(1, BLOCKS):
        is_block = block[:, None, None] == index
        rows = tl.load(stored + (index * _BLOCK + inner[:, None]) * _CELL + token)
        rows = tl.where(token < index * _BLOCK, rows, 0.0)
        own = tl.sum(tl.where(is_block, inverse, 0.0), 0)
        change = tl.where(is_block, _dot(own, _dot(rows, whole))[None, :, :], 0.0)
        whole -= tl.reshape(change, [_CELL, _CELL])
    return whole


@triton.jit(
    do_not_specialize=["pages_stride"],
    do_not_specialize_on_alignment=["pages", "spans", "ends", "write_lens"],
)
def _advance_cells(
    qkv, prepared, out, pool, places, pages, spans, ends, write_lens, pages_stride, page_bytes,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Take a row's cells one by one through VALUES columns of one head's state."""
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    first = tl.load(ends + row)
    end = tl.load(ends + row + 1)
    if first == end:
        return
    token = tl.arange(0, _CELL)
    key = tl.arange(0, KEYS)
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    is_key = (key < KEY_DIM)[None, :]
    is_value = (value < VALUE_DIM)[None, :]
    part = _part_of(pool, places, pages + row * pages_stride, 1 + head, page_bytes, tl.float32)
    part += key[:, None] * VALUE_DIM + value[None, :]
    inside = (key < KEY_DIM)[:, None] & is_value
    state = tl.load(part, inside, 0.0)
    WIDTH: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    SIZE: tl.constexpr = (2 * _CELL + 4) * _CELL
    q_at = qkv + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + key[None, :]
    v_at = qkv + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value[None, :]
    square = token[:, None] * _CELL + token[None, :]
    for cell in range(first, end):
        begin = tl.load(spans + 2 * cell).to(tl.int64)
        count = tl.load(spans + 2 * cell + 1)
        exists = (token < count)[:, None]
        place = (begin + token)[:, None]
        k = tl.load(q_at + place * WIDTH + KEY_HEADS * KEY_DIM, exists & is_key, 0.0)
        source = prepared + (cell * VALUE_HEADS + head) * SIZE
        vectors = source + 2 * _CELL * _CELL + token
        k_begin = tl.load(vectors)
        q_begin = tl.load(vectors + _CELL)
        k_end = tl.load(vectors + 2 * _CELL)
        decay = tl.load(source + SIZE - 1)
        q = tl.load(q_at + place * WIDTH, exists & is_key, 0.0)
        wanted = _dot(k, state) * -k_begin[:, None]
        result = _dot(q, state) * q_begin[:, None]
        wanted += tl.load(v_at + place * WIDTH, exists & is_value, 0.0).to(tl.float32)
        change = _dot(tl.load(source + square), wanted)
        scores = tl.load(source + _CELL * _CELL + square)
        result += _dot(scores, change)
        target = out + (place * VALUE_HEADS + head) * VALUE_DIM + value[None, :]
        tl.store(target, result.to(out.dtype.element_ty), exists & is_value)
        state = state * decay + _dot(tl.trans(k), change * k_end[:, None])
    if tl.load(write_lens + row) > 0:
        tl.store(part, state, inside)


@triton.jit
def _inverse_length(x):
    """Return the inverse length of each row."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)


@triton.jit
def _dot(x, y):
    """Return the product in float32, with about its precision, by tensor cores for bfloat16.

    Products of bfloat16 are exact in float32. A number in float32 is the sum of three in bfloat16.
    """
    if y.dtype == tl.bfloat16:
        return tl.dot(x, y)
    high, middle, low = _parts(y)
    if x.dtype == tl.bfloat16:
        return tl.dot(x, high, tl.dot(x, middle, tl.dot(x, low)))
    x_high, x_middle, x_low = _parts(x)
    small = tl.dot(x_middle, middle, tl.dot(x_low, high, tl.dot(x_high, low)))
    return tl.dot(x_high, high, tl.dot(x_high, middle, tl.dot(x_middle, high, small)))


@triton.jit
def _parts(x):
    """Return three tensors in bfloat16 whose sum is `x`."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)
