"""The sampler draws from exactly the softmax of what its filters keep, the filters keep what
transformers' keep, and a row's draw depends on nothing but the row.
"""

import dataclasses
import functools
import itertools
import math

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanovllm.kernels.torch_kernels import TORCH
from nanovllm.layers import sampler
from nanovllm.layers.sampler import NO_TOKEN, Sampling, draw, uniform, weights_of
from nanovllm.platform.cpu import CPU

KERNELS = CPU().kernels(torch.float32)

DRAWS = 100_000
ALMOST_ONE = 1 - 2.0**-53
EVERYTHING = 2**31 - 1
"""The top_k of rows that have none."""
BEYOND = 200_000
"""A top_k above the size of every vocabulary here."""

FILTERS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 50},
    {"top_p": 1e-6},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"min_p": 0.2, "top_p": 0.7},
    {"min_p": 0.3, "top_k": 30},
    {"min_p": 0.1, "top_k": 40, "top_p": 0.9},
    {"top_k": BEYOND, "top_p": 0.9},
]


def make_sampling(count, *, temperature=1.0, seeds=0, positions=0, top_k=0, top_p=1.0, min_p=0.0):
    """Return what `count` rows ask for; each argument is one number for all, or one for each."""

    def column(value, dtype=torch.float32):
        return torch.as_tensor(value, dtype=dtype).expand(count).clone()

    top_ks, top_ps, min_ps = column(top_k, torch.int64), column(top_p), column(min_p)
    return Sampling(
        temperatures=column(temperature),
        seeds=column(seeds, torch.int64),
        positions=column(positions, torch.int64),
        top_ks=torch.where(top_ks == 0, EVERYTHING, top_ks),
        top_ps=top_ps,
        min_ps=min_ps,
        any_min_p=bool((min_ps > 0).any()),
        any_top_p_of_all=bool(((top_ps < 1) & ((top_ks == 0) | (top_ks >= BEYOND))).any()),
        kernels=KERNELS,
    )


def enough_candidates(top_k=0, top_p=1.0, min_p=0.0):
    """Return how many candidates rows of such filters need; few for top_p, so that many rows have
    to be sorted.
    """
    if 0 < top_k < BEYOND:
        return top_k + 1
    return 32 if top_p < 1 else 0


