"""What layers with state compute, in plain torch: for every device, and the kernels' reference.

A row's results and its state do not depend, bit for bit, on the other rows of a step, nor on how
its tokens are cut into steps. So sums are trees of elementwise additions, and exp is the only
transcendental function: torch computes others differently at the end of a tensor.

Shapes: E tokens of R rows, row after row. A state is read before a row's first token, and written
after `StateRows.write_lens` of its tokens.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from nanovllm.kernels.states import ALIGNMENT, Replay, StateRows, States, aligned
from nanovllm.kernels.torch_math import rms_norm


def read_parts(states: States, rows: StateRows, first: int, count: int = 1) -> torch.Tensor:
    """Return parts first to first + count - 1, which are alike, of each row: [R, count, *shape]."""
    part = states.parts[first]
    units, index = _units(states, rows, first, count)
    parts = units[index].flatten(2)[..., : part.nbytes].contiguous()
    return parts.view(part.dtype).view(*parts.shape[:2], *part.shape)


def write_parts(states: States, rows: StateRows, first: int, values: torch.Tensor) -> None:
    """Write `values` [R, count, *shape] to the parts from `first` on of the rows that are written.

    A row whose `write_lens` is 0 keeps what it has.
    """
    units, index = _units(states, rows, first, values.shape[1])
    written = rows.write_lens > 0
    parts = values.to(states.parts[first].dtype).flatten(2)[written].view(torch.uint8)
    padding = index.shape[2] * ALIGNMENT - parts.shape[2]
    places = index[written]
    units[places] = F.pad(parts, (0, padding)).view(*places.shape, ALIGNMENT)


def extend(
    parts: Sequence[torch.Tensor], log: torch.Tensor, rows: StateRows, replay: Replay
) -> list[torch.Tensor]:
    """Return what enters a layer for the tokens of E, [E, n] for each of `parts` [T, n], and keep
    in the log what `replay` says.

    Args:
        parts: of the step's own tokens; rows may lie apart.
        log: [num_log_rows + 1, sum of all n]: a row has the parts of a token side by side.
    """
    x = torch.cat(list(parts), dim=1)
    sources = replay.sources
    logged = log[(-1 - sources).clamp(min=0)]
    found = torch.where((sources < 0)[:, None], logged, x[sources.clamp(min=0)])
    log[replay.kept] = found  # -1 is the last row
    first, *others = found.split_with_sizes([part.shape[1] for part in parts], dim=1)
    return [first.contiguous(), *others]


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    states: States,
    rows: StateRows,
) -> torch.Tensor:
    """Return the causal depthwise convolution of each row's tokens, after those in its state.

    Products, their sum in the order of the taps, the bias and SiLU are in float32; the result is
    rounded once.

    Args:
        x: [E, C] contiguous.
        weight: [C, K], the oldest token's tap first.
        bias: [C] or None.
        silu: whether SiLU comes last.
        states: part 0 is [K - 1, C] in the dtype of `x`: the row's last inputs, the oldest first.

    Returns:
        [E, C].
    """
    taps = weight.float().T
    num_kept = len(taps) - 1
    row_of = _row_of(rows, len(x))
    kept = read_parts(states, rows, 0)[:, 0].flatten(0, 1)  # [R * (K - 1), C]
    inputs = torch.cat([kept, x])
    # Input i of row r, counted from the first in its state, comes after all states if it is new.
    new = len(kept) - num_kept + rows.cu_seqlens[:-1].long()  # place of input 0, if it were new
    old = torch.arange(len(new), device=x.device) * num_kept

    def places(row: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.where(index < num_kept, old[row] + index, new[row] + index)

    first = torch.arange(len(x), device=x.device) - rows.cu_seqlens[row_of]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for tap, factors in enumerate(taps):
        out += inputs[places(row_of, first + tap)].float() * factors
    if bias is not None:
        out += bias.float()
    if silu:
        out *= _sigmoid(out)
    offsets = torch.arange(num_kept, device=x.device)
    row = torch.arange(len(new), device=x.device)[:, None].expand(-1, num_kept)
    last = inputs[places(row, rows.write_lens[:, None] + offsets)]
    write_parts(states, rows, 0, last[:, None])
    return out.to(x.dtype)


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
    """Return the gated delta rule (arXiv 2412.06464) over each row's tokens, after its state.

    All is in float32, one token after the other. Queries and keys are normalised to a length of 1,
    queries times dk ** -0.5. A head's state S [dk, dv] becomes exp(g) S, and then
    S + k^T beta (v - k S), with g = -exp(a_log) softplus(a + dt_bias) and beta = sigmoid(b). The
    output is q S.

    Kimi Delta Attention (arXiv 2510.26692) is the same with a g for each row of S: a channel of the
    key.

    Args:
        qkv: [E, 2 * Hk * dk + Hv * dv]: heads of queries, of keys and of values. Value head h reads
            key head h // (Hv / Hk).
        a: [E, Hv], or [E, Hv * dk] for Kimi Delta Attention; the rows may lie apart, as in `b`.
        b: [E, Hv].
        a_log: [Hv] float32.
        dt_bias: [Hv] or [Hv * dk] float32, as `a`.
        states: parts 1 to Hv are [dk, dv] float32, a value head each. If `a` is [E, Hv], one more,
            [Hv] float32, belongs to the C kernels.
        bound: if given, what g stays above: g = bound sigmoid(exp(a_log) (a + dt_bias)).

    Returns:
        [E, Hv, dv] in the dtype of `qkv`.
    """
    num_heads = b.shape[1]
    dk, dv = states.parts[1].shape
    qk, v = qkv.split_with_sizes([qkv.shape[1] - num_heads * dv, num_heads * dv], dim=1)
    q, k = (x.reshape(len(x), -1, dk) for x in qk.float().chunk(2, dim=1))
    share = num_heads // q.shape[1]
    q, k = (_unit(x).repeat_interleave(share, dim=1) for x in (q, k))
    q = q * dk**-0.5
    v = v.float().reshape(-1, num_heads, dv)
    decay = _decay((a.float() + dt_bias).view(len(a), num_heads, -1), a_log.exp(), bound)
    beta = _sigmoid(b.float())
    state = read_parts(states, rows, 1, num_heads)
    final = state.clone()
    out = torch.empty(len(qkv), num_heads, dv, dtype=torch.float32, device=qkv.device)
    for index, row, token in _turns(rows):
        key = k[token].unsqueeze(-1)
        old = state[row] * decay[token].unsqueeze(-1)
        delta = (v[token] - _tree_sum(old * key)) * beta[token].unsqueeze(-1)
        new = old + key * delta.unsqueeze(-2)
        out[token] = _tree_sum(new * q[token].unsqueeze(-1))
        state[row] = new
        row = (rows.write_lens == index + 1).nonzero()[:, 0]
        final[row] = state[row]
    write_parts(states, rows, 1, final)
    return out.to(qkv.dtype)


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
    """Return Mamba-2's recurrence (arXiv 2405.21060) over each row's tokens, after its state.

    All is in float32, one token after the other. With t = softplus(dt + dt_bias) between `limits`,
    a head's state S [n, p] becomes exp(-exp(a_log) t) S + B^T (t x). The output is C S + d x.

    Args:
        xbc: [E, H * p + 2 * G * n]: heads of x, groups of B and of C. Head h reads the B and C of
            group h // (H / G).
        dt: [E, H]; the rows may lie apart.
        a_log, d, dt_bias: [H] float32.
        limits: the smallest and the largest t.
        states: parts 1 to H are [n, p] float32, a head each.

    Returns:
        [E, H, p] in the dtype of `xbc`.
    """
    num_heads = dt.shape[1]
    n, p = states.parts[1].shape
    x, bc = xbc.float().split_with_sizes([num_heads * p, xbc.shape[1] - num_heads * p], dim=1)
    x = x.reshape(len(x), num_heads, p)
    b, c = (each.reshape(len(x), -1, n) for each in bc.chunk(2, dim=1))
    b, c = (each.repeat_interleave(num_heads // each.shape[1], dim=1) for each in (b, c))
    time = _softplus(dt.float() + dt_bias).clamp(*limits)
    decay = (-(a_log.exp()) * time).exp()
    added = x * time.unsqueeze(-1)
    out = x * d.unsqueeze(-1)
    state = read_parts(states, rows, 1, num_heads)
    final = state.clone()
    for index, row, token in _turns(rows):
        old = state[row] * decay[token, :, None, None]
        state[row] = new = old + b[token].unsqueeze(-1) * added[token].unsqueeze(-2)
        out[token] += _tree_sum(new * c[token].unsqueeze(-1))
        ends = (rows.write_lens == index + 1).nonzero()[:, 0]
        final[ends] = state[ends]
    write_parts(states, rows, 1, final)
    return out.to(xbc.dtype)


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    gate_first: bool = False,
    sigmoid: bool = False,
) -> torch.Tensor:
    """Return the RMSNorm of each row of `x`, rounded, times `weight`, rounded, times silu(gate).

    Args:
        x, gate: [N, D], whose rows may lie apart; or [T, heads, D], contiguous.
        weight: [D], or [heads, D].
        gate_first: return the RMSNorm of x * silu(gate), rounded, times `weight` instead.
        sigmoid: the last factor is sigmoid(gate), and only the result is rounded; not with
            gate_first.
    """
    wide_gate = gate.float()
    factor = _sigmoid(wide_gate)
    if sigmoid:
        return (rms_norm(x.float(), None, eps) * weight.float() * factor).to(x.dtype)
    silu = wide_gate * factor
    if gate_first:
        return rms_norm(x * silu, None, eps).to(x.dtype) * weight
    return (rms_norm(x, None, eps) * weight * silu).to(x.dtype)


def _units(
    states: States, rows: StateRows, first: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pool in units of ALIGNMENT bytes, and those of the parts: [R, count, units]."""
    columns, offsets = states.places[first : first + count].unbind(1)
    page_units = states.pool.shape[1] // ALIGNMENT
    begins = rows.pages[:, columns].long() * page_units + offsets // ALIGNMENT
    num_units = aligned(states.parts[first].nbytes) // ALIGNMENT
    index = begins[..., None] + torch.arange(num_units, device=begins.device)
    return states.pool.view(-1, ALIGNMENT), index


