"""The C kernels against float64 and torch, built for each kind of processor."""

import functools
from dataclasses import replace

import pytest
import torch

from nanovllm.features.quantization.integer import IntTensor, quantize
from nanovllm.kernels.cpu import ops
from nanovllm.kernels.cpu.kernels import CKernels
from nanovllm.kernels.torch_kernels import HeadWeight
from nanovllm.layers.sampler import Sampling, draw
from tests.closeness import assert_close
from tests.kernels.cpu.helpers import native, pack, randn

pytestmark = pytest.mark.usefixtures("inference_mode")


@native
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("n", "k"), [(32, 32), (1, 96), (333, 1024), (1003, 128), (1, 1), (150, 33), (928, 288)]
)
def test_linear(n, k):
    """Against float64; then of fewer rows, which are the same bits. Rows may lie apart."""
    weight, bias = randn(n, k), randn(n, seed=1)
    packed, x = pack(weight), randn(300, k + 9, seed=2)[:, 5 : k + 5]
    expected = x.double() @ weight.double().T
    torch_error = (torch.nn.functional.linear(x, weight).double() - expected).abs().max()
    assert_close(packed.apply(x), expected, atol=1.01 * torch_error + 1e-3)
    together = packed.apply(x, bias)
    for m in (1, 2, 5, 11, 12, 13, 16, 17, 31, 32, 33, 47, 256, 257):
        assert torch.equal(packed.apply(x[:m], bias), together[:m])
        assert torch.equal(packed.apply(x[-m:].contiguous(), bias), together[-m:])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize(
    ("heads", "rows", "columns", "kept"),
    [(3, 64, 48, 8), (1, 32, 150, 0), (2, 192, 512, 64), (2, 24, 40, 6)],
)
def test_a_linear_of_each_head(heads, rows, columns, kept, turned):
    """Of heads that lie apart. Those of 24 or 12 rows: torch computes them."""
    weight, kernels = randn(heads * rows, columns), CKernels()
    by_head = HeadWeight(kernels.pack(weight, is_embedding=True), heads, rows, turned)
    outputs, inputs = (columns, rows) if turned else (rows, columns)
    wide = randn(300, heads + 1, kept + inputs + 2, seed=1)
    x = wide[:, 1:, 2:]
    exact = torch.einsum(
        "thk,hnk->thn",
        x[..., kept:].double(),
        by_head._replace(rows=weight.double()).dense(x.device),
    )
    before = randn(300, heads + 2, kept + outputs + 3, seed=2)

    def multiply(first, last):
        out = before.clone()
        into = out[first:last, 1 : heads + 1, 1 : kept + outputs + 1]
        kernels.head_linear(x[first:last], by_head, into, kept)
        found = into.clone()
        into.copy_(before[first:last, 1 : heads + 1, 1 : kept + outputs + 1])
        assert torch.equal(out, before)
        return found

    together = multiply(0, 300)
    assert torch.equal(together[..., :kept], x[..., :kept])
    assert_close(together[..., kept:], exact, atol=1e-3, rtol=2**-7)
    for first, last in ((7, 8), (0, 13), (5, 37), *((at, at + 1) for at in range(40, 300, 7))):
        assert torch.equal(multiply(first, last), together[first:last])


@native
@pytest.mark.parametrize("n", [2080, 2072])  # panels' rows are cache lines, and are not
def test_large_outputs_are_those_of_fewer_rows(n):
    weight, x, bias = pack(randn(n, 32)), randn(1100, 32), randn(n)  # 4.4 MB of outputs
    together = weight.apply(x, bias)
    assert torch.equal(together, torch.cat([weight.apply(r, bias) for r in x.split(100)]))


@native
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("n", [1, 100])
def test_a_bias_is_added_before_the_sum_is_rounded(n, bits):
    weight, bias = randn(n, 64).double(), randn(n, seed=1) * 2
    if bits == 16:
        packed = pack(weight.bfloat16())
    else:
        rounded = quantize(weight, bits, 32)
        weight = rounded.values.double() * rounded.scales.double().repeat_interleave(32, 1)
        packed = pack(rounded)
    for m in (0, 1, 2, 13, 33, 100):
        x = torch.zeros(m, 64, dtype=torch.bfloat16)
        x[:, ::32] = randn(m, 2, seed=m)  # one input a group, so that rounding inputs is exact
        expected = x.double() @ weight.T + bias.double()
        half_step = 2.0 ** (expected.frexp().exponent - 9)  # of bfloat16
        assert ((packed.apply(x, bias).double() - expected).abs() <= half_step + 1e-5).all()