def random_rows(num_rows, vocab_size, dtype=torch.float32, seed=0, filters=False):
    """Return logits and sampling; with `filters` each row has its own top_k, top_p and min_p, or
    does without.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(num_rows, vocab_size, generator=generator) * 3).to(dtype)
    chosen = {}
    if filters:
        top_ks = torch.tensor([0, 1, 5, 60])[torch.randint(4, (num_rows,), generator=generator)]
        top_ps = torch.rand(num_rows, generator=generator) + 0.05
        min_ps = torch.rand(num_rows, generator=generator) * 0.1 - 0.05
        chosen = {"top_k": top_ks, "top_p": top_ps.clamp(max=1), "min_p": min_ps.clamp(min=0)}
    sampling = make_sampling(
        num_rows,
        temperature=torch.rand(num_rows, generator=generator) + 0.3,
        seeds=torch.randint(2**63 - 1, (num_rows,), generator=generator),
        positions=torch.randint(5000, (num_rows,), generator=generator),
        **chosen,
    )
    return logits, sampling


@functools.cache
def distinct_rows(num_rows, vocab_size, seed=0):
    """Return float32 logits, no two of a row alike: flat, normal, wide and peaked rows in turn.

    Jittered quantiles of the normal distribution, shuffled and scaled.
    """
    generator = torch.Generator().manual_seed(seed)
    jitter = torch.rand(num_rows, vocab_size, generator=generator, dtype=torch.float64)
    quantiles = torch.special.ndtri((torch.arange(vocab_size) + 0.1 + 0.8 * jitter) / vocab_size)
    quantiles *= torch.tensor([0.02, 1.0, 3.0, 2.0]).repeat(-(-num_rows // 4))[:num_rows, None]
    quantiles[3::4, -1] += 6.0  # the largest
    shuffled = torch.rand(num_rows, vocab_size, generator=generator).argsort(-1)
    assert (quantiles.float().diff(dim=-1) > 0).all()
    return quantiles.gather(1, shuffled).float()


def filtered(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Return transformers' scores in float64, -inf for what is left out, and which rows are clear:
    those where no float32 rounding can tip the choice.
    """
    as_float32 = torch.tensor([temperature, top_p, min_p]).tolist()
    temperature, top_p, min_p = as_float32
    scores = TemperatureLogitsWarper(temperature)(None, logits.double())
    clear = torch.ones(len(logits), dtype=torch.bool)
    if min_p:
        relative = (scores - scores.amax(-1, keepdim=True)).exp()
        clear &= (((relative / min_p - 1).abs() > 1e-5) | (relative == 1)).all(-1)
        scores = MinPLogitsWarper(min_p)(None, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        cumulative = scores.softmax(-1).sort(-1, descending=True).values.cumsum(-1)
        clear &= ((cumulative - top_p).abs() > 1e-8).all(-1)
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores, clear


def in_torch(sampling):
    """Return `sampling` without the package's own kernels, of which tests/kernels has the tests."""
    return dataclasses.replace(sampling, kernels=TORCH)


def kept_logits(monkeypatch, logits, sampling, num_candidates):
    """Draw in plain torch; return for each row the logits that kept a weight, in ascending order.

    The rows of `sampling` must be numbered by their positions. A row that is sorted is drawn twice;
    the last draw counts.
    """
    kept = {}
    invert = sampler._invert

    def record(chunks, sums, largest, thresholds, sampling):
        weights = weights_of(chunks, largest, sampling, thresholds)
        assert torch.equal(weights.sum(-1) > 0, sums > 0)
        rows = zip(sampling.positions.tolist(), chunks, weights > 0, strict=True)
        kept.update((row, x[mask].sort().values) for row, x, mask in rows)
        return invert(chunks, sums, largest, thresholds, sampling)

    with monkeypatch.context() as patch:
        patch.setattr(sampler, "_invert", record)
        tokens = draw(logits, in_torch(sampling), num_candidates)
    for row, token in enumerate(tokens.tolist()):
        assert (kept[row] == logits[row, token]).any()
    return [kept[row] for row in range(len(logits))]


def assert_same_kept(kept, logits, mask):
    for found, row, expected in zip(kept, logits, mask, strict=True):
        assert torch.equal(found, row[expected].sort().values)


def assert_follows(observed, probabilities):
    """A chi-square test at 0.001; what is expected less than five times is counted together."""
    observed, expected = observed.double(), probabilities * observed.sum()
    assert observed[probabilities == 0].sum() == 0
    rare = expected < 5
    if rare.any():
        observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    assert freedom > 0
    spread = 2 / (9 * freedom)
    critical = freedom * (1 - spread + 3.0902 * spread**0.5) ** 3  # Wilson and Hilferty
    assert ((observed - expected).square() / expected).sum() < critical


def splitmix64(seed, position):
    """Return what `uniform` should, in Python's integers."""
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1

    def mix(x):
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    first = mix(seed + golden & mask)
    return (mix(first + (position + 1) * golden & mask) >> 11) / 2**53


@pytest.mark.parametrize(
    ("vocab_size", "filters"),
    [*zip(itertools.cycle([1003, 31, 5003]), FILTERS, strict=False)],
    ids=str,
)
def test_the_filters_keep_what_transformers_keep(monkeypatch, vocab_size, filters):
    """Of hundreds of rows, the same tokens; the one that crosses top_p is among them."""
    temperature, count = {31: (0.7, 500), 1003: (1.0, 200), 5003: (1.6, 100)}[vocab_size]
    logits = distinct_rows(count + 40, vocab_size)
    scores, clear = filtered(logits, temperature=temperature, **filters)
    rows = clear.nonzero()[:count, 0]
    assert len(rows) == count
    logits, mask = logits[rows], scores[rows] > -torch.inf
    positions = torch.arange(count)
    sampling = make_sampling(count, temperature=temperature, positions=positions, **filters)
    kept = kept_logits(monkeypatch, logits, sampling, enough_candidates(**filters))
    assert_same_kept(kept, logits, mask)


@pytest.mark.parametrize("vocab_size", [97, 2049])
def test_rows_of_a_batch_each_keep_by_their_own_filters(monkeypatch, vocab_size):
    """Each has a temperature, top_k, top_p and min_p of its own."""
    logits, sampling = random_rows(320, vocab_size, filters=True)
    logits = distinct_rows(320, vocab_size)
    masks, rows = [], []
    for row in range(len(logits)):
        top_k = sampling.top_ks[row].item()
        scores, clear = filtered(
            logits[row : row + 1],
            temperature=sampling.temperatures[row].item(),
            top_k=0 if top_k == EVERYTHING else top_k,
            top_p=sampling.top_ps[row].item(),
            min_p=sampling.min_ps[row].item(),
        )
        if clear:
            rows.append(row)
            masks.append(scores[0] > -torch.inf)
    assert len(rows) >= 300
    chosen = make_sampling(
        len(rows),
        temperature=sampling.temperatures[rows],
        positions=torch.arange(len(rows)),
        top_k=sampling.top_ks[rows],
        top_p=sampling.top_ps[rows],
        min_p=sampling.min_ps[rows],
    )
    kept = kept_logits(monkeypatch, logits[rows], chosen, 70)
    assert_same_kept(kept, logits[rows], masks)


def test_top_p_of_a_large_vocabulary(monkeypatch):
    """More chunks than candidates. Flat rows are sorted, peaked ones are not."""
    logits = distinct_rows(24, 40_961)
    scores, clear = filtered(logits, top_p=0.5)
    rows = clear.nonzero()[:, 0]
    assert len(rows) > 20
    sampling = make_sampling(len(rows), positions=torch.arange(len(rows)), top_p=0.5)
    sizes = []
    invert = sampler._invert

    def count(chunks, *args):
        sizes.append(len(chunks))
        return invert(chunks, *args)

    monkeypatch.setattr(sampler, "_invert", count)
    kept = kept_logits(monkeypatch, logits[rows], sampling, 256)
    assert_same_kept(kept, logits[rows], scores[rows] > -torch.inf)
    assert sorted(sizes) == sizes[::-1]
    assert 0 < sizes[1] < sizes[0] == len(rows)


def rows_with_ties(dtype=torch.bfloat16):
    return (random_rows(1000, 1003)[0] / 10).round(decimals=1).to(dtype)


@pytest.mark.parametrize(("top_k", "dtype"), [(1, torch.float16), (40, torch.bfloat16)])
def test_top_k_keeps_all_that_tie_with_the_last(monkeypatch, dtype, top_k):
    """As transformers does. A few candidates are not enough to see the ties."""
    logits = rows_with_ties(dtype)
    mask = TopKLogitsWarper(top_k)(None, logits) > -torch.inf
    assert (mask.sum(-1) > top_k).float().mean() > 0.2
    sampling = make_sampling(1000, positions=torch.arange(1000), top_k=top_k)
    kept = kept_logits(monkeypatch, logits, sampling, top_k + 1)
    assert_same_kept(kept, logits, mask)


@pytest.mark.parametrize(
    ("top_p", "top_k", "num_spare"), [(0.2, 0, 1), (0.9, 0, 100), (0.9, 12, 1), (0.2, 50, 100)]
)
def test_top_p_keeps_all_that_tie_with_the_last(monkeypatch, top_p, top_k, num_spare):
    """Tokens of equal logits are equally likely, so none of them may be left out. All that tie with
    the top_k-th count in the whole that top_p is a share of, candidates or not.
    """
    logits = rows_with_ties()
    top_p = torch.tensor(top_p).item()
    scores = logits.double()
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    ordered = scores.sort(-1, descending=True).values
    probabilities = ordered.softmax(-1)
    cumulative = probabilities.cumsum(-1)
    clear = ((cumulative - top_p).abs() > 1e-8).all(-1)
    last = ((cumulative - probabilities) < top_p).sum(-1, keepdim=True) - 1
    mask = scores >= ordered.gather(1, last)
    assert (mask.sum(-1) > last[:, 0] + 1).float().mean() > 0.3
    logits, mask = logits[clear], mask[clear]
    assert len(logits) > 950
    rows = torch.arange(len(logits))
    sampling = make_sampling(len(logits), positions=rows, top_k=top_k, top_p=top_p)
    kept = kept_logits(monkeypatch, logits, sampling, top_k + num_spare)
    assert_same_kept(kept, logits, mask)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(100, torch.float32), (1003, torch.bfloat16), (5003, torch.float32)]
)
def test_the_number_of_candidates_changes_no_draw(vocab_size, dtype):
    logits, sampling = random_rows(200, vocab_size, dtype, filters=True)
    logits[::3] *= 0.01  # flat ones
    sampling = in_torch(sampling)
    drawn = [draw(logits, sampling, count) for count in (61, 64, 256, 999, vocab_size)]
    assert all(torch.equal(drawn[0], other) for other in drawn[1:])
    plain = make_sampling(200, seeds=sampling.seeds, positions=sampling.positions, min_p=0.01)
    plain = in_torch(plain)
    drawn = [draw(logits, plain, count) for count in (0, 8, 256, vocab_size)]
    assert all(torch.equal(drawn[0], other) for other in drawn[1:])