def _row_of(rows: StateRows, num_tokens: int) -> torch.Tensor:
    """Return the row of each token: [E] int64."""
    lengths = rows.cu_seqlens.diff()
    row = torch.arange(len(lengths), device=lengths.device)
    return row.repeat_interleave(lengths, output_size=num_tokens)


def _turns(rows: StateRows) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield i, the rows that have a token i, and where in E that token is."""
    starts = rows.cu_seqlens[:-1].long()
    lengths = rows.cu_seqlens.diff()
    for index in range(int(lengths.max())):
        row = (lengths > index).nonzero()[:, 0]
        yield index, row, starts[row] + index


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Return x / sqrt(sum of squares + 1e-6) over the last dimension."""
    squares = _tree_sum(x.square().unsqueeze(-1))
    return x * torch.rsqrt(squares + 1e-6)


def _tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Return the sum over the last dimension but one, in an order that its length alone decides."""
    while (size := x.shape[-2]) > 1:
        half = size // 2
        pairs = x[..., :half, :] + x[..., half : 2 * half, :]
        x = torch.cat([pairs, x[..., -1:, :]], dim=-2) if size % 2 else pairs
    return x[..., 0, :]


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1.0 / (1.0 + (-x).exp())


def _decay(shifted: torch.Tensor, rate: torch.Tensor, bound: float | None) -> torch.Tensor:
    """Return exp(g) of `gated_delta` for a + dt_bias [E, Hv, n] and exp(a_log) [Hv]."""
    rate = rate.unsqueeze(-1)
    g = -rate * _softplus(shifted) if bound is None else bound * _sigmoid(rate * shifted)
    return g.exp()


def _softplus(x: torch.Tensor) -> torch.Tensor:
    """Return log(1 + exp(x)): of float64, so that the rounded result is the same everywhere."""
    return F.softplus(x.double()).float()
