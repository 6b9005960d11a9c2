"""The search for the smallest logit that top_k and top_p keep, and the draw that follows. Without a
GPU they are interpreted.
"""

import pytest
import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton import top_k_top_p
from nanovllm.layers.sampler import Sampling, draw
from tests.kernels.triton.inputs import DEVICE, EVERYTHING, make_sampling, randn, sample
from tests.kernels.triton.interpreter import patch_interpreter

pytestmark = pytest.mark.usefixtures("inference_mode")
patch_interpreter()


@triton.jit
def store_threshold(
    logits, vocab_size, largest, temperatures, chunk_keys, candidates, chunk_sums,
    top_ks, top_ps, min_ps, out,
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
    chunks = (chunk_keys + first, candidates + first, chunk_sums + first)
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


def sums_of(logits, sampling, chunk=128):
    """Return [R, chunks], the sum of the weights of each chunk without top_k and top_p."""
    weights = logits.double() - logits.double().amax(-1, keepdim=True)
    weights = weights.div(sampling.temperatures[:, None]).exp()
    weights[weights < sampling.min_ps[:, None]] = 0
    weights = torch.nn.functional.pad(weights, (0, -logits.shape[-1] % chunk))
    return weights.view(len(logits), -1, chunk).sum(-1)


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
        sums_of(logits, sampling).float(),
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


@triton.jit
def store_least_weight(sums, top_ps, out, vocab_size, NUM: tl.constexpr, CHUNK: tl.constexpr):
    row = tl.program_id(0)
    weights = tl.load(sums + row * NUM + tl.arange(0, NUM))
    least = top_k_top_p._least_weight(weights, vocab_size, tl.load(top_ps + row), CHUNK)
    tl.store(out + row, least)


@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.9, 0.999, 1 - 2**-24])
def test_the_lower_bound_for_top_p(top_p):
    """Lighter logits weigh less than 1 - top_p together. In a peaked row, few chunks reach the
    bound, so the search reads little.
    """
    rows, vocab_size = 4, 64 * 128
    temperature = torch.tensor([0.3, 1.0, 5.0, 1e5])
    sampling = make_sampling(rows, temperature=temperature, top_p=top_p, min_p=0.0)
    logits = randn(rows, vocab_size) * 3
    logits[:2, 1000] = 25.0
    out = torch.empty(rows, device=DEVICE)
    sums = sums_of(logits, sampling).float()
    store_least_weight[(rows,)](sums, sampling.top_ps, out, vocab_size, NUM=64, CHUNK=128)
    largest = logits.double().amax(-1, keepdim=True)
    weights = ((logits.double() - largest) / sampling.temperatures[:, None]).exp()
    lighter = torch.where(weights < out[:, None], weights, 0.0).sum(-1)
    assert (lighter < (1 - sampling.top_ps.double()) * weights.sum(-1)).all()
    reached = (weights.view(rows, 64, 128).amax(-1) >= out[:, None]).sum(-1)
    assert reached[0] == 1
    if top_p < 0.99:
        assert reached[1] == 1


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