@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("vocab_size", [3, 32768])
def test_a_row_does_not_depend_on_its_batch_mates(vocab_size, filters):
    logits, sampling = random_rows(24, vocab_size, filters=filters)
    num_candidates = 68 if filters else 0
    together = draw(logits, sampling, num_candidates)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    assert torch.equal(draw(logits[order], sampling.take(order), num_candidates), together[order])
    for row in range(24):
        rows = torch.tensor([row])
        assert draw(logits[rows], sampling.take(rows), num_candidates).item() == together[row]


def test_what_is_known_on_the_host_changes_no_draw():
    """The two flags save work where no row needs it; else they may as well be set."""
    logits, sampling = random_rows(200, 1003)
    sampling = in_torch(sampling)
    needless = Sampling(**{**vars(sampling), "any_min_p": True, "any_top_p_of_all": True})
    assert (sampling.any_min_p, sampling.any_top_p_of_all) == (False, False)
    for num_candidates in (0, 64):
        expected = draw(logits, sampling, num_candidates)
        assert torch.equal(draw(logits, needless, num_candidates), expected)


def test_the_seed_and_the_position_decide():
    logits = torch.randn(1, 1003, generator=torch.Generator().manual_seed(0)).expand(40, -1)
    numbers = torch.arange(40)
    by_position = draw(logits, make_sampling(40, seeds=7, positions=numbers))
    by_seed = draw(logits, make_sampling(40, seeds=numbers, positions=7))
    repeated = draw(logits, make_sampling(40, seeds=7, positions=7))
    assert len(set(by_position.tolist())) > 20
    assert len(set(by_seed.tolist())) > 20
    assert len(set(repeated.tolist())) == 1
    assert torch.equal(by_position, draw(logits, make_sampling(40, seeds=7, positions=numbers)))


