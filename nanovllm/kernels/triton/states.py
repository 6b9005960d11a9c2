"""The Triton kernels of layers with state: the causal convolution, the gated delta rule, and the
norm with a gate.

States lie in pages of the pool and change in place. A token is computed by the same code in a
prompt's chunk and in a decode step, so bits depend neither on chunks nor on the rest of the batch.
The host never waits for the device. `Kernels` says what the functions do. Imports triton: see
`platform.cuda.triton_available`.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.states import ALIGNMENT, StateRows, States

_ALIGNMENT = tl.constexpr(ALIGNMENT)
_CONV_TOKENS = 8
"""Tokens of one row that a program of the convolution computes, unless its state has more."""
_CONV_CHANNELS = 128
_STATE_TILE = 1024
"""Numbers of a head's state that a program of the delta rule, one warp, keeps in registers."""
_NORM_TILE = 2048


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    states: States,
    rows: StateRows,
) -> torch.Tensor:
    tokens, channels = x.shape
    taps = weight.shape[1]
    assert x.is_contiguous()
    assert weight.is_contiguous()
    out = torch.empty_like(x)
    block = min(triton.next_power_of_2(channels), _CONV_CHANNELS)
    kept = triton.next_power_of_2(taps - 1)
    num_rows = len(rows.write_lens)
    tile = max(kept, _CONV_TOKENS)
    if tokens:
        _causal_conv[(tokens // tile + num_rows, triton.cdiv(channels, block))](
            x, weight, bias, out, states.pool, states.places,
            rows.pages, rows.cu_seqlens, rows.write_lens,
            num_rows, rows.pages.stride(0), states.pool.stride(0), channels,
            TAPS=taps, KEPT=kept, SILU=silu, TOKENS=tile, CHANNELS=block, ROWS=64,
        )  # fmt: skip
    return out


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
    block = triton.next_power_of_2(key_dim)
    tile = min(max(_STATE_TILE // block, 1), triton.next_power_of_2(value_dim))
    if len(qkv):
        _gated_delta[(triton.cdiv(value_dim, tile), value_heads, len(rows.write_lens))](
            qkv, a, b, a_log, dt_bias, out, states.pool, states.places,
            rows.pages, rows.cu_seqlens, rows.write_lens,
            a.stride(0), b.stride(0), rows.pages.stride(0), states.pool.stride(0),
            KEY_HEADS=key_heads, VALUE_HEADS=value_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim,
            SCALE=key_dim**-0.5, BOUND=bound, BY_KEY=a.shape[1] > b.shape[1],
            KEYS=block, VALUES=tile, num_warps=1, maxnreg=128,
        )  # fmt: skip
    return out


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


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    gate_first: bool = False,
    sigmoid: bool = False,
) -> torch.Tensor:
    out = x.new_empty(x.shape)
    x = x.flatten(0, -2)
    gate = gate.flatten(0, -2)
    count, size = x.shape
    assert x.stride(1) == gate.stride(1) == 1
    block = triton.next_power_of_2(size)
    rows = max(_NORM_TILE // block, 1)
    if count:
        _gated_rms_norm[(triton.cdiv(count, rows),)](
            x, gate, weight, out, count, x.stride(0), gate.stride(0), size, eps,
            WEIGHTS=weight.numel() // size, GATE_FIRST=gate_first, SIGMOID=sigmoid,
            ROWS=rows, BLOCK=block, num_warps=min(max(block // 512, 4), 16),
        )  # fmt: skip
    return out


@triton.jit
def _part_of(pool, places, pages, part, page_bytes, dtype: tl.constexpr):
    """Return where a part of a row's state begins; `pages` are those of the row."""
    column = tl.load(places + 2 * part)
    offset = tl.load(places + 2 * part + 1)
    page = tl.load(pages + column).to(tl.int64)
    start = pool + page * page_bytes + tl.multiple_of(offset, _ALIGNMENT)
    return start.to(tl.pointer_type(dtype), bitcast=True)


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit(
    do_not_specialize=["num_rows", "pages_stride"],
    do_not_specialize_on_alignment=["pages", "cu_seqlens", "write_lens"],
)
def _causal_conv(
    x, weight, bias, out, pool, places, pages, cu_seqlens, write_lens,
    num_rows, pages_stride, page_bytes, channels,
    TAPS: tl.constexpr, KEPT: tl.constexpr, SILU: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute TOKENS tokens of one row for CHANNELS channels.

    A row that begins at token f has the slots from f / TOKENS + row on, up to where the next row's
    begin, which is far enough. Its first slot alone reads the state, and writes it.
    """
    slot = tl.program_id(0)
    row = tl.full((), -1, tl.int32)
    for start in range(0, num_rows, ROWS):
        ids = start + tl.arange(0, ROWS)
        slots = tl.load(cu_seqlens + ids, ids < num_rows, 0) // TOKENS + ids
        row += tl.sum(((ids < num_rows) & (slots <= slot)).to(tl.int32), 0)
    begin = tl.load(cu_seqlens + row)
    count = tl.load(cu_seqlens + row + 1) - begin
    first = (slot - begin // TOKENS - row) * TOKENS
    if first >= count:
        return
    state = _part_of(
        pool, places, pages + row.to(tl.int64) * pages_stride, 0, page_bytes, x.dtype.element_ty
    )
    channel = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    is_channel = channel < channels
    token = (first + tl.arange(0, TOKENS))[:, None]
    inside = (token < count) & is_channel
    row_x = x + begin.to(tl.int64) * channels
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for tap in tl.static_range(TAPS):
        numbers = _inputs(
            row_x, state, token + tap - (TAPS - 1), channel, channels, inside, TAPS - 1
        )
        factors = tl.load(weight + channel * TAPS + tap, is_channel, 0.0).to(tl.float32)
        total = tl.fma(numbers.to(tl.float32), tl.broadcast_to(factors, total.shape), total)
    if bias is not None:
        total += tl.load(bias + channel, is_channel, 0.0).to(tl.float32)
    if SILU:
        total = _silu(total)
    target = out + (begin.to(tl.int64) + token) * channels + channel
    tl.store(target, total.to(out.dtype.element_ty), inside)

    write_len = tl.load(write_lens + row)
    if (first == 0) & (write_len > 0):
        kept = tl.arange(0, KEPT)[:, None]
        is_kept = (kept < TAPS - 1) & is_channel
        kept_token = write_len - (TAPS - 1) + kept
        kept_numbers = _inputs(row_x, state, kept_token, channel, channels, is_kept, TAPS - 1)
        tl.debug_barrier()  # all threads must have read the state
        tl.store(state + kept * channels + channel, kept_numbers, is_kept)


@triton.jit
def _inputs(row_x, state, token, channel, channels, inside, STATE: tl.constexpr):
    """Return the inputs of a row's tokens; those before token 0 are the last ones of the state."""
    place = token.to(tl.int64) * channels + channel
    new = tl.load(row_x + place, inside & (token >= 0), 0.0)
    old = tl.load(state + STATE * channels + place, inside & (token < 0), 0.0)
    return tl.where(token < 0, old, new)


@triton.jit(
    do_not_specialize=["pages_stride"],
    do_not_specialize_on_alignment=["pages", "cu_seqlens", "write_lens", "a", "b"],
)
def _gated_delta(
    qkv, a, b, a_log, dt_bias, out, pool, places, pages, cu_seqlens, write_lens,
    a_stride, b_stride, pages_stride, page_bytes,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, SCALE: tl.constexpr, BOUND: tl.constexpr, BY_KEY: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Take a row's tokens one by one through VALUES columns of one head's state.

    The inputs of the next token are loaded while one is computed. If BY_KEY, each row of the state
    has a decay.
    """
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    start = tl.load(cu_seqlens + row)
    end = tl.load(cu_seqlens + row + 1)
    if start == end:
        return
    begin = start.to(tl.int64)
    last_written = start + tl.load(write_lens + row) - 1
    key = tl.arange(0, KEYS)
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    inside = (key < KEY_DIM)[:, None] & (value < VALUE_DIM)[None, :]
    part = _part_of(pool, places, pages + row * pages_stride, 1 + head, page_bytes, tl.float32)
    part += key[:, None] * VALUE_DIM + value[None, :]
    state = tl.load(part, inside, 0.0)
    gate = head * KEY_DIM + key if BY_KEY else head
    is_gate = key < KEY_DIM if BY_KEY else True
    rate = tl.exp(tl.load(a_log + head))
    shift = tl.load(dt_bias + gate, is_gate, 0.0)

    WIDTH: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    q_at = qkv + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + key
    v_at = qkv + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value
    a_at = a + gate
    b_at = b + head
    q, k, v, a_next, b_next = _token(
        q_at, q_at + KEY_HEADS * KEY_DIM, v_at, a_at, b_at, begin, True,
        key < KEY_DIM, value < VALUE_DIM, is_gate, WIDTH, a_stride, b_stride,
    )  # fmt: skip
    for token in range(begin, end):
        q_wide = q.to(tl.float32)
        k_wide = k.to(tl.float32)
        v_wide = v.to(tl.float32)
        decay = tl.exp(_log_decay(a_next.to(tl.float32) + shift, rate, BOUND))
        beta = tl.sigmoid(b_next.to(tl.float32))
        q, k, v, a_next, b_next = _token(
            q_at, q_at + KEY_HEADS * KEY_DIM, v_at, a_at, b_at, token + 1, token + 1 < end,
            key < KEY_DIM, value < VALUE_DIM, is_gate, WIDTH, a_stride, b_stride,
        )  # fmt: skip
        k_scale = tl.rsqrt(tl.sum(k_wide * k_wide, 0) + 1e-6)
        q_scale = tl.rsqrt(tl.sum(q_wide * q_wide, 0) + 1e-6) * SCALE
        state *= decay[:, None] if BY_KEY else decay
        change = beta * (v_wide - tl.sum(k_wide[:, None] * state, 0) * k_scale)
        state += k_wide[:, None] * (change * k_scale)[None, :]
        target = out + (token * VALUE_HEADS + head) * VALUE_DIM + value
        result = tl.sum(q_wide[:, None] * state, 0) * q_scale
        tl.store(target, result.to(out.dtype.element_ty), value < VALUE_DIM)
        if token == last_written:
            tl.store(part, state, inside)


@triton.jit
def _token(
    q_at, k_at, v_at, a_at, b_at, token, exists, is_key, is_value, is_gate,
    WIDTH: tl.constexpr, a_stride, b_stride,
):  # fmt: skip
    """Return a token's query, key, values, and gates a and b of a head."""
    q = tl.load(q_at + token * WIDTH, is_key & exists, 0.0)
    k = tl.load(k_at + token * WIDTH, is_key & exists, 0.0)
    v = tl.load(v_at + token * WIDTH, is_value & exists, 0.0)
    a = tl.load(a_at + token * a_stride, is_gate & exists, 0.0)
    b = tl.load(b_at + token * b_stride, exists, 0.0)
    return q, k, v, a, b


@triton.jit
def _log_decay(x, rate, BOUND: tl.constexpr):
    return -rate * _softplus(x) if BOUND is None else BOUND * tl.sigmoid(rate * x)


@triton.jit
def _softplus(x):
    """Return log(1 + exp(x)), whose relative error is small for small results, too."""
    exponential = tl.exp(tl.where(x > 20.0, 0.0, x))
    sum = 1.0 + exponential
    small = sum == 1.0
    # log(sum) is off by what rounding took from exponential, and so is sum - 1.
    ratio = exponential / tl.where(small, 1.0, sum - 1.0)
    return tl.where(x > 20.0, x, tl.where(small, exponential, tl.log(sum) * ratio))


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


@triton.jit(do_not_specialize=["count"])
def _gated_rms_norm(
    x, gate, weight, out, count, x_stride, gate_stride, size, eps,
    WEIGHTS: tl.constexpr, GATE_FIRST: tl.constexpr, SIGMOID: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Process ROWS rows. Row r has weight r % WEIGHTS."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < count) & (column < size)
    wide = tl.load(x + row * x_stride + column, inside, 0.0).to(tl.float32)
    wide_gate = tl.load(gate + row * gate_stride + column, inside, 0.0).to(tl.float32)
    if GATE_FIRST:
        wide *= _silu(wide_gate)
    dtype = out.dtype.element_ty
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 1, keep_dims=True) / size + eps)
    weight_at = weight + row % WEIGHTS * size + column
    factors = tl.load(weight_at, inside, 0.0).to(tl.float32)
    if SIGMOID:
        normed = (normed * factors * tl.sigmoid(wide_gate)).to(dtype)
    else:
        normed = (normed.to(dtype).to(tl.float32) * factors).to(dtype)
        if not GATE_FIRST:
            normed = (normed.to(tl.float32) * _silu(wide_gate)).to(dtype)
    tl.store(out + row * size + column, normed, inside)
