"""The Triton kernels for a mixture of experts: routing, and grouped products of each expert's rows.

Grids depend on shapes alone, and the host never waits for the device, so a CUDA graph can hold
every call. Pairs are those of a token and one of its experts: T * k, sorted by expert. A block is
up to BLOCK_M of them with the same expert; blocks lie in slots, some of which stay empty.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.torch_experts import ACTIVATIONS, ExpertChoice, ExpertMLP, Groups, Routing
from nanovllm.kernels.torch_math import OAI_ALPHA, OAI_LIMIT

_CHUNK = 1024  # pairs that a program of `_group` reads at once


def route(logits: torch.Tensor, choice: ExpertChoice) -> Routing:
    """Do what `torch_experts.route` says. A row must be contiguous."""
    tokens, num_experts = logits.shape
    top_k = choice.top_k
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    groups = choice.groups or Groups(1, 1, 1)
    if tokens:
        _route[(tokens,)](
            logits,
            logits.stride(0),
            choice.scales,
            choice.bias,
            ids,
            weights,
            num_experts,
            choice.logit_factor,
            choice.factor,
            choice.epsilon,
            TOP_K=top_k,
            BLOCK_K=triton.next_power_of_2(top_k),
            BLOCK=triton.next_power_of_2(num_experts),
            SIGMOID=choice.sigmoid,
            RENORMALIZE=choice.renormalize,
            GROUPS=groups.number,
            BLOCK_GROUPS=triton.next_power_of_2(groups.number),
            KEPT=groups.kept,
            BEST=groups.best,
        )
    return Routing(ids, weights)


def experts(x: torch.Tensor, routing: Routing, mlp: ExpertMLP) -> torch.Tensor:
    """Do what `torch_experts.experts` says, but sum in the order of the weights.

    Args:
        mlp: its weights are tensors.
    """
    x = x.contiguous()
    (up_weight, up_bias, up_outputs), (down_weight, down_bias, num_outputs), *_ = mlp
    assert isinstance(up_weight, torch.Tensor)
    assert isinstance(down_weight, torch.Tensor)
    tokens, hidden_size = x.shape
    top_k = routing.ids.shape[1]
    size = mlp.size
    pairs = tokens * top_k
    num_experts = len(up_weight) // up_outputs
    y = x.new_empty(tokens, num_outputs)
    if not tokens:
        return y
    block_m = 16 if pairs <= 16 * num_experts else 64
    sparse = pairs <= num_experts  # each pair has a slot, otherwise each expert has some
    slots = pairs if sparse else pairs // block_m + num_experts
    order, ends, blocks = (
        torch.empty(n, dtype=torch.int32, device=x.device) for n in (pairs, num_experts, 2 * slots)
    )
    _group[(num_experts,)](
        routing.ids, order, ends, blocks, pairs, slots, BLOCK_M=block_m, SPARSE=sparse, CHUNK=_CHUNK
    )
    hidden = x.new_empty(pairs, size)
    outputs = torch.empty(pairs, num_outputs, dtype=torch.float32, device=x.device)
    blocks_of = {"BLOCK_M": block_m, "BLOCK_N": 64, "BLOCK_K": 64 if x.itemsize == 2 else 32}
    _gate_up[(slots, triton.cdiv(size, 64))](
        x, up_weight, up_bias, hidden, order, ends, blocks, slots, hidden_size, size,
        TOP_K=top_k, ACTIVATION=ACTIVATIONS.index(mlp.activation), INTERLEAVED=mlp.interleaved,
        GATED=mlp.gated, LIMIT=OAI_LIMIT, ALPHA=OAI_ALPHA, **blocks_of,
    )  # fmt: skip
    _down[(slots, triton.cdiv(num_outputs, 64))](
        hidden, down_weight, down_bias, routing.weights, outputs, order, ends, blocks, slots, size,
        num_outputs, **blocks_of,
    )  # fmt: skip
    block = min(triton.next_power_of_2(num_outputs), 1024)
    _sum[(tokens, triton.cdiv(num_outputs, block))](
        outputs, y, num_outputs, TOP_K=top_k, BLOCK=block
    )
    return y


@triton.jit
def _route(
    logits,
    stride,
    scales,
    bias,
    ids,
    weights,
    num_experts,
    logit_factor,
    factor,
    epsilon,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BEST: tl.constexpr,
):
    """Choose the experts of one token. A NaN among the logits makes all weights NaN."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_experts
    row = tl.load(logits + token * stride + columns, inside, -float("inf")).to(tl.float32)
    broken = tl.max((row != row).to(tl.int32), 0) > 0
    row = tl.where(row != row, -float("inf"), row)
    if SIGMOID:
        parts = 1.0 / (1.0 + tl.exp(-row))
        total = 1.0
    else:
        largest = tl.max(row, 0)
        parts = tl.where(inside, tl.exp((row - largest) * logit_factor), 0.0)
        total = tl.sum(parts, 0)
    scores = row
    if SIGMOID or bias is not None or GROUPS > 1:
        scores = parts / total
    if bias is not None:
        scores += tl.load(bias + columns, inside, 0.0)
    scores = tl.where(scores != scores, -float("inf"), scores)
    open_experts = inside
    if GROUPS > 1:
        group = columns // (num_experts // GROUPS)
        open_experts = _kept(scores, group, inside, GROUPS, BLOCK_GROUPS, KEPT, BEST)
    ranks = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    values = tl.zeros([BLOCK_K], tl.float32)
    for rank in range(TOP_K):
        expert, _ = _first_largest(scores, open_experts, BLOCK)
        chosen = tl.where(ranks == rank, expert, chosen)
        values = tl.where(ranks == rank, tl.sum(tl.where(columns == expert, parts, 0.0), 0), values)
        open_experts = open_experts & (columns != expert)
    if RENORMALIZE:
        total = tl.sum(values, 0) + epsilon * total
    weight = tl.where(broken, float("nan"), values / total * factor)
    if scales is not None:
        weight *= tl.load(scales + chosen, ranks < TOP_K, 0.0).to(tl.float32)
    tl.store(ids + token * TOP_K + ranks, chosen, ranks < TOP_K)
    tl.store(weights + token * TOP_K + ranks, weight, ranks < TOP_K)


