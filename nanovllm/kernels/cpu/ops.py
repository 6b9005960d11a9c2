"""The C kernels as functions of tensors: what layers, mixtures of experts and samplers call; at the
end those that read the device tables.

`Kernels` says what those of its names do. Models are in bfloat16; logits may have any float dtype.
Shapes and layouts are not checked, except in `supports_experts`: a wrong one corrupts memory.
"""

import math
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from nanovllm.kernels.cpu import library
from nanovllm.kernels.cpu.build import PANEL
from nanovllm.kernels.cpu.packed import Panels, PanelWeight
from nanovllm.kernels.states import Replay, StateRows, States
from nanovllm.kernels.torch_math import NORM_ROUNDED
from nanovllm.options.sampling_params import GREEDY_BELOW

if TYPE_CHECKING:
    from nanovllm.kernels.adapters import AdapterRows, AdapterTable
    from nanovllm.kernels.torch_experts import ExpertChoice, ExpertLinear, ExpertMLP, Routing

_ACTIVATIONS = (
    *("silu", "gelu_tanh", "sigmoid", "swiglu_oai", "identity"),
    *("gelu", "relu", "relu2", "softplus"),
)
"""In the order of their numbers in csrc/activations.h."""

_KV_BITS = {torch.bfloat16: 16, torch.int8: 8, torch.uint8: 4}
"""Of a number in a KV cache of these types."""

_CHUNK = 128  # logits of a chunk; see csrc/sampling.c


def add_rms_norm(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    kind: int = NORM_ROUNDED,
    multiplier: float = 1.0,
) -> torch.Tensor:
    out = torch.empty_like(residual)
    rows = residual.numel() // residual.shape[-1]
    n = residual.shape[-1]
    library.call("nv_add_rms_norm", x, residual, n, weight, out, n, rows, n, eps, kind, multiplier)
    return out