@native
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("n", "k"), [(1003, 128), (70, 33), (40, 1)])
def test_gather_returns_the_rows(n, k):
    weight = randn(n, k)
    ids = torch.randint(n, (50,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(pack(weight).embedding(ids), weight[ids])


@native
@pytest.mark.usefixtures("kernels")
def test_every_scale_of_float16_is_exact():
    """Each scale times 1, 32 at once and one at a time; NaN and infinities stay what they are."""
    scales = torch.arange(2**16).short().view(torch.float16)[:, None]
    values = torch.zeros(len(scales), 32, dtype=torch.int8)
    values[:, 0] = 1
    packed = pack(IntTensor(values, scales, None, 8))
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, 0] = 1
    expected = scales[:, 0].float().bfloat16()
    product = packed.apply(x)[0]
    row = packed.embedding(torch.arange(len(scales)))[:, 0]
    finite = scales[:, 0].isfinite()
    assert torch.equal(product[finite], expected[finite])
    assert not product[~finite].isfinite().any()
    assert torch.equal(row[finite], expected[finite])
    assert not row[~finite].isfinite().any()


@native
@pytest.mark.usefixtures("kernels")
def test_what_is_no_number_stays_so():
    """Symptom: one NaN score takes all of a row's weight."""
    logits = torch.zeros(1, 256, dtype=torch.bfloat16)
    logits[0, 130] = torch.nan
    assert draws(logits) == [-1]
    logits[0, 130] = -torch.inf
    assert draws(logits, positions=range(300), num_rows=300).count(130) == 0


@native
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (3, 77), (5, 8192), (2, 151936)])
def test_greedy_is_the_first_of_the_largest(rows, n):
    logits = (randn(rows, n) * 3).round()  # so that there are ties
    logits[0, : n // 3] = -torch.inf
    logits[-1, : n // 2] = -5.0
    assert torch.equal(ops.sample(logits), logits.float().argmax(-1))
    logits[:] = -1.0
    logits[:, n // 2] = -0.0
    logits[:, n - 1] = 0.0
    assert torch.equal(ops.sample(logits), torch.full((rows,), n // 2))


@native
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.nan])
@pytest.mark.parametrize("n", [1, 77, 16500])
def test_one_logit_that_is_no_number_shows_in_the_largest(n, value):
    """Symptom: the largest logit passes NaN over, and the row's token means nothing."""
    places = sorted({0, 1, 15, 16, 17, n // 2, n - 2, n - 1} & set(range(n)))
    logits = randn(len(places) + 2, n)
    for row, place in enumerate(places):
        logits[row, place] = value
    logits[-2] = -torch.inf
    expected = [-1] * (len(places) + 1) + [logits[-1].argmax()]
    assert ops.sample(logits).tolist() == expected
    assert ops.sample(logits.float()).tolist() == expected
    assert [token < 0 for token in draws(logits)] == [token < 0 for token in expected]


@native
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("num_tables", "has_state"), [(1, False), (3, False), (1, True)])
def test_batch_is_what_the_tables_hold(num_tables, has_state):
    table = torch.randint(0, 1000, (4, 100 + 3 * 7 + 5 + 1), dtype=torch.int32)
    token_ids, *block_tables, pages, offsets = table.split([100, 7, 7, 7, 5, 1], dim=1)
    rows = [(3, 5, 5), (0, 1, 97), (2, 17, 33)]  # table_idx, query_len, seq_len
    places = [(table_idx, i) for table_idx, count, end in rows for i in range(end - count, end)]
    empty = functools.partial(torch.full, fill_value=-1)
    out = (
        *(empty((30,), dtype=torch.int64) for _ in range(2)),
        empty((num_tables, 30), dtype=torch.int64),
        *(empty((5,), dtype=torch.int32) for _ in range(2)),
        empty((num_tables, 5, 7), dtype=torch.int32),
        empty((30,), dtype=torch.int64),
    )
    columns = zip(*rows, strict=True)
    state = ops.StateColumns(pages, torch.full((5, 5), -1).int(), torch.full((5,), -1).int())
    given_state = state if has_state else None
    ops.batch(token_ids, block_tables[0], 16, *columns, offsets[:, 0], out, given_state)
    input_ids, positions, slot_mapping, cu_seqlens_q, seq_lens, blocks, rope_positions = (
        t.tolist() for t in out
    )
    padding = [-1] * (30 - len(places))
    assert input_ids == [int(token_ids[place]) for place in places] + padding
    assert positions == [i for _, i in places] + padding
    assert rope_positions == [i + int(offsets[idx]) for idx, i in places] + padding
    assert cu_seqlens_q == [0, 5, 6, 23, -1]
    assert seq_lens == [5, 97, 33, -1, -1]
    num_states = 3 if has_state else 0
    assert state.write_lens.tolist() == [5, 1, 17][:num_states] + [-1] * (5 - num_states)
    assert torch.equal(state.pages[:num_states], pages[[3, 0, 2]][:num_states])
    assert (state.pages[num_states:] == -1).all()
    for i in range(num_tables):
        expected = [int(block_tables[i][idx, j // 16]) * 16 + j % 16 for idx, j in places]
        assert slot_mapping[i] == expected + padding
        for row, (table_idx, _, end) in enumerate(rows):
            length = -(-end // 16)
            assert blocks[i][row][:length] == block_tables[i][table_idx, :length].tolist()


def draws(logits, *, positions=None, num_rows=None, **columns):
    """Return what `sample` draws for each row, or for the first row `num_rows` times."""
    num_rows = num_rows or len(logits)
    columns = {
        "temperatures": torch.ones(num_rows),
        "seeds": torch.zeros(num_rows, dtype=torch.int64),
        "positions": torch.as_tensor(positions or range(num_rows)),
        "top_ks": torch.full((num_rows,), 2**31 - 1),
        "top_ps": torch.ones(num_rows),
        "min_ps": torch.zeros(num_rows),
        **columns,
    }
    logits = logits if len(logits) == num_rows else logits[:1].repeat(num_rows, 1)
    return ops.sample(logits, *columns.values()).tolist()


FILTERS = {
    "temperature": {},
    "min_p": {"min_p": 0.03},
    "top_k": {"top_k": 20},
    "top_k of many": {"top_k": 700},
    "top_p": {"top_p": 0.6},
    "top_p of many": {"top_p": 0.998},
    "all": {"top_k": 60, "top_p": 0.9, "min_p": 0.01},
}


@functools.cache
def sampled_by_torch(n, filters):
    """Return logits in bfloat16 and float16, how to sample of them, and what torch draws of each.

    The rows are flat, wide and peaked, with ties, greedy ones among them.
    """
    torch.manual_seed(n)  # of 10,000 draws one may lie where rounding decides
    rows = 150 if n < 40_000 else 30
    logits = randn(rows, n) * torch.tensor([0.05, 2.0, 6.0]).repeat(rows // 3)[:, None]
    logits[::7, : n // 2] = -torch.inf
    chosen = FILTERS[filters]
    sampling = Sampling(
        temperatures=torch.rand(rows) * 1.5 + 0.2,
        seeds=torch.randint(2**63 - 1, (rows,)),
        positions=torch.randint(5000, (rows,)),
        top_ks=torch.full((rows,), chosen.get("top_k", 2**31 - 1)),
        top_ps=torch.full((rows,), chosen.get("top_p", 1.0)),
        min_ps=torch.full((rows,), chosen.get("min_p", 0.0)),
        any_greedy=True,
    )
    sampling.temperatures[::11] = 0.0
    largest_k = 0 if filters in ("temperature", "min_p") else n
    halves = logits.half()
    drawn = [draw(x, sampling, largest_k) for x in (logits.float(), halves)]
    return logits, halves, sampling, drawn


@pytest.mark.thinned(3)
@native
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("n", [1, 100, 1003, 40_000])
def test_sample_draws_what_torch_draws(n, filters):
    logits, halves, sampling, (expected, of_halves) = sampled_by_torch(n, filters)
    in_c = replace(sampling, kernels=CKernels())
    for native_logits in (logits, logits.float()):
        assert torch.equal(draw(native_logits, in_c), expected)
    assert torch.equal(draw(halves, in_c), of_halves)
    apart = halves.repeat(1, 2)[:, :n]
    assert torch.equal(draw(apart, in_c), of_halves)


@native
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("n", [1, 77, 8192, 16_450])
def test_rules_on_logits(n):
    logits = randn(5, n)
    logits[0, 0] = torch.nan
    changed = ops.to_float(logits)
    assert torch.equal(changed.nan_to_num(99), logits.float().nan_to_num(99))
    allowed = torch.rand(2, n) < 0.5
    mask_bytes = -(-n // 32) * 4
    padded = torch.nn.functional.pad(allowed, (0, 8 * mask_bytes - n)).view(2, -1, 8)
    masks = (padded.int() << torch.arange(8)).sum(-1).to(torch.uint8)
    ops.forbid(changed, torch.tensor([3, 1]), masks)
    assert torch.equal(changed[[3, 1]], logits[[3, 1]].float().masked_fill(~allowed, -torch.inf))
    assert torch.equal(changed[[2, 4]], logits[[2, 4]].float())