@triton.jit
def _first_largest(scores, is_open, BLOCK: tl.constexpr):
    """Return the place of the first of the largest scores that are open, and that score."""
    largest = tl.max(tl.where(is_open, scores, -float("inf")), 0)
    return tl.min(tl.where(is_open & (scores == largest), tl.arange(0, BLOCK), BLOCK), 0), largest


@triton.jit
def _kept(
    scores,
    group,
    inside,
    GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BEST: tl.constexpr,
):
    """Return which experts are in the groups that are kept."""
    numbers = tl.arange(0, BLOCK_GROUPS)
    group_scores = tl.full([BLOCK_GROUPS], -float("inf"), tl.float32)
    for number in range(GROUPS):
        own = inside & (group == number)
        place, score = _first_largest(scores, own, scores.shape[0])
        if BEST == 2:
            own = own & (tl.arange(0, scores.shape[0]) != place)
            score += tl.max(tl.where(own, scores, -float("inf")), 0)
        group_scores = tl.where(numbers == number, score, group_scores)
    kept = inside & (group < 0)
    is_open = numbers < GROUPS
    for _ in range(KEPT):
        number, _ = _first_largest(group_scores, is_open, BLOCK_GROUPS)
        kept = kept | (inside & (group == number))
        is_open = is_open & (numbers != number)
    return kept


