"""Inputs of layers with state: a pool with a layer's parts, rows, and loops in float64."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.states import ALIGNMENT, StatePart, StateRows, States


def make_states(parts: list[StatePart], num_pages: int, pages_of_one: int) -> States:
    """Return `parts` dealt out over `pages_of_one` columns, in a pool of random finite bytes."""
    used = [ALIGNMENT] * pages_of_one  # nothing begins at the start of a page
    places = []
    for index, part in enumerate(parts):
        column = index % pages_of_one
        places.append((column, used[column]))
        used[column] += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
    generator = torch.Generator().manual_seed(1)
    pool = torch.rand(num_pages, max(used) // 4 + ALIGNMENT // 4, generator=generator)
    return States(pool.view(torch.uint8), torch.tensor(places), tuple(parts))


def make_rows(
    pages: list[list[int]], lengths: list[int], written: list[int] | None = None
) -> StateRows:
    """Return rows of `lengths` tokens; their states are written after `written`, or all."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    lens = torch.tensor(lengths if written is None else written)
    return StateRows(torch.tensor(pages).int(), ends.int(), lens.int())


def part_of(states: States, pages: list[int], index: int) -> torch.Tensor:
    """Return a view of part `index` of the sequence that has `pages`."""
    column, offset = states.places[index].tolist()
    part = states.parts[index]
    data = states.pool[pages[column], offset : offset + part.nbytes]
    return data.view(part.dtype).view(part.shape)


def naive_conv(x, weight, bias, silu, kept):
    """Return the outputs [T, C] and the inputs kept then, for one row, in float64."""
    inputs = torch.cat([kept.double(), x.double()])
    out = []
    for token in range(len(x)):
        y = (inputs[token : token + weight.shape[1]] * weight.double().T).sum(0)
        y = y if bias is None else y + bias.double()
        out.append(y * torch.sigmoid(y) if silu else y)
    return torch.stack(out), inputs[len(x) :]


def exact_delta(inputs, state, bound=None):
    """Return the outputs [t, Hv, dv] and the states [t + 1, Hv, dk, dv] of one row in float64."""
    qkv, a, b, a_log, dt_bias = (x.double() for x in inputs)
    value_heads, dk, dv = state.shape
    q, k = qkv[:, : -value_heads * dv].unflatten(1, (2, -1, dk)).unbind(1)
    v = qkv[:, -value_heads * dv :].unflatten(1, (-1, dv))
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(value_heads // x.shape[1], 1) for x in (q * dk**-0.5, k))
    rate, shifted = a_log.exp()[:, None], (a + dt_bias).unflatten(1, (value_heads, -1))
    g = -rate * F.softplus(shifted) if bound is None else bound * (rate * shifted).sigmoid()
    decay = g.exp().unsqueeze(-1)
    beta = b.sigmoid().unsqueeze(-1)
    out, known = [], [state.double()]
    for t in range(len(qkv)):
        s = known[-1] * decay[t]
        delta = beta[t] * (v[t] - (k[t].unsqueeze(1) @ s)[:, 0])
        known.append(torch.baddbmm(s, k[t].unsqueeze(2), delta.unsqueeze(1)))
        out.append((q[t].unsqueeze(1) @ known[-1])[:, 0])
    return torch.stack(out), torch.stack(known)


def exact_mamba(inputs, limits, state):
    """Return the outputs [t, H, p] and the states [t + 1, H, n, p] of one row in float64."""
    xbc, dt, a_log, d, dt_bias = (x.double() for x in inputs)
    heads, n, p = state.shape
    x, bc = xbc.split([heads * p, xbc.shape[1] - heads * p], dim=1)
    x = x.unflatten(1, (heads, p))
    b, c = bc.unflatten(1, (2, -1, n)).unbind(1)
    b, c = (each.repeat_interleave(heads // each.shape[1], 1) for each in (b, c))
    step = F.softplus(dt + dt_bias).clamp(*limits)[..., None, None]
    decay = torch.exp(-a_log.exp()[:, None, None] * step)
    known = [state.double()]
    for t in range(len(xbc)):
        known.append(known[-1] * decay[t] + b[t, :, :, None] * x[t, :, None] * step[t])
    states = torch.stack(known)
    return (c.unsqueeze(2) @ states[1:])[:, :, 0] + d[:, None] * x, states