def add_layer_norm(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    out = torch.empty_like(residual)
    n = residual.shape[-1]
    rows = residual.numel() // n
    library.call("nv_add_layer_norm", x, residual, weight, bias, out, rows, n, eps)
    return out


def add(x: torch.Tensor, residual: torch.Tensor) -> None:
    rows, n = residual.shape
    library.call("nv_add_rms_norm", x, residual, n, None, None, n, rows, n, 0.0, NORM_ROUNDED, 1.0)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    kind: int = NORM_ROUNDED,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    rows, n = x.shape
    out = torch.empty(rows, n, dtype=x.dtype) if out is None else out
    rows_of_x = None, x, x.stride(0)
    library.call("nv_add_rms_norm", *rows_of_x, weight, out, out.stride(0), rows, n, eps, kind, 1.0)
    return out


def act_and_mul(gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """Return a view of `gate_up`, contiguous, whose first half is overwritten."""
    rows, width = gate_up.shape
    up = gate_up.data_ptr() + width // 2 * gate_up.element_size()
    numbers = rows, width // 2, _ACTIVATIONS.index(activation)
    library.call("nv_mul_act", gate_up, width, 1, up, width, gate_up, width, *numbers)
    return gate_up[:, : width // 2]


def mul_act(gate: torch.Tensor, x: torch.Tensor, activation: str) -> torch.Tensor:
    rows, n = x.shape
    out = torch.empty(rows, n, dtype=x.dtype)
    inputs = gate, gate.stride(0), n // gate.shape[1], x, x.stride(0)
    library.call("nv_mul_act", *inputs, out, n, rows, n, _ACTIVATIONS.index(activation))
    return out


def act(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Return `x`, contiguous, which is overwritten."""
    rows, n = x.shape
    library.call("nv_mul_act", x, n, 1, None, 0, x, n, rows, n, _ACTIVATIONS.index(activation))
    return x


def scale(x: torch.Tensor, factor: float | torch.Tensor) -> None:
    number = factor if isinstance(factor, torch.Tensor) else None
    rows, n = x.shape
    value = 1.0 if number is not None else factor
    library.call("nv_scale", x, x.stride(0), number, rows, n, value)


def copy_rows(
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    x_rows: torch.Tensor | None = None,
    y_rows: torch.Tensor | None = None,
) -> None:
    """Copy row x_rows[t] of `x` [.., n] bfloat16 to row y_rows[t] of `y` [.., n]; None: row t.

    The rows of both may lie apart.
    """
    num_rows = len(x if x_rows is None else x_rows)
    library.call(
        "nv_copy_rows", x, x.stride(0), x_rows, y, y.stride(0), y_rows, num_rows, x.shape[1]
    )


def copy_pages(
    pool: torch.Tensor,
    sources: Sequence[int],
    targets: Sequence[int],
    into: torch.Tensor | None = None,
) -> None:
    """Copy rows `sources` of `pool` [pages, even number of bytes] uint8 to rows `targets` of `into`
    or, without it, of `pool` itself. No target is a source.
    """
    halves = pool.view(torch.bfloat16)
    others = halves if into is None else into.view(torch.bfloat16)
    copy_rows(halves, others, x_rows=torch.tensor(sources), y_rows=torch.tensor(targets))


def cache_row(head_dim: int, dtype: torch.dtype) -> int:
    """Return the elements of a KV cache that a head's key takes, or its value: with 8 and 4 bits
    half of what both take. See cache.h.
    """
    width = -(-head_dim // PANEL) * PANEL
    if dtype == torch.bfloat16:
        return width
    bits = _KV_BITS[dtype]
    scales = 1 if width <= 256 else width // math.gcd(width, 256)  # of a key; a value has one
    if bits == 4:
        scales = 2 * width // PANEL  # with minimums
    return width * bits // 8 + scales + 1


def store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    num_heads: int,
    head_dim: int,
    *,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    kind: int = NORM_ROUNDED,
    after_rotation: bool = False,
    interleaved: bool = False,
    v_norm: bool = False,
    q_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what `Backend.store` says; the keyword arguments are the fields of `QKNormRope`.

    Args:
        positions: [t] int64, rows of `cos_sin` and `q_scale`.
        slot_mapping: [t] int64.
        kv_cache: in the layout of `CPUBackend`; its heads and its blocks may lie apart.
    """
    num_kv_heads, _, halves, block_size, _ = kv_cache.shape
    q = torch.empty(len(qkv), num_heads, head_dim, dtype=torch.bfloat16)
    kv_parts = (qkv.shape[1] // head_dim - num_heads) // num_kv_heads
    tensors = qkv, q_weight, k_weight, cos_sin, q_scale, positions, slot_mapping, q, kv_cache
    heads = len(qkv), num_heads, num_kv_heads, kv_parts
    sizes = head_dim, cos_sin.shape[1], block_size, halves, _KV_BITS[kv_cache.dtype]
    options = eps, kind, after_rotation, interleaved, v_norm
    library.call("nv_store", *tensors, *_distances(kv_cache), *heads, *sizes, *options)
    return q


def attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    ends: torch.Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    value_dim: int | None = None,
) -> torch.Tensor:
    """Return attention [t, heads, value_dim or dim] over a paged cache: see `Backend.attend`.

    A row's result is the same, bit for bit, whatever the other rows are, and however a sequence is
    cut into chunks. Blocks that no query's window reaches are not read, nor are their ids.

    Args:
        ends: as in `Batch`: the keys of a token's row up to here are those that it sees.
        causal, scale, window, softcap, value_dim: as in `AttentionSpec`; only causal attention has
            windows and `ends`.
    """
    num_kv_heads, _, _, block_size, _ = kv_cache.shape
    _, num_heads, head_dim = q.shape
    value_dim = value_dim or head_dim
    out = torch.empty(len(q), num_heads, value_dim, dtype=q.dtype)
    tables = block_tables, block_tables.shape[1], cu_seqlens_q, seq_lens, ends, sinks, len(seq_lens)
    sizes = num_heads, num_kv_heads, head_dim, value_dim, block_size, _KV_BITS[kv_cache.dtype]
    visible = window or 0 if causal else -1
    factor = head_dim**-0.5 if scale is None else scale
    cache = kv_cache, *_distances(kv_cache)
    library.call("nv_attention", q, out, *cache, *tables, *sizes, visible, factor, softcap)
    return out


def head_linear(
    x: torch.Tensor, weight: PanelWeight, out: torch.Tensor, *, kept: int = 0, turned: bool = False
) -> None:
    """Do what `Kernels.head_linear` says, for a bfloat16 weight each of whose heads has whole
    panels. A token's result is the same, bit for bit, whatever the other tokens are.
    """
    tokens, heads, size = x.shape
    inputs = x, x.stride(0), x.stride(1), weight.panels.packed, None
    outputs = out, out.stride(0), out.stride(1)
    sizes = tokens, heads, out.shape[2] - kept, size - kept, kept, turned
    library.call("nv_linear", *inputs, *outputs, *sizes)


def _distances(kv_cache: torch.Tensor) -> tuple[int, int]:
    """Return the bytes from one KV head of a layer's cache to the next, and from block to block."""
    head, block, *_ = kv_cache.stride()
    return head * kv_cache.element_size(), block * kv_cache.element_size()


def extend(
    parts: Sequence[torch.Tensor], log: torch.Tensor, rows: StateRows, replay: Replay
) -> list[torch.Tensor]:
    found = []
    column = 0
    for part in parts:
        n = part.shape[1]
        out = torch.empty(len(replay.sources), n, dtype=part.dtype)
        places = log[:, column : column + n], log.stride(0), out, replay.sources, replay.kept
        sizes = len(rows.write_lens), n
        library.call("nv_extend", part, part.stride(0), *places, rows.cu_seqlens, *sizes)
        found.append(out)
        column += n
    return found


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    states: States,
    rows: StateRows,
) -> torch.Tensor:
    """The rows of `x` may lie apart."""
    out = torch.empty(x.shape, dtype=x.dtype)
    sizes = len(rows.write_lens), *weight.shape, silu
    library.call(
        "nv_causal_conv", x, x.stride(0), weight, bias, out, *_places(states, rows), *sizes
    )
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
    num_heads = len(a_log)
    dk, dv = states.parts[1].shape
    key_heads = (qkv.shape[1] - num_heads * dv) // (2 * dk)
    out = torch.empty(len(qkv), num_heads, dv, dtype=qkv.dtype)
    gates = a, a.stride(0), b, b.stride(0), a_log, dt_bias
    sizes = len(rows.write_lens), key_heads, num_heads, dk, dv, len(states.parts) == 1 + num_heads
    library.call("nv_gated_delta", qkv, *gates, out, *_places(states, rows), *sizes, bound or 0.0)
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
    num_heads = len(a_log)
    n, p = states.parts[1].shape
    groups = (xbc.shape[1] - num_heads * p) // (2 * n)
    out = torch.empty(len(xbc), num_heads, p, dtype=xbc.dtype)
    inputs = xbc, dt, dt.stride(0), a_log, d, dt_bias
    sizes = len(rows.write_lens), num_heads, groups, n, p
    library.call("nv_mamba2", *inputs, out, *_places(states, rows), *sizes, *limits)
    return out


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    gate_first: bool = False,
    sigmoid: bool = False,
) -> torch.Tensor:
    """Only [T, heads, D] can be recorded for T tokens."""
    out = torch.empty(x.shape, dtype=x.dtype)
    tokens = len(x)
    size = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    inputs = x, x.stride(0), gate, gate.stride(0), weight, size if weight.dim() == 2 else 0
    kind = 2 if gate_first else int(sigmoid)
    library.call("nv_gated_rms_norm", *inputs, out, tokens, heads, size, eps, kind)
    return out


def _places(states: States, rows: StateRows) -> tuple[torch.Tensor | int, ...]:
    """Return the arguments of a kernel that say where the states are."""
    pool = states.pool
    pages = rows.pages
    pages_of_rows = pages, pages.shape[1], rows.cu_seqlens, rows.write_lens
    return pool, pool.stride(0), states.places, *pages_of_rows


def add_lora(y: torch.Tensor, x: torch.Tensor, rows: "AdapterRows", table: "AdapterTable") -> None:
    """See `kernels.adapters.add_lora`; `y` is contiguous. A token's bits do not depend on others.

    Recorded calls read `rows` and `table` when they run.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    sizes = len(x), y.shape[1], x.shape[1], len(table.ends), table.max_rank
    factors = table.a, table.b, table.ranks, table.scales, table.ends
    library.call(
        "nv_add_lora", x, x.stride(0), y, *factors, rows.groups, rows.order, table.scratch, *sizes
    )


def supports_experts(x: torch.Tensor, mlp: "ExpertMLP") -> bool:
    """Return whether `experts` can compute `mlp` for `x`: each expert must have whole panels, and
    its inputs their own order.
    """
    return x.dtype == torch.bfloat16 and all(
        isinstance(linear.weight, PanelWeight)
        and linear.num_outputs % divisor == 0
        and linear.weight.panels.inputs is None
        for linear, divisor in ((mlp.gate_up, (2 if mlp.gated else 1) * PANEL), (mlp.down, PANEL))
    )


def wide_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Do what `Kernels.wide_linear` says, for bfloat16 x."""
    if x.stride(1) != 1:
        x = x.contiguous()
    y = torch.empty(len(x), len(weight), dtype=torch.float32)
    library.call("nv_linear_wide", x, x.stride(0), weight, y, len(x), *weight.shape)
    return y


def route(logits: torch.Tensor, choice: "ExpertChoice") -> "Routing":
    """Do what `torch_experts.route` says, for bfloat16 or float32 logits and bfloat16 scales."""
    from nanovllm.kernels.torch_experts import Groups, Routing

    tokens, num_experts = logits.shape
    top_k = choice.top_k
    ids = torch.empty(tokens, top_k, dtype=torch.int32)
    weights = torch.empty(tokens, top_k, dtype=torch.float32)
    inputs = (logits.contiguous(), choice.scales, choice.bias)
    sizes = (tokens, num_experts, top_k)
    kinds = logits.dtype == torch.float32, choice.sigmoid, choice.renormalize
    numbers = choice.logit_factor, choice.factor, choice.epsilon
    groups = choice.groups or Groups(1, 1, 1)
    library.call("nv_route", *inputs, ids, weights, *sizes, *kinds, *numbers, *groups)
    return Routing(ids, weights)


def experts(x: torch.Tensor, routing: "Routing", mlp: "ExpertMLP") -> torch.Tensor:
    """Do what `torch_experts.experts` says, for what `supports_experts` accepts.

    A token's result is the same, bit for bit, whatever the other tokens are.
    """
    x = x.contiguous()
    tokens, hidden_size = x.shape
    top_k = routing.ids.shape[1]
    size = mlp.size
    gate_up = _panels(mlp.gate_up)
    down = _panels(mlp.down)
    num_experts = len(gate_up.packed) * PANEL // mlp.gate_up.num_outputs
    sizes = tokens, num_experts, top_k
    hidden = torch.empty(tokens * top_k, size, dtype=torch.bfloat16)
    tensors = gate_up.packed, gate_up.scales, gate_up.factors, mlp.gate_up.bias
    of_weight = size, hidden_size, *gate_up.arguments(hidden_size)
    options = _ACTIVATIONS.index(mlp.activation), mlp.interleaved, mlp.gated
    inputs = x, routing.ids
    library.call("nv_expert_gate_up", *inputs, *tensors, hidden, *sizes, *of_weight, *options)
    prepared = torch.empty(tokens * top_k, 4 * size + 256, dtype=torch.uint8)
    y = torch.empty(tokens, mlp.down.num_outputs, dtype=torch.bfloat16)
    tensors = down.packed, down.scales, down.factors, mlp.down.bias
    of_weight = mlp.down.num_outputs, size, *down.arguments(size)
    routed = hidden, routing.ids, routing.weights
    library.call("nv_expert_down", *routed, *tensors, prepared, y, *sizes, *of_weight)
    return y


def _panels(linear: "ExpertLinear") -> Panels:
    assert isinstance(linear.weight, PanelWeight)
    return linear.weight.panels


def sample(logits: torch.Tensor, *columns: torch.Tensor) -> torch.Tensor:
    """Do what `Kernels.sample` says, or without columns `Kernels.greedy`.

    Args:
        logits: [r, n] of any float dtype.
    """
    if logits.dtype == torch.float16:
        logits = logits.float()
    logits = logits.contiguous()
    rows, n = logits.shape
    out = torch.empty(rows, dtype=torch.int64)
    maxima = torch.empty(rows, -(-n // _CHUNK), dtype=torch.float32)
    sums = scratch = None
    if columns:
        sums = torch.empty_like(maxima)
        scratch = torch.empty(rows, n, dtype=torch.float32)
    bits = 8 * logits.element_size()
    inputs = (logits, bits, *(columns or (None,) * 6))
    library.call("nv_sample", *inputs, maxima, sums, scratch, out, rows, n, GREEDY_BELOW)
    return out


def to_float(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of x, contiguous and bfloat16, in float32."""
    out = torch.empty(x.shape, dtype=torch.float32)
    library.call("nv_to_float", x, out, x.numel())
    return out


def forbid(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    library.call("nv_forbid", logits, rows, masks, *masks.shape, logits.shape[1])


class StateColumns(NamedTuple):
    """Where the state pages of sequences are in the table, and where those of a step go."""

    source: torch.Tensor  # [table rows, state_pages] int32: columns of the table
    pages: torch.Tensor  # [most rows, state_pages] int32, of `kernels.states.StateRows`
    write_lens: torch.Tensor  # [most rows] int32; gets the number of each row's tokens


def batch(
    token_ids: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    table_indices: Sequence[int],
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    rope_offsets: torch.Tensor,
    out: tuple[torch.Tensor, ...],
    state: StateColumns | None = None,
) -> None:
    """Fill `out`, and `state` if given, with the batch of a step: see csrc/tables.c.

    Args:
        token_ids, block_tables: adjacent columns of one int32 table. Further block tables of equal
            width follow.
        rope_offsets: [table rows] int32, another column of it.
        out: input_ids, positions, slot_mapping, cu_seqlens_q, seq_lens, block_tables and
            rope_positions of `attention.batch.Batch`; they may be longer than the batch.
            slot_mapping and block_tables have one dimension more, of the block tables.
    """
    rows = array("q", (*table_indices, *query_lens, *seq_lens))
    columns = token_ids.shape[1]
    stride = token_ids.stride(0)
    assert block_tables.data_ptr() == token_ids.data_ptr() + columns * token_ids.element_size()
    address, _ = rows.buffer_info()
    slots = out[2]
    tables, rope_positions = out[5:]
    num_tables, _, width = tables.shape
    assert block_tables.shape[1] == width
    assert columns + num_tables * width <= stride
    sizes = width, num_tables, slots.stride(0), tables.stride(0)
    offset = _column(rope_offsets, token_ids)
    assert columns + num_tables * width <= offset < stride
    states: tuple[library.Argument, ...] = 0, 0, None, None
    if state is not None:
        first_page = _column(state.source, token_ids)
        num_pages = state.pages.shape[1]
        assert state.source.shape[1] == num_pages
        assert columns + num_tables * width <= first_page <= stride - num_pages
        states = first_page, num_pages, state.pages, state.write_lens
    library.call(
        "nv_batch",
        *(token_ids, stride, columns, address, len(table_indices), block_size),
        *out[:6],
        *sizes,
        *(offset, rope_positions),
        *states,
    )


def _column(x: torch.Tensor, token_ids: torch.Tensor) -> int:
    """Return in which column of the table `x` begins, counted from the first of `token_ids`."""
    return (x.data_ptr() - token_ids.data_ptr()) // token_ids.element_size()


def ngram(
    token_ids: torch.Tensor,
    rows: Sequence[tuple[int, int, int, torch.Tensor]],
    sizes: tuple[int, int],
) -> list[int]:
    """Draft tokens by prompt lookup, as csrc/tables.c says; return how many each row got.

    Args:
        token_ids: [table rows, n] int32; a row is contiguous.
        rows: table_idx, number of known tokens, most drafts, and an index: int32 zeros, kept from
            call to call, [1 + 2 * number of sizes * a power of two not below the known tokens].
        sizes: the smallest and the largest n-gram.
    """
    table_indices, known, limits, indices = zip(*rows, strict=True)
    capacities = (len(index) // (2 * (sizes[1] - sizes[0] + 1)) for index in indices)
    pointers = (index.data_ptr() for index in indices)
    numbers = array("q", (*table_indices, *known, *limits, *pointers, *capacities))
    counts = array("q", limits)
    address = numbers.buffer_info()[0]
    out = counts.buffer_info()[0]
    library.call("nv_ngram", token_ids, token_ids.stride(0), address, len(rows), *sizes, out)
    return counts.tolist()