@triton.jit
def _group(
    ids,
    order,
    ends,
    blocks,
    pairs,
    slots,
    BLOCK_M: tl.constexpr,
    SPARSE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """List one expert's pairs in `order`, where they end, and its blocks.

    Slot s has the expert blocks[s], or -1 if it is empty, and begins at blocks[slots + s] of
    `order`. An expert whose pairs begin at f has the slots from f on, if SPARSE, or from
    f / BLOCK_M + expert on: up to where the next expert's begin, which is far enough.
    """
    expert = tl.program_id(0)
    places = tl.arange(0, CHUNK)
    before = tl.zeros([CHUNK], tl.int32)
    own = tl.zeros([CHUNK], tl.int32)
    for start in range(0, pairs, CHUNK):
        found = tl.load(ids + start + places, start + places < pairs, 1 << 30)
        before += (found < expert).to(tl.int32)
        own += (found == expert).to(tl.int32)
    first = tl.sum(before, 0)
    count = tl.sum(own, 0)
    tl.store(ends + expert, first + count)
    at = first
    for start in range(0, pairs, CHUNK):
        found = tl.load(ids + start + places, start + places < pairs, 1 << 30)
        is_own = (found == expert).to(tl.int32)
        tl.store(order + at + tl.cumsum(is_own, 0) - 1, start + places, is_own > 0)
        at += tl.sum(is_own, 0)
    if SPARSE:
        slot = first
        end = first + count
    else:
        slot = first // BLOCK_M + expert
        end = (first + count) // BLOCK_M + expert + 1
    for start in range(0, end - slot, CHUNK):
        places_here = start + places
        offset = places_here * (1 if SPARSE else BLOCK_M)
        is_block = (offset < count) & (offset % BLOCK_M == 0)
        inside = places_here < end - slot
        tl.store(blocks + slot + places_here, tl.where(is_block, expert, -1), inside)
        tl.store(blocks + slots + slot + places_here, first + offset, inside)


@triton.jit
def _gate_up(
    x,
    weight,
    bias,
    hidden,
    order,
    ends,
    blocks,
    slots,
    k,
    n,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute BLOCK_N numbers of `hidden` for the pairs of one block. Without gates, the ups take
    their place.
    """
    slot = tl.program_id(0)
    expert = tl.load(blocks + slot).to(tl.int64)
    if expert < 0:
        return
    rows = tl.load(blocks + slots + slot) + tl.arange(0, BLOCK_M)
    is_row = rows < tl.load(ends + expert)
    token = tl.load(order + rows, is_row, 0).to(tl.int64) // TOP_K
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < n
    gate_row = expert * (2 * n if GATED else n) + (2 * columns if INTERLEAVED else columns)
    up_row = gate_row + (1 if INTERLEAVED else n)
    inputs = tl.arange(0, BLOCK_K)
    gates = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    ups = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, k, BLOCK_K):
        is_input = start + inputs < k
        place = start + inputs[:, None]
        mask = is_input[:, None] & is_column[None, :]
        tile = tl.load(
            x + token[:, None] * k + start + inputs[None, :],
            is_row[:, None] & is_input[None, :],
            0.0,
        )
        gate = tl.load(weight + gate_row[None, :] * k + place, mask, 0.0)
        gates = tl.dot(tile, gate, gates, input_precision="ieee")
        if GATED:
            up = tl.load(weight + up_row[None, :] * k + place, mask, 0.0)
            ups = tl.dot(tile, up, ups, input_precision="ieee")
    if bias is not None:
        gates += tl.load(bias + gate_row, is_column, 0.0).to(tl.float32)[None, :]
        if GATED:
            ups += tl.load(bias + up_row, is_column, 0.0).to(tl.float32)[None, :]
    product = _activate(gates, ups, ACTIVATION, GATED, LIMIT, ALPHA)
    target = hidden + rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(target, product.to(hidden.dtype.element_ty), is_row[:, None] & is_column[None, :])


@triton.jit
def _activate(
    x,
    ups,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
):
    """Return the activation, by its number in ACTIVATIONS, of gates x and `ups`, or of x alone."""
    if ACTIVATION == 0:
        product = x * tl.sigmoid(x)
    elif ACTIVATION == 1:  # 0.5 (1 + tanh(x)) is the sigmoid of 2x
        product = x * tl.sigmoid(x * (1.5957691216057308 + 0.07135481627159 * x * x))
    elif ACTIVATION == 2:
        x = tl.where(x > LIMIT, LIMIT, x)
        ups = tl.where(ups > LIMIT, LIMIT, tl.where(ups < -LIMIT, -LIMIT, ups)) + 1.0
        product = x * tl.sigmoid(ALPHA * x)
    else:
        positive = tl.where(x < 0.0, 0.0, x)
        product = positive * positive
    return product * ups if GATED else product


@triton.jit
def _down(
    hidden,
    weight,
    bias,
    factors,
    outputs,
    order,
    ends,
    blocks,
    slots,
    k,
    n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute BLOCK_N weighted outputs for the pairs of one block, in the order of the pairs."""
    slot = tl.program_id(0)
    expert = tl.load(blocks + slot).to(tl.int64)
    if expert < 0:
        return
    rows = tl.load(blocks + slots + slot) + tl.arange(0, BLOCK_M)
    is_row = rows < tl.load(ends + expert)
    pair = tl.load(order + rows, is_row, 0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < n
    row = expert * n + columns
    inputs = tl.arange(0, BLOCK_K)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, k, BLOCK_K):
        is_input = start + inputs < k
        tile = tl.load(
            hidden + rows.to(tl.int64)[:, None] * k + start + inputs[None, :],
            is_row[:, None] & is_input[None, :],
            0.0,
        )
        place = start + inputs[:, None]
        mask = is_input[:, None] & is_column[None, :]
        sums = tl.dot(
            tile,
            tl.load(weight + row[None, :] * k + place, mask, 0.0),
            sums,
            input_precision="ieee",
        )
    if bias is not None:
        sums += tl.load(bias + row, is_column, 0.0).to(tl.float32)[None, :]
    sums *= tl.load(factors + pair, is_row, 0.0)[:, None]
    target = outputs + pair[:, None] * n + columns[None, :]
    tl.store(target, sums, is_row[:, None] & is_column[None, :])


@triton.jit
def _sum(outputs, y, n, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Add up the outputs of one token's pairs."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    total = tl.zeros([BLOCK], tl.float32)
    for rank in range(TOP_K):
        total += tl.load(outputs + (token * TOP_K + rank) * n + columns, inside, 0.0)
    tl.store(y + token * n + columns, total.to(y.dtype.element_ty), inside)
