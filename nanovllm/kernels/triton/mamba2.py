"""The recurrence of Mamba-2 on a GPU, token by token. Imports triton."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.states import StateRows, States
from nanovllm.kernels.triton.states import _STATE_TILE, _part_of, _softplus


def mamba2(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    limits: tuple[float, float],
    states: States,
    rows: StateRows,
) -> torch.Tensor:
    heads = dt.shape[1]
    state_dim, head_dim = states.parts[1].shape
    groups, rest = divmod(xbc.shape[1] - heads * head_dim, 2 * state_dim)
    assert rest == 0
    assert xbc.is_contiguous()
    if xbc.data_ptr() % 16:  # would be loaded otherwise, and summed in another order
        xbc = xbc.clone()
    assert dt.stride(1) == 1
    out = xbc.new_empty(len(xbc), heads, head_dim)
    block = triton.next_power_of_2(state_dim)
    tile = min(max(_STATE_TILE // block, 1), triton.next_power_of_2(head_dim))
    if len(xbc):
        _mamba2[(triton.cdiv(head_dim, tile), heads, len(rows.write_lens))](
            xbc, dt, a_log, d, dt_bias, out, states.pool, states.places,
            rows.pages, rows.cu_seqlens, rows.write_lens,
            dt.stride(0), rows.pages.stride(0), states.pool.stride(0), *limits,
            GROUPS=groups, HEADS=heads, STATE_DIM=state_dim, HEAD_DIM=head_dim,
            STATES=block, CHANNELS=tile, num_warps=1,
        )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=["pages_stride"],
    do_not_specialize_on_alignment=["dt", "pages", "cu_seqlens", "write_lens"],
)
def _mamba2(
    xbc, dt, a_log, d, dt_bias, out, pool, places, pages, cu_seqlens, write_lens,
    dt_stride, pages_stride, page_bytes, dt_min, dt_max,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, STATE_DIM: tl.constexpr, HEAD_DIM: tl.constexpr,
    STATES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Take a row's tokens one by one through CHANNELS columns of one head's state.

    The inputs of the next token are loaded while one is computed.
    """
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    begin = tl.load(cu_seqlens + row).to(tl.int64)
    end = tl.load(cu_seqlens + row + 1)
    if begin == end:
        return
    last_written = begin + tl.load(write_lens + row) - 1
    index = tl.arange(0, STATES)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_index = index < STATE_DIM
    is_channel = channel < HEAD_DIM
    inside = is_index[:, None] & is_channel[None, :]
    part = _part_of(pool, places, pages + row * pages_stride, 1 + head, page_bytes, tl.float32)
    part += index[:, None] * HEAD_DIM + channel[None, :]
    state = tl.load(part, inside, 0.0)
    rate = -tl.exp(tl.load(a_log + head))
    shift = tl.load(dt_bias + head)
    skip = tl.load(d + head)

    WIDTH: tl.constexpr = HEADS * HEAD_DIM + 2 * GROUPS * STATE_DIM
    x_at = xbc + head * HEAD_DIM + channel
    b_at = xbc + HEADS * HEAD_DIM + head // (HEADS // GROUPS) * STATE_DIM + index
    c_at = b_at + GROUPS * STATE_DIM
    x = tl.load(x_at + begin * WIDTH, is_channel, 0.0)
    b = tl.load(b_at + begin * WIDTH, is_index, 0.0)
    c = tl.load(c_at + begin * WIDTH, is_index, 0.0)
    step = tl.load(dt + begin * dt_stride + head)
    for token in range(begin, end):
        x_wide = x.to(tl.float32)
        b_wide = b.to(tl.float32)
        c_wide = c.to(tl.float32)
        time = tl.minimum(tl.maximum(_softplus(step.to(tl.float32) + shift), dt_min), dt_max)
        following = token + 1
        exists = following < end
        x = tl.load(x_at + following * WIDTH, is_channel & exists, 0.0)
        b = tl.load(b_at + following * WIDTH, is_index & exists, 0.0)
        c = tl.load(c_at + following * WIDTH, is_index & exists, 0.0)
        step = tl.load(dt + following * dt_stride + head, exists, 0.0)
        state = state * tl.exp(rate * time) + b_wide[:, None] * (time * x_wide)[None, :]
        result = tl.sum(c_wide[:, None] * state, 0) + skip * x_wide
        target = out + (token * HEADS + head) * HEAD_DIM + channel
        tl.store(target, result.to(out.dtype.element_ty), is_channel)
        if token == last_written:
            tl.store(part, state, inside)
