"""The Triton kernels that sample agree with float64 and with torch. Without a GPU they are
interpreted.
"""

import dataclasses

import pytest
import torch
import triton
import triton.language as tl

from nanovllm.kernels.torch_kernels import TORCH
from nanovllm.kernels.triton import sampling as triton_sampling, top_k_top_p
from nanovllm.layers.sampler import NO_TOKEN, Sampling, draw, uniform
from tests.kernels.triton.inputs import (
    CUDA,
    DEVICE,
    EVERYTHING,
    each_dtype,
    few_dtypes,
    make_sampling,
    randn,
    sample,
)
from tests.kernels.triton.interpreter import patch_interpreter

pytestmark = pytest.mark.usefixtures("inference_mode")
patch_interpreter()


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


@pytest.mark.thinned(3)
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
    """Top_k, top_p, both, min_p with and without top_p, and rows without any."""
    top_k = torch.tensor([30, EVERYTHING, 9, *[EVERYTHING] * 4])
    top_p = torch.tensor([1.0, 0.5, 0.9, 1.0, 0.95, 1.0, 1.0])
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.1, 0.01, 0.0, 0.0])
    sampling = make_sampling(7, temperature=0.9, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = randn(7, 4200, dtype=torch.float16) * 2
    together = sample(logits, sampling)
    for row in range(7):
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
    place, _ = top_k_top_p.invert(tl.load(weights + tl.arange(0, SIZE)), tl.load(targets + row))
    tl.store(places + row, place)


def test_rounding_never_selects_a_token_without_weight():
    """Targets may be slightly below 0, or at or beyond the sum of the weights."""
    weights = torch.tensor([0, 0, 1, 0, 2, 0, 0, 0], dtype=torch.float64, device=DEVICE)
    targets = torch.tensor([-1e-17, 0, 0.99, 1, 2.99, 3, 3.01], dtype=torch.float64, device=DEVICE)
    places = torch.zeros(7, dtype=torch.int32, device=DEVICE)
    invert[(7,)](weights, targets, places, SIZE=8)
    assert places.tolist() == [2, 2, 2, 4, 4, 4, 4]


@pytest.mark.thinned(3)
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


PLACES = [[0], [2047], [2048], [4095], [4096], [4199], [2048, 4199], list(range(4200))]
"""Where logits are replaced: block borders, and the last block, of which most is padding."""


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@few_dtypes
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_that_are_no_distribution_get_no_token(value, dtype):
    """Symptom: an index in the padding behind the vocabulary, which the next embedding looks up.

    Pairs of rows are greedy, plain, have min_p, have top_k and top_p. The second row of each keeps
    its token.
    """
    rows = 2 * len(PLACES)
    columns = {
        "temperature": [0.0, 1.0, 1.0, 1.0],
        "min_p": [0.0, 0.0, 0.1, 0.0],
        "top_k": [EVERYTHING, EVERYTHING, EVERYTHING, 20],
        "top_p": [1.0, 1.0, 1.0, 0.5],
    }
    pairs = {name: torch.tensor(column).repeat_interleave(2) for name, column in columns.items()}
    sampling = make_sampling(rows, **{name: x.repeat(rows // 8) for name, x in pairs.items()})
    logits = randn(rows, 4200, dtype=dtype)
    expected = [sample(logits, sampling), triton_sampling.greedy(logits)]
    for row, places in enumerate(PLACES):
        logits[2 * row, places] = value
    for found, tokens in zip(
        [sample(logits, sampling), triton_sampling.greedy(logits)], expected, strict=True
    ):
        assert (found[::2] == NO_TOKEN).all()
        assert torch.equal(found[1::2], tokens[1::2])


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_the_sampler_uses_the_kernels_on_a_gpu():
    logits, sampling = randn(8, 5000), make_sampling(8)
    assert torch.equal(draw(logits, sampling), sample(logits, sampling))
    assert torch.equal(TORCH.greedy(logits), triton_sampling.greedy(logits))
