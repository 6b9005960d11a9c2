"""Inputs of layers with state: a pool with a layer's parts, rows, and a loop in float64."""

import torch

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


def naive_delta(qkv, a, b, a_log, dt_bias, state, bound=None):
    """Return the outputs [T, Hv, dv] and the state [Hv, dk, dv], for one row, in float64."""
    state = state.double().clone()
    num_heads, dk, dv = state.shape
    num_key_heads = (qkv.shape[1] - num_heads * dv) // (2 * dk)
    out = state.new_empty(len(qkv), num_heads, dv)
    for token, numbers in enumerate(qkv.double()):
        sizes = [num_key_heads * dk, num_key_heads * dk, num_heads * dv]
        q, k, v = numbers.split(sizes)
        q, k, v = q.view(-1, dk), k.view(-1, dk), v.view(-1, dv)
        for head in range(num_heads):
            key_head = head // (num_heads // num_key_heads)
            q1, k1 = (x[key_head] / (x[key_head].square().sum() + 1e-6).sqrt() for x in (q, k))
            gates = slice(head * (count := a.shape[1] // num_heads), (head + 1) * count)
            g = a[token, gates].double() + dt_bias[gates].double()
            rate = a_log[head].double().exp()
            g = -rate * torch.log1p(g.exp()) if bound is None else bound * torch.sigmoid(rate * g)
            state[head] *= g.exp()[:, None]
            delta = torch.sigmoid(b[token, head].double()) * (v[head] - k1 @ state[head])
            state[head] += torch.outer(k1, delta)
            out[token, head] = q1 @ state[head] * dk**-0.5
    return out, state


def naive_mamba2(xbc, dt, a_log, d, dt_bias, limits, state):
    """Return the outputs [T, H, p] and the state [H, n, p], for one row, in float64."""
    state = state.double().clone()
    num_heads, n, p = state.shape
    num_groups = (xbc.shape[1] - num_heads * p) // (2 * n)
    out = state.new_empty(len(xbc), num_heads, p)
    for token, numbers in enumerate(xbc.double()):
        x, b, c = numbers.split([num_heads * p, num_groups * n, num_groups * n])
        x, b, c = x.view(-1, p), b.view(-1, n), c.view(-1, n)
        for head in range(num_heads):
            group = head // (num_heads // num_groups)
            time = torch.log1p((dt[token, head].double() + dt_bias[head].double()).exp())
            time = min(max(time, limits[0]), limits[1])
            state[head] *= torch.exp(-a_log[head].double().exp() * time)
            state[head] += torch.outer(b[group], x[head] * time)
            out[token, head] = c[group] @ state[head] + d[head].double() * x[head]
    return out, state
