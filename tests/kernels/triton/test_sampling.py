"""The Triton kernels that sample agree with float64 and with torch. Without a GPU they are
interpreted.
"""

import dataclasses

import pytest
import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton import inverse_cdf, sampling as triton_sampling, top_k_top_p
from nanovllm.layers.sampler import Sampling, draw, greedy, uniform
from tests.kernels.triton.inputs import CUDA, DEVICE, each_dtype, randn
from tests.kernels.triton.interpreter import patch_interpreter

EVERYTHING = 2**31 - 1
"""The top_k of rows without one."""

pytestmark = pytest.mark.usefixtures("inference_mode")
patch_interpreter()


def make_sampling(rows, *, temperature=1.0, top_k=EVERYTHING, top_p=1.0, min_p=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def column(value):
        return torch.as_tensor(value).float().expand(rows).to(DEVICE).contiguous()

    return Sampling(
        temperatures=column(temperature),
        seeds=torch.randint(2**63 - 1, (rows,), generator=generator).to(DEVICE),
        positions=torch.randint(5000, (rows,), generator=generator).to(DEVICE),
        top_ks=torch.as_tensor(top_k).long().expand(rows).to(DEVICE).contiguous(),
        top_ps=column(top_p),
        min_ps=column(min_p),
    )


def sample(logits, sampling):
    return triton_sampling.sample(
        logits,
        sampling.temperatures,
        sampling.seeds,
        sampling.positions,
        sampling.top_ks,
        sampling.top_ps,
        sampling.min_ps,
    )


def assert_inverts(tokens, logits, sampling):
    """Check that the uniform number of each row lies in the share of its token in the distribution.

    Check too that `draw` on the CPU returns the same tokens, except where the number is within 1e-5
    of a boundary. Return the share of rows for which it is not.
    """
    tokens, logits = tokens.cpu(), logits.cpu()
    columns = ("temperatures", "seeds", "positions", "min_ps")
    temperatures, seeds, positions, min_ps = (getattr(sampling, name).cpu() for name in columns)
    weights = logits.double().sub(logits.double().amax(-1, keepdim=True))
    weights = weights.div(temperatures[:, None].double()).exp()
    weights[weights < min_ps[:, None] * (1 - 1e-6)] = 0
    ends = weights.cumsum(-1) / weights.sum(-1, keepdim=True)
    starts = ends - weights / weights.sum(-1, keepdim=True)
    number, place = uniform(seeds, positions), tokens[:, None]
    assert (weights.gather(1, place) > 0).all()
    before, after = starts.gather(1, place)[:, 0], ends.gather(1, place)[:, 0]
    assert (before - 1e-5 <= number).all()
    assert (number <= after + 1e-5).all()
    clear = (ends - number[:, None]).abs().amin(-1) > 1e-5
    everything = torch.full_like(seeds, EVERYTHING)
    one = torch.ones_like(min_ps)
    rows = Sampling(temperatures, seeds, everything, one, min_ps, positions=positions)
    assert torch.equal(tokens[clear], draw(logits.float(), rows)[clear])
    return clear.float().mean()


@each_dtype
@pytest.mark.parametrize("vocab_size", [1, 127, 2049, 6003])
def test_sample_inverts_the_distribution(vocab_size, dtype):
    rows = 8
    logits = randn(rows, vocab_size, dtype=dtype) * 3
    temperature = torch.linspace(0.3, 1.5, rows)
    for min_p in (0.0, torch.tensor([0.0, 1e-4, 0.05, 1.0]).repeat(rows // 4)):
        sampling = make_sampling(rows, temperature=temperature, min_p=min_p)
        share_clear = assert_inverts(sample(logits, sampling), logits, sampling)
        assert share_clear > 0.7 or vocab_size > 127


def test_sample_from_qwen3s_vocabulary():
    logits = randn(3, 151936, dtype=torch.float16) * 4
    sampling = make_sampling(3, temperature=0.6, min_p=torch.tensor([0.0, 0.0, 0.01]))
    assert_inverts(sample(logits, sampling), logits, sampling)


def test_the_uniform_numbers_are_those_of_the_sampler():
    """With equal logits the token is the uniform number times their count, rounded down."""
    seeds = torch.tensor([0, 1, 2**31, 2**53 + 1, 2**62 + 12345, 2**63 - 1])
    positions = torch.tensor([0, 1, 63, 2**31])
    pairs = torch.cartesian_prod(seeds, positions).to(DEVICE)
    rows, size = len(pairs), 2048
    numbers = uniform(*pairs.T)
    logits = torch.full((rows, size), -2.5, device=DEVICE)
    seeds, positions = pairs.T.contiguous()
    sampling = dataclasses.replace(make_sampling(rows), seeds=seeds, positions=positions)
    assert torch.equal(sample(logits, sampling), (numbers * size).long())


def test_a_row_does_not_depend_on_the_others():
    top_k = torch.tensor([30, *[EVERYTHING] * 8])
    top_p = torch.tensor([0.9, 0.5, *[1.0] * 7])
    sampling = make_sampling(9, temperature=0.9, top_k=top_k, top_p=top_p)
    logits = randn(9, 5000) * 2
    together = sample(logits, sampling)
    for row in range(9):
        alone = sampling.take(torch.tensor([row], device=DEVICE))
        assert torch.equal(sample(logits[row : row + 1], alone), together[row : row + 1])


def test_rows_with_a_stride():
    """Rows of a slice are not adjacent. The padding of the vocabulary is never chosen."""
    padded = randn(4, 3000)
    padded[:, 2500:] = 50.0
    logits, sampling = padded[:, :2500], make_sampling(4)
    assert torch.equal(sample(logits, sampling), sample(logits.contiguous(), sampling))
    assert torch.equal(triton_sampling.greedy(logits), logits.argmax(-1))


@each_dtype
def test_forbidden_tokens_are_never_drawn(dtype):
    """Blocks before and after the allowed tokens are -inf. Some rows allow one token only."""
    logits = randn(16, 9000, dtype=dtype)
    logits[:, :2500] = -torch.inf
    logits[:, 6000:] = -torch.inf
    logits[8:, 2501:] = -torch.inf
    sampling = make_sampling(16, min_p=torch.tensor([0.0, 0.01]).repeat(8))
    tokens = sample(logits, sampling)
    assert ((tokens >= 2500) & (tokens < 6000)).all()
    assert (tokens[8:] == 2500).all()
    assert_inverts(tokens, logits, sampling)


@triton.jit
def invert(weights, targets, places, SIZE: tl.constexpr):
    row = tl.program_id(0)
    place, _ = inverse_cdf.invert(tl.load(weights + tl.arange(0, SIZE)), tl.load(targets + row))
    tl.store(places + row, place)


def test_rounding_never_selects_a_token_without_weight():
    """Targets may be slightly below 0, or at or beyond the sum of the weights."""
    weights = torch.tensor([0, 0, 1, 0, 2, 0, 0, 0], dtype=torch.float64, device=DEVICE)
    targets = torch.tensor([-1e-17, 0, 0.99, 1, 2.99, 3, 3.01], dtype=torch.float64, device=DEVICE)
    places = torch.zeros(7, dtype=torch.int32, device=DEVICE)
    invert[(7,)](weights, targets, places, SIZE=8)
    assert places.tolist() == [2, 2, 2, 4, 4, 4, 4]


@each_dtype
@pytest.mark.parametrize("vocab_size", [1, 5, 2048, 7001])
def test_greedy_takes_the_first_of_the_largest(vocab_size, dtype):
    logits = randn(6, vocab_size, dtype=dtype)
    for row, places in enumerate([(0, -1), (vocab_size // 2, -1), (-2 % vocab_size, -1)]):
        logits[row, list(places)] = 9.0
    logits[5] = -torch.inf
    logits[5, vocab_size // 3] = -5.0
    expected = torch.tensor([row.tolist().index(row.max()) for row in logits.cpu()])
    assert torch.equal(triton_sampling.greedy(logits).cpu(), expected)
    sampling = make_sampling(6, temperature=torch.tensor([0.0, 9e-6, 0.0, 0.0, 1.0, 0.0]))
    mixed = sample(logits, sampling)
    greedy_rows = torch.tensor([0, 1, 2, 3, 5])
    assert torch.equal(mixed.cpu()[greedy_rows], expected[greedy_rows])
    alone = sampling.take(torch.tensor([4], device=DEVICE))
    assert torch.equal(mixed[4:5], sample(logits[4:5], alone))


def test_no_rows():
    assert sample(randn(0, 100), make_sampling(0)).shape == (0,)
    assert triton_sampling.greedy(randn(0, 100)).dtype == torch.int64


# --- top_k and top_p


@triton.jit
def store_threshold(
    logits, vocab_size, largest, temperatures, chunk_keys, candidates, top_ks, top_ps, min_ps, out,
    NUM_CHUNKS: tl.constexpr, ALL_CHUNKS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = (
        logits + index * vocab_size,
        vocab_size,
        tl.load(largest + index),
        1 / tl.load(temperatures + index),
        tl.load(min_ps + index),
    )
    first = index * NUM_CHUNKS
    chunks = (chunk_keys + first, candidates + first, candidates)
    top_k, top_p = tl.load(top_ks + index), tl.load(top_ps + index)
    threshold = top_k_top_p.find_threshold(
        row, chunks, top_k, top_p, NUM_CHUNKS, ALL_CHUNKS, CHUNK, TILE
    )
    tl.store(out + index, threshold.to(tl.int64))


def keys_of(logits):
    """Return int64 `sort_key` of the logits, computed in torch."""
    width = 8 * logits.element_size()
    bits = (logits + 0.0).view(torch.int16 if width == 16 else torch.int32).long()
    return torch.where(bits < 0, -1 - bits - 2 ** (width - 1), bits) + 2 ** (width - 1)


def thresholds(logits, sampling, chunk=128):
    """Return the key of the smallest kept logit of each row, as the kernel finds it."""
    rows, vocab_size = logits.shape
    num_chunks = -(-vocab_size // chunk)
    padding = (0, -vocab_size % chunk)
    chunk_keys = torch.nn.functional.pad(keys_of(logits), padding)
    chunk_keys = chunk_keys.view(rows, num_chunks, chunk).amax(-1).int()
    all_chunks = triton.next_power_of_2(num_chunks)
    out = torch.empty(rows, dtype=torch.int64, device=DEVICE)
    store_threshold[(rows,)](
        logits,
        vocab_size,
        logits.float().amax(-1),
        sampling.temperatures,
        chunk_keys,
        torch.empty_like(chunk_keys),
        sampling.top_ks,
        sampling.top_ps,
        sampling.min_ps,
        out,
        NUM_CHUNKS=num_chunks,
        ALL_CHUNKS=all_chunks,
        CHUNK=chunk,
        TILE=min(all_chunks, 4),
    )
    return out


def kept_by_sorting(logits, temperature, top_k, top_p, min_p):
    """Return [V], whether top_k, top_p and min_p keep each token of a row, computed in float64.

    Return too whether the result is clear, that is, rounding in float32 cannot change it.
    """
    weights = ((logits.double() - logits.double().max()) / temperature).exp()
    allowed = weights >= min_p
    clear = (((weights / min_p - 1).abs() > 1e-5) | (weights == 1)).all() if min_p else True
    ordered, order = logits.double().sort(descending=True, stable=True)
    in_top_k = ordered >= ordered[min(top_k, len(ordered)) - 1]
    mass = torch.where(in_top_k & allowed[order], weights[order], 0.0).cumsum(0)
    if top_p < 1:
        clear &= ((mass / mass[-1] - top_p).abs() > 1e-6).all()
        before = mass - torch.where(in_top_k & allowed[order], weights[order], 0.0)
        in_top_k &= before < top_p * mass[-1]
    return (logits >= logits[order[in_top_k][-1]]) & allowed, bool(clear)


FILTERS = [
    {"top_k": 1},
    {"top_k": 17, "top_p": 0.8},
    {"top_k": EVERYTHING, "top_p": 0.9},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {"top_k": EVERYTHING, "top_p": 1e-6},
    {"top_k": EVERYTHING, "top_p": 0.999, "min_p": 0.01},
    {"top_k": 10**6, "top_p": 0.5},
    {"top_k": 700},
]
"""The parameters of each row."""


def make_filtered(vocab_size, dtype, decimals=None):
    """Return logits with one row for each of FILTERS, and the parameters. `decimals` makes ties."""
    rows = len(FILTERS)
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    if decimals is not None:
        logits = logits.round(decimals=decimals)
    columns = {
        name: torch.tensor([filters.get(name, none) for filters in FILTERS])
        for name, none in (("top_k", EVERYTHING), ("top_p", 1.0), ("min_p", 0.0))
    }
    temperature = torch.linspace(0.5, 1.5, rows)
    return logits.to(DEVICE, dtype), make_sampling(rows, temperature=temperature, **columns)


@pytest.mark.parametrize(
    ("vocab_size", "decimals", "dtype"),
    [
        (1, None, torch.float32),
        (331, 1, torch.float32),
        (331, 1, torch.bfloat16),
        (1203, None, torch.float16),
    ],
)
def test_thresholds_equal_those_of_a_sort(vocab_size, decimals, dtype):
    logits, sampling = make_filtered(vocab_size, dtype, decimals)
    if vocab_size > 1:
        logits[::2, ::3] = -torch.inf
        logits[0, 1:3] = 0.0
        logits[0, 2] *= -1.0
    keys, num_clear = keys_of(logits), 0
    for row, threshold in enumerate(thresholds(logits, sampling)):
        columns = (sampling.temperatures, sampling.top_ks, sampling.top_ps, sampling.min_ps)
        values = [column[row].item() for column in columns]
        expected, clear = kept_by_sorting(logits[row].cpu(), *values)
        num_clear += clear
        kept = (keys[row] >= threshold).cpu()
        if sampling.top_ps[row] == 1 and sampling.top_ks[row] >= vocab_size:
            assert kept.all()
        elif clear:
            weights = (logits[row].double() - logits[row].double().max()) / values[0]
            assert torch.equal(kept & (weights.exp() >= values[3]).cpu(), expected)
    assert num_clear >= len(FILTERS) - 2


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(1203, torch.float32), (77, torch.float16), (4500, torch.bfloat16)],
)
def test_top_k_and_top_p_draw_what_torch_draws(vocab_size, dtype):
    logits, sampling = make_filtered(vocab_size, dtype, decimals=1)
    columns = {name: x.cpu() for name, x in vars(sampling).items() if hasattr(x, "cpu")}
    expected = draw(logits.cpu(), Sampling(**columns), vocab_size)
    assert torch.equal(sample(logits, sampling).cpu(), expected)


def test_rows_without_a_filter_do_not_depend_on_filtered_rows():
    """A greedy row ignores its own top_k and top_p."""
    logits, rows = randn(6, 3000) * 3, torch.tensor([0, 2, 4], device=DEVICE)
    temperature = torch.tensor([0.0, 0.7, 1.0, 0.7, 1.3, 0.7])
    mixed = make_sampling(
        6,
        temperature=temperature,
        top_k=torch.tensor([5, 5, EVERYTHING, EVERYTHING, 3000, 2]),
        top_p=torch.tensor([0.5, 1.0, 1.0, 0.5, 1.0, 0.5]),
    )
    without = make_sampling(6, temperature=temperature)
    together, alone = sample(logits, mixed), sample(logits[rows], without.take(rows))
    assert torch.equal(together[rows], alone)
    assert together[0] == logits[0].argmax()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("filters", [{}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.5}], ids=str)
def test_rows_that_are_no_distribution_get_no_token(filters):
    logits = randn(7, 2100)
    sampling = make_sampling(7, temperature=torch.tensor([1.0] * 6 + [0.0]), **filters)
    expected, likeliest = sample(logits, sampling), triton_sampling.greedy(logits)
    logits[0], logits[1], logits[2, 7], logits[3, 7] = -torch.inf, torch.nan, torch.nan, torch.inf
    logits[6, -1] = torch.nan
    sound = torch.tensor([4, 5], device=logits.device)
    for found, before in (
        (sample(logits, sampling), expected),
        (triton_sampling.greedy(logits), likeliest),
    ):
        assert torch.equal(found[sound], before[sound])
        assert found.tolist().count(-1) == 5


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_the_sampler_uses_the_kernels_on_a_gpu():
    logits, sampling = randn(8, 5000), make_sampling(8)
    assert torch.equal(draw(logits, sampling), sample(logits, sampling))
    assert torch.equal(greedy(logits), triton_sampling.greedy(logits))
