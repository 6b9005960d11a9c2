"""The C kernels of layers with state against float64, built for each kind of processor."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated, mamba2_chunk_scan
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from nanovllm.features.graphs.cpu_graph import CPUGraph
from nanovllm.kernels.cpu import ops
from nanovllm.kernels.states import Replay, StatePart
from nanovllm.kernels.torch_kernels import TORCH
from tests.closeness import assert_close
from tests.kernels.cpu.helpers import native, randn
from tests.kernels.state_cases import make_rows, make_states, naive_conv, part_of

pytestmark = [native, pytest.mark.usefixtures("inference_mode")]


def make_pool(num_rows, parts, seed=0):
    """Return States with random parts, and the pages of each row."""
    states = make_states(parts, 2 * num_rows + 1, 2)
    order = torch.Generator().manual_seed(seed)
    pages = torch.randperm(2 * num_rows + 1, generator=order)[: 2 * num_rows].view(-1, 2).tolist()
    for row in pages:
        for index, part in enumerate(parts):
            part_of(states, row, index).copy_(torch.randn(part.shape, generator=order))
    return states, pages


def matrices_of(states, pages):
    """Return S of each head of a row, [Hv, dk, dv] float64."""
    parts = [part_of(states, pages, i).double() for i in range(1, len(states.parts))]
    if parts[-1].ndim > 1:
        return torch.stack(parts)
    *heads, scales = parts
    scales[scales == 0] = 1
    return torch.stack(heads) * scales[:, None, None]


def assert_only_parts_changed(states, before, pages):
    """Check that a kernel has left the rest of the pool as it was."""
    other = states._replace(pool=before.clone())
    for row in pages:
        for index in range(len(states.parts)):
            part_of(other, row, index).copy_(part_of(states, row, index))
    assert torch.equal(other.pool, states.pool)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(
    ("channels", "taps", "lengths"),
    [(8, 2, (3, 1)), (77, 3, (1, 2, 40)), (700, 4, (1, 9, 2)), (256, 4, (5,)), (300, 8, (3, 30))],
)
def test_causal_conv_is_float64s(channels, taps, lengths, silu):
    states, pages = make_pool(len(lengths), [StatePart((taps - 1, channels), torch.bfloat16)])
    wide, before = randn(sum(lengths), channels + 40, seed=1), states.pool.clone()
    x, weight = wide[:, 16 : channels + 16], randn(channels, taps, seed=2)
    for bias, share in ((None, 1), (randn(channels, seed=3), 0.5), (None, 0)):
        states.pool.copy_(before)
        kept = [part_of(states, row, 0).clone() for row in pages]
        written = [int(length * share) for length in lengths]
        rows = make_rows(pages, lengths, written)
        found = ops.causal_conv(x, weight, bias, silu, states, rows).split(lengths)
        for row, one in enumerate(x.split(lengths)):
            expected, _ = naive_conv(one, weight, bias, silu, kept[row])
            state = torch.cat([kept[row], one])[written[row] :][: taps - 1]
            assert ((found[row] - expected).abs() <= 2**-8 * expected.abs() + 1e-5).all()
            assert torch.equal(part_of(states, pages[row], 0), state)
        assert_only_parts_changed(states, before, pages)


def make_delta(lengths, key_heads, value_heads, dk, dv, by_rows=False, seed=0):
    """Return the inputs of a gated delta rule, its states, and the pages of each row.

    Args:
        by_rows: whether each row of a state has its own decay.
    """
    tokens = sum(lengths)
    order = torch.Generator().manual_seed(seed)
    qkv = randn(tokens, 2 * key_heads * dk + value_heads * dv, seed=seed)
    width = value_heads * (dk if by_rows else 1)
    gates = randn(tokens, width + 2 * value_heads, seed=seed + 1)
    a_log = torch.empty(value_heads).uniform_(0.01, 16, generator=order).log()
    dt_bias = torch.randn(width, generator=order) - 3
    parts = [
        StatePart((2, qkv.shape[1]), torch.bfloat16),
        *[StatePart((dk, dv), torch.float32)] * value_heads,
        *[StatePart((value_heads,), torch.float32)][by_rows:],
    ]
    inputs = qkv, gates[:, :width], gates[:, -value_heads:], a_log, dt_bias
    states, pages = make_pool(len(lengths), parts, seed)
    for row in [] if by_rows else pages:  # a head in two has no scale, as in a new state
        scales = part_of(states, row, 1 + value_heads)
        scales.uniform_(0.3, 1, generator=order)[::2] = 0
    return inputs, states, pages


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


DELTA = [
    ((1, 1), 2, 2, 128, 128),
    ((1, 3, 70), 1, 2, 64, 128),
    ((5, 1), 1, 4, 24, 40),
    ((2, 131), 2, 4, 77, 51),
    ((4,), 3, 3, 1, 1),
]
BY_ROWS = [((1, 3, 70), 2, 2, 128, 128), ((2, 131), 2, 2, 77, 51), ((4,), 3, 3, 1, 1)]
CASES = [
    *[(shape, False, None) for shape in DELTA],
    *[(shape, True, bound) for shape in BY_ROWS for bound in (None, -5.0)],
]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("shape", "by_rows", "bound"), CASES, ids=str)
def test_gated_delta_is_float64s(shape, by_rows, bound):
    lengths = shape[0]
    inputs, states, pages = make_delta(*shape, by_rows)
    before = states.pool.clone()
    old = [matrices_of(states, row) for row in pages]
    cut = zip(*(x.split(lengths) for x in inputs[:3]), strict=True)
    exact = [exact_delta((*x, *inputs[3:]), old[row], bound) for row, x in enumerate(cut)]
    for share in (1, 0.5, 0):
        states.pool.copy_(before)
        written = [int(length * share) for length in lengths]
        rows = make_rows(pages, lengths, written)
        found = ops.gated_delta(*inputs, states, rows, bound).split(lengths)
        for row, (expected, known) in enumerate(exact):
            assert_close(found[row].double(), expected, rtol=2**-8, atol=2e-6)
            state = matrices_of(states, pages[row])
            assert_close(state, known[written[row]], rtol=1e-5, atol=1e-5)
        assert_only_parts_changed(states, before, pages)


def make_mamba(lengths, groups, heads, n, p, seed=0):
    """Return the inputs of Mamba-2's recurrence but its limits, the states, and rows' pages."""
    order = torch.Generator().manual_seed(seed)
    xbc = randn(sum(lengths), heads * p + 2 * groups * n, seed=seed)
    dt = randn(sum(lengths), 2 * heads, seed=seed + 1)[:, heads:]
    a_log = torch.empty(heads).uniform_(0.01, 16, generator=order).log()
    d, dt_bias = torch.randn(heads, generator=order), torch.randn(heads, generator=order) - 3
    parts = [StatePart((2, xbc.shape[1]), torch.bfloat16)]
    parts += [StatePart((n, p), torch.float32)] * heads
    return (xbc, dt, a_log, d, dt_bias), *make_pool(len(lengths), parts, seed)


def states_of(states, pages):
    """Return S of each head of a row, [H, n, p] float64."""
    return torch.stack([part_of(states, pages, i).double() for i in range(1, len(states.parts))])


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


MAMBA = [
    ((1, 1), 1, 2, 128, 64),
    ((1, 3, 70), 2, 4, 24, 100),
    ((5, 1), 1, 4, 32, 128),
    ((2, 131), 2, 6, 77, 51),
    ((4,), 3, 3, 1, 1),
]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", MAMBA, ids=str)
def test_mamba2_is_float64s(shape):
    lengths = shape[0]
    inputs, states, pages = make_mamba(*shape)
    before = states.pool.clone()
    old = [states_of(states, row) for row in pages]
    cut = list(zip(*(x.split(lengths) for x in inputs[:2]), strict=True))
    for share, limits in ((1, (0.0, torch.inf)), (0.5, (0.02, 0.1)), (0, (0.0, 5.0))):
        states.pool.copy_(before)
        written = [int(length * share) for length in lengths]
        rows = make_rows(pages, lengths, written)
        found = ops.mamba2(*inputs, limits, states, rows).split(lengths)
        for row, x in enumerate(cut):
            expected, known = exact_mamba((*x, *inputs[2:]), limits, old[row])
            assert_close(found[row].double(), expected, rtol=2**-8, atol=1e-5)
            assert_close(states_of(states, pages[row]), known[written[row]], rtol=1e-5, atol=1e-5)
        assert_only_parts_changed(states, before, pages)


def test_the_errors_of_many_tokens_do_not_add_up_in_mamba2():
    """8,192 tokens, of which the state forgets about one in 2,000. The error is the largest in the
    state, beside that of torch in float32, and of transformers, which sums in chunks of 256:
    9.7e-6, 1.8e-5 and 3.0e-6, in numbers up to 13.
    """
    (xbc, dt, a_log, d, dt_bias), states, pages = make_mamba((8192,), 1, 2, 16, 16)
    fixed = torch.full_like(a_log, 0.01).log(), d, dt_bias
    old, before = states_of(states, pages[0]), states.pool.clone()
    limits = 0.0, torch.inf
    _, known = exact_mamba((xbc, dt, *fixed), limits, old)
    errors = []
    for kernels in (ops, TORCH):
        states.pool.copy_(before)
        kernels.mamba2(xbc, dt, *fixed, limits, states, make_rows(pages, [8192]))
        errors.append((states_of(states, pages[0]) - known[-1]).abs().max())
    x, b, c = xbc.float().split([32, 16, 16], dim=1)
    _, theirs = mamba2_chunk_scan(
        x.view(1, 8192, 2, 16),
        dt.float()[None],
        -fixed[0].exp(),
        b.view(1, 8192, 1, 16),
        c.view(1, 8192, 1, 16),
        256,
        D=d,
        dt_bias=fixed[2],
        initial_states=old.float().transpose(1, 2)[None],
        dt_softplus=True,
        return_final_states=True,
    )
    errors.append((theirs[0].transpose(1, 2) - known[-1]).abs().max())
    ours, torchs, transformers = errors
    assert ours <= torchs
    assert ours <= 4 * transformers
    assert ours <= 1e-6 * known[-1].abs().max()


@pytest.mark.parametrize("by_rows", [False, True])
def test_the_errors_of_many_tokens_do_not_add_up(by_rows):
    """8,192 tokens, of which the state forgets about one in 2,000. The error is the largest in the
    state, beside that of torch in float32: 7e-7 and 8e-7, in numbers up to 2. It is the same if
    each row has its own decay.
    """
    (*tokens, a_log, dt_bias), states, pages = make_delta((8192,), 2, 2, 16, 16, by_rows)
    inputs = *tokens, torch.full_like(a_log, 0.01).log(), dt_bias
    if not by_rows:
        part_of(states, pages[0], 3).zero_()
    old, before = matrices_of(states, pages[0]), states.pool.clone()
    _, known = exact_delta(inputs, old)
    errors = []
    for kernels in (ops, TORCH):
        states.pool.copy_(before)
        kernels.gated_delta(*inputs, states, make_rows(pages, [8192]))
        errors.append((matrices_of(states, pages[0]) - known[-1]).abs().max())
    ours, torchs = errors
    assert ours <= 1.5 * torchs + 1e-7
    assert ours <= 2e-6


CUTS = [
    [[5, 1, 70, 200]],
    [[5, 0, 0, 0], [0, 1, 1, 0], [0, 0, 1, 2], [0, 0, 63, 64], [0, 0, 5, 134]],
    [[1, 0, 64, 65], [4, 1, 6, 135]],
]
"""Steps of the same four rows: the tokens of each. A row without tokens is not in the step."""


def run_in_steps(function, states, pages, inputs, steps):
    """Return the outputs of all tokens, computed in `steps`, row by row."""
    lengths = CUTS[0][0]
    rows = [torch.arange(sum(lengths)).split(lengths)[row] for row in range(len(lengths))]
    done, results = [0] * len(lengths), {}
    for step in steps:
        there = [row for row, count in enumerate(step) if count]
        tokens = torch.cat([rows[row][done[row] : done[row] + step[row]] for row in there])
        where = make_rows([pages[row] for row in there], [step[row] for row in there])
        out = function(*(x[tokens] for x in inputs), states, where)
        results |= dict(zip(tokens.tolist(), out, strict=True))
        done = [old + new for old, new in zip(done, step, strict=True)]
    return torch.stack([results[token] for token in range(sum(lengths))])


def make_delta_layer(lengths, *shape):
    """Return a function of x, a, b, states and rows that calls the three kernels, what it gets of
    all tokens, the states, and the pages of each row.
    """
    inputs, states, pages = make_delta(lengths, *shape)
    channels, heads = inputs[0].shape[1], len(inputs[3])
    weight, bias = randn(channels, 3, seed=5), randn(channels, seed=6)
    norm = randn((channels - 2 * 24) // heads, seed=7)
    by_rows = len(inputs[4]) > heads

    def layer(x, a, b, states, rows):
        mixed = ops.causal_conv(x, weight, bias, True, states, rows)
        out = ops.gated_delta(mixed, a, b, *inputs[3:], states, rows)
        gate = x[:, : out[0].numel()].unflatten(1, (heads, -1))
        return ops.gated_rms_norm(out, gate, norm, 1e-6, sigmoid=by_rows)

    return layer, inputs[:3], states, pages


def make_mamba_layer(lengths, groups, heads, n, p):
    """Return the same of Mamba-2."""
    inputs, states, pages = make_mamba(lengths, groups, heads, n, p)
    channels = inputs[0].shape[1]
    weight, bias = randn(channels, 3, seed=5), randn(channels, seed=6)
    norm = randn(groups, heads * p // groups, seed=7)

    def layer(x, dt, states, rows):
        mixed = ops.causal_conv(x, weight, bias, True, states, rows)
        out = ops.mamba2(mixed, dt, *inputs[2:], (0.0, 2.0), states, rows)
        gate = x[:, : heads * p].unflatten(1, (groups, -1))
        out = out.view(len(x), groups, -1)
        return ops.gated_rms_norm(out, gate, norm, 1e-6, gate_first=True)

    return layer, inputs[:2], states, pages


LAYERS = [
    (make_delta_layer, 1, 2, 32, 256),
    (make_delta_layer, 2, 2, 24, 40),
    (make_delta_layer, 2, 2, 24, 152, True),
    (make_mamba_layer, 1, 2, 32, 128),
    (make_mamba_layer, 2, 4, 24, 40),
]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("make", "shape"), [(make, shape) for make, *shape in LAYERS])
def test_no_bit_depends_on_cuts_rows_or_threads(make, shape):
    layer, inputs, states, pages = make(CUTS[0][0], *shape)
    before, threads = states.pool.clone(), torch.get_num_threads()
    found = []
    for cut, count in ((0, threads), (0, 1), (0, 5), (1, threads), (2, 3)):
        states.pool.copy_(before)
        torch.set_num_threads(count)
        out = run_in_steps(layer, states, pages, inputs, CUTS[cut])
        torch.set_num_threads(threads)
        found.append((out, states.pool.clone()))
    for out, pool in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(pool, found[0][1])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("size", [24, 77, 128])
def test_gated_norm_rounds_as_transformers_does(size):
    reference = Qwen3_5RMSNormGated(size, eps=1e-5).bfloat16()
    reference.weight.data = weight = randn(size, seed=1)
    wide = randn(7, 2, 3 * size + 40, seed=3)[:, :, 8 : 3 * size + 8].unflatten(2, (3, size))
    x, gate = wide.unbind(1)
    expected = reference(x, gate)
    found = ops.gated_rms_norm(x, gate, weight, 1e-5)
    assert (found != expected).float().mean() < 0.01  # torch adds in another order
    assert_close(found.float(), expected.float(), rtol=2**-6, atol=1e-6)
    flat = ops.gated_rms_norm(x.flatten(0, 1), gate.flatten(0, 1), weight, 1e-5)
    assert torch.equal(flat, found.flatten(0, 1))
    other = KimiLinearRMSNormGated(size, eps=1e-5).bfloat16()
    other.weight.data = weight
    found = ops.gated_rms_norm(x, gate, weight, 1e-5, sigmoid=True)
    assert_close(found.float(), other(x, gate).float(), rtol=2**-7, atol=1e-6)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("size", [24, 77, 128])
def test_norm_behind_a_gate_rounds_as_transformers_does(size):
    reference = MambaRMSNormGated(3 * size, size, eps=1e-5).bfloat16()
    reference.weight.data = weight = randn(3 * size, seed=1)
    wide = randn(7, 2, 3 * size + 40, seed=3)[:, :, 8 : 3 * size + 8]
    x, gate = wide.unbind(1)
    expected = reference(x, gate)
    groups = [each.unflatten(-1, (3, size)) for each in (x, gate, weight)]
    found = ops.gated_rms_norm(*groups, 1e-5, gate_first=True).flatten(1)
    assert (found != expected).float().mean() < 0.01  # torch adds in another order
    assert_close(found.float(), expected.float(), rtol=2**-6, atol=1e-6)
    plain = ops.gated_rms_norm(*groups, 1e-5)
    for group in range(3):
        alone = (each[..., group, :] for each in groups)
        assert torch.equal(plain[:, group], ops.gated_rms_norm(*alone, 1e-5))


@pytest.mark.usefixtures("kernels")
def test_tokens_from_the_log_are_torchs():
    """Row 0 follows two drafts and has one; row 1 has nothing of a log; row 2 has two drafts."""
    sources = torch.tensor([-1, -2, 0, 1, 2, 3, 4, 5])
    kept = torch.tensor([-1, -1, -1, 0, -1, -1, 4, 5])
    rows, replay = make_rows([[0]] * 3, [4, 1, 3]), Replay(torch.arange(0), sources, kept, 6)
    parts = randn(6, 340, seed=1).split([300, 7, 33], dim=1)
    logs = [randn(7, 340, seed=2) for _ in range(2)]
    found = ops.extend(parts, logs[0], rows, replay)
    expected = TORCH.extend(parts, logs[1], rows, replay)
    assert all(map(torch.equal, found, expected))
    assert torch.equal(logs[0][:6], logs[1][:6])


@pytest.mark.parametrize(
    ("make", "more"),
    [(make_delta_layer, [False]), (make_delta_layer, [True]), (make_mamba_layer, [])],
)
def test_layers_with_state_can_be_recorded(make, more):
    """The recorded calls run for fewer tokens and rows, whose pages are written behind it."""
    layer, inputs, states, pages = make([2, 1], 1, 2, 24, 40, *more)
    before = states.pool.clone()
    recorded = [torch.zeros(8, x.shape[1], dtype=x.dtype) for x in inputs]
    rows, real = make_rows([[0, 0]] * 8, [1] * 8), make_rows(pages, [2, 1])
    with CPUGraph(8) as recording:
        out = layer(*recorded, states, rows)
    for x, given in zip(recorded, inputs, strict=True):
        x[:3] = given
    for name in ("pages", "write_lens", "cu_seqlens"):
        given = getattr(real, name)
        getattr(rows, name)[: len(given)] = given
    assert torch.equal(states.pool, before)
    recording.run(3, 2)
    found, changed = out[:3].clone(), states.pool.clone()
    states.pool.copy_(before)
    assert torch.equal(layer(*inputs, states, real), found)
    assert torch.equal(states.pool, changed)
    assert not torch.equal(states.pool, before)