@pytest.mark.parametrize("vocab_size", [100, 384])
def test_arguments_are_left_alone(vocab_size):
    """Also where the vocabulary fills its chunks, so that nothing is padded."""
    logits, sampling = random_rows(8, vocab_size, filters=True)
    kept = sampling.take(torch.arange(8))
    before = [logits.clone(), kept.positions, *kept.columns]
    for num_candidates in (0, 61):
        draw(logits, sampling, num_candidates)
        after = [logits, sampling.positions, *sampling.columns]
        for old, new in zip(before, after, strict=True):
            assert torch.equal(old, new)


@pytest.mark.parametrize("num_candidates", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_lowest_sampled_temperature_does_not_overflow(dtype, num_candidates):
    logits = torch.tensor([[-3e4, 3e4, 2.9e4, 0.0]]).to(dtype)
    sampling = make_sampling(
        1, temperature=1.1e-5, seeds=5, positions=5, top_p=0.9 if num_candidates else 1.0
    )
    assert draw(logits, sampling, num_candidates).tolist() == [1]


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 12}, {"min_p": 0.2}], ids=str)
@pytest.mark.parametrize("temperature", [0.01, 100.0])
def test_masked_tokens_are_never_chosen(temperature, filters):
    """Rows keep as few as one token, fewer than top_k."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2000, 40, generator=generator)
    masked = torch.rand(2000, 40, generator=generator) < 0.8
    masked[:, 17] = False
    logits[masked] = -torch.inf
    rows = torch.arange(2000)
    sampling = make_sampling(2000, temperature=temperature, seeds=rows, positions=rows, **filters)
    chosen = draw(logits, sampling, enough_candidates(**filters))
    assert not masked[rows, chosen].any()


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 12}, {"min_p": 0.2}], ids=str)
@pytest.mark.parametrize(
    ("value", "dtype"),
    [(torch.nan, torch.float32), (-torch.inf, torch.bfloat16), (torch.inf, torch.float32)],
)
def test_rows_that_are_no_distribution_give_no_token_and_harm_no_neighbour(dtype, value, filters):
    """A model that overflowed, or rules that forbid every token."""
    logits, _ = random_rows(30, 300, dtype)
    temperatures = torch.linspace(0, 1, 30)  # the first is greedy
    sampling = make_sampling(30, temperature=temperatures, seeds=torch.arange(30), **filters)
    sampling = dataclasses.replace(sampling, any_greedy=True)
    expected = draw(logits, sampling, enough_candidates(**filters))
    likeliest = KERNELS.greedy(logits)
    logits[::3] = value
    if value != -torch.inf:  # one such logit is enough
        logits[6::3] = 0.0
        logits[6, 0] = logits[9, 150] = logits[12, 299] = logits[15:30:3, 256] = value
    chosen = draw(logits, sampling, enough_candidates(**filters))
    sound = torch.arange(30) % 3 > 0
    assert torch.equal(chosen, torch.where(sound, expected, NO_TOKEN))
    assert torch.equal(KERNELS.greedy(logits), torch.where(sound, likeliest, NO_TOKEN))


@pytest.mark.parametrize("num_candidates", [0, 4, 8])
@pytest.mark.parametrize(("number", "expected"), [(0.0, 2), (ALMOST_ONE, 5)])
def test_extreme_numbers_choose_the_first_and_the_last_possible_token(
    monkeypatch, number, expected, num_candidates
):
    """Masked tokens at either end have no probability, not even at the ends of the interval."""
    monkeypatch.setattr(
        sampler, "uniform", lambda s, p: torch.full(s.shape, number, dtype=torch.float64)
    )
    inf = torch.inf
    logits = torch.tensor([[-inf, -inf, 0.3, 1.0, -inf, 0.1, -inf, -inf]])
    sampling = in_torch(make_sampling(1, top_p=0.99 if num_candidates else 1.0))
    assert draw(logits, sampling, num_candidates).tolist() == [expected]


def test_a_number_between_two_chunks_chooses_no_masked_token(monkeypatch):
    """The sum of the chunks before rounds; the second chunk's first token is masked."""
    logits = torch.full((1, 256), -torch.inf)
    logits[0, 0] = 0.0
    for exponent in range(20, 36):
        logits[0, 130] = -float(exponent)
        mass = 1.0 + logits[0, 130].exp().item()
        monkeypatch.setattr(
            sampler,
            "uniform",
            lambda s, p, mass=mass: torch.full(s.shape, 1 / mass, dtype=torch.float64),
        )
        assert draw(logits, make_sampling(1)).item() in (0, 130)


@pytest.mark.parametrize("kernels", [TORCH, KERNELS])
def test_each_of_many_unlikely_tokens_can_be_chosen(kernels):
    """Sums in float32 tell tokens of a hundred-millionth apart no better than by the dozen."""
    seeds = torch.arange(40_000)
    seeds = seeds[(uniform(seeds, torch.zeros_like(seeds)) - 0.99925).abs() < 0.00065][:20]
    numbers = uniform(seeds, torch.zeros_like(seeds))
    logits = torch.full((20, 150_001), math.log(1e-8))
    logits[:, 0] = 0
    weight = math.exp(logits[0, 1])
    expected = (numbers * (1 + 150_000 * weight) - 1) / weight
    chosen = draw(logits, dataclasses.replace(make_sampling(20, seeds=seeds), kernels=kernels))
    beyond = chosen - expected  # the first token whose sum is larger, to a tenth of a token
    assert beyond.min() > -0.1
    assert beyond.max() < 1.1


@pytest.mark.parametrize(("keyed_by", "temperature"), [("seed", 0.7), ("position", 3.0)])
def test_draws_follow_the_softmax(keyed_by, temperature):
    logits = torch.randn(31, generator=torch.Generator().manual_seed(11))
    keys = {"seeds": 12345, "positions": 12345, keyed_by + "s": torch.arange(DRAWS)}
    sampling = make_sampling(DRAWS, temperature=temperature, **keys)
    chosen = draw(logits.expand(DRAWS, -1), sampling)
    probabilities = torch.softmax(logits.double() / temperature, -1)
    assert probabilities.min() * DRAWS > 5  # what the chi-square distribution needs
    assert_follows(torch.bincount(chosen, minlength=31), probabilities)


@pytest.mark.parametrize(
    "wanted",
    [
        {"temperature": 2.0, "top_k": 150},
        {"temperature": 1.5, "top_p": 0.95},
        {"temperature": 1.0, "min_p": 0.03},
        {"temperature": 1.3, "min_p": 0.02, "top_k": 40, "top_p": 0.8},
    ],
    ids=str,
)
def test_draws_follow_the_filtered_softmax(wanted):
    """Three chunks; many candidates or so few that the row is sorted."""
    vocab_size, size = 301, DRAWS // 10
    logits = distinct_rows(4, vocab_size, seed=5)[1] * 1.5
    scores, _ = filtered(logits[None], **wanted)
    filters = {name: value for name, value in wanted.items() if name != "temperature"}
    observed = torch.zeros(vocab_size, dtype=torch.int64)
    for part in range(10):
        positions = torch.arange(part * size, (part + 1) * size)
        sampling = make_sampling(size, seeds=4321, positions=positions, **wanted)
        chosen = draw(logits.expand(size, -1), sampling, enough_candidates(**filters))
        observed += torch.bincount(chosen, minlength=vocab_size)
    assert_follows(observed, scores[0].softmax(-1))


def test_uniform_is_splitmix64():
    ends = [0, 1, 2, 2**31, 2**53 + 1, 2**62, 2**63 - 1]
    places = [0, 1, 63, 4095, 2**31]
    generator = torch.Generator().manual_seed(0)
    seeds = ends + torch.randint(2**63 - 1, (50,), generator=generator).tolist()
    pairs = [(seed, position) for seed in seeds for position in places]
    numbers = uniform(*torch.tensor(pairs).T)
    assert numbers.dtype == torch.float64
    assert numbers.tolist() == [splitmix64(seed, position) for seed, position in pairs]
