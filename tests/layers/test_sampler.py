"""The sampler draws from exactly the softmax, and a row's draw depends on nothing but the row."""

import math

import pytest
import torch

from nanovllm.layers import sampler
from nanovllm.layers.sampler import sample, uniform

DRAWS = 100_000
CHI_SQUARE_30 = 59.703
"""Exceeded by 30 degrees of freedom with probability 0.001."""
ALMOST_ONE = 1 - 2.0**-53


def random_rows(num_rows, vocab_size, dtype=torch.float32, seed=0):
    """Return logits, temperatures, seeds and positions; every fourth row is greedy."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(num_rows, vocab_size, generator=generator) * 3).to(dtype)
    temperatures = torch.rand(num_rows, generator=generator) + 0.3
    temperatures[::4] = 0.0
    seeds = torch.randint(2**63 - 1, (num_rows,), generator=generator)
    positions = torch.randint(5000, (num_rows,), generator=generator)
    return logits, temperatures, seeds, positions


def splitmix64(seed, position):
    """Return what `uniform` should, in Python's integers."""
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1

    def mix(x):
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    first = mix(seed + golden & mask)
    return (mix(first + (position + 1) * golden & mask) >> 11) / 2**53


def correlation(x, y):
    return torch.corrcoef(torch.stack([x.flatten(), y.flatten()]))[0, 1].item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_greedy_rows_are_the_argmax(dtype, temperature):
    logits, _, seeds, positions = random_rows(50, 1003, dtype)
    chosen = sample(logits, torch.full((50,), temperature), seeds, positions)
    assert chosen.dtype == torch.int64
    assert torch.equal(chosen, logits.argmax(-1))


def test_greedy_takes_the_first_of_equals():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0]])
    zero = torch.zeros(1, dtype=torch.int64)
    assert sample(logits, torch.zeros(1), zero, zero).tolist() == [1]


def test_greedy_and_sampled_rows_share_a_batch():
    logits, temperatures, seeds, positions = random_rows(64, 1003)
    chosen = sample(logits, temperatures, seeds, positions)
    greedy = temperatures == 0
    best = logits.argmax(-1)
    assert torch.equal(chosen[greedy], best[greedy])
    assert (chosen[~greedy] != best[~greedy]).any()


@pytest.mark.parametrize("vocab_size", [3, 1003, 32768])
def test_a_row_does_not_depend_on_its_batch_mates(vocab_size):
    rows = random_rows(24, vocab_size)
    together = sample(*rows)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    assert torch.equal(sample(*(part[order] for part in rows)), together[order])
    for row in range(24):
        alone = sample(*(part[row : row + 1] for part in rows))
        assert alone.item() == together[row]


def test_the_seed_and_the_position_decide():
    logits = torch.randn(1, 1003, generator=torch.Generator().manual_seed(0)).expand(40, -1)
    ones, numbers, same = torch.ones(40), torch.arange(40), torch.full((40,), 7)
    by_position = sample(logits, ones, same, numbers)
    by_seed = sample(logits, ones, numbers, same)
    repeated = sample(logits, ones, same, same)
    assert len(set(by_position.tolist())) > 20
    assert len(set(by_seed.tolist())) > 20
    assert len(set(repeated.tolist())) == 1
    assert torch.equal(by_position, sample(logits, ones, same, numbers))


def test_arguments_are_left_alone():
    rows = random_rows(8, 100)
    copies = [part.clone() for part in rows]
    sample(*rows)
    assert all(map(torch.equal, rows, copies))


def test_low_temperatures_tend_to_greedy():
    logits = torch.tensor([1.0, 3.0, 2.5, 0.0]).expand(4000, -1)
    seeds, positions = torch.zeros(4000, dtype=torch.int64), torch.arange(4000)
    shares = [
        (sample(logits, torch.full((4000,), t), seeds, positions) == 1).float().mean().item()
        for t in (10.0, 1.0, 0.5, 0.2, 0.02)
    ]
    assert shares == sorted(shares)
    assert shares[0] < 0.4
    assert shares[-1] == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_lowest_sampled_temperature_does_not_overflow(dtype):
    logits = (torch.tensor([[-3e4, 3e4, 2.9e4, 0.0]])).to(dtype)
    number = torch.tensor([5])
    assert sample(logits, torch.tensor([1.1e-5]), number, number).tolist() == [1]


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0, 100.0])
def test_masked_tokens_are_never_chosen(temperature):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2000, 40, generator=generator)
    masked = torch.rand(2000, 40, generator=generator) < 0.8
    masked[:, 17] = False
    logits[masked] = -torch.inf
    seeds = torch.arange(2000)
    chosen = sample(logits, torch.full((2000,), temperature), seeds, seeds)
    assert not masked[seeds, chosen].any()


@pytest.mark.parametrize(("number", "expected"), [(0.0, 2), (ALMOST_ONE, 5)])
def test_extreme_numbers_choose_the_first_and_the_last_possible_token(
    monkeypatch, number, expected
):
    """Masked tokens at either end have no probability, not even at the ends of the interval."""
    monkeypatch.setattr(
        sampler, "uniform", lambda s, p: torch.full(s.shape, number, dtype=torch.float64)
    )
    inf = torch.inf
    logits = torch.tensor([[-inf, -inf, 0.3, 1.0, -inf, 0.1, -inf, -inf]])
    zero = torch.zeros(1, dtype=torch.int64)
    assert sample(logits, torch.ones(1), zero, zero).tolist() == [expected]


def test_each_of_many_unlikely_tokens_can_be_chosen(monkeypatch):
    """Sums in float32 tell tokens of a hundred-millionth apart no better than by the dozen."""
    numbers = torch.linspace(0.9986, 0.9999, 20, dtype=torch.float64)
    monkeypatch.setattr(sampler, "uniform", lambda seeds, positions: numbers)
    logits = torch.full((20, 150_001), math.log(1e-8))
    logits[:, 0] = 0
    weight = math.exp(logits[0, 1])
    expected = (numbers * (1 + 150_000 * weight) - 1) / weight
    zeros = torch.zeros(20, dtype=torch.int64)
    chosen = sample(logits, torch.ones(20), zeros, zeros)
    assert (chosen - expected).abs().max() <= 1


@pytest.mark.parametrize("keyed_by", ["seed", "position"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
def test_draws_follow_the_softmax(keyed_by, temperature):
    logits = torch.randn(31, generator=torch.Generator().manual_seed(11))
    same, numbers = torch.full((DRAWS,), 12345), torch.arange(DRAWS)
    seeds, positions = (numbers, same) if keyed_by == "seed" else (same, numbers)
    temperatures = torch.full((DRAWS,), temperature)
    chosen = sample(logits.expand(DRAWS, -1), temperatures, seeds, positions)
    observed = torch.bincount(chosen, minlength=31).double()
    expected = torch.softmax(logits.double() / temperature, -1) * DRAWS
    assert expected.min() > 5  # what the chi-square distribution needs
    assert ((observed - expected).square() / expected).sum() < CHI_SQUARE_30


def test_uniform_is_splitmix64():
    ends = [0, 1, 2, 2**31, 2**53 + 1, 2**62, 2**63 - 1]
    places = [0, 1, 63, 4095, 2**31]
    generator = torch.Generator().manual_seed(0)
    seeds = ends + torch.randint(2**63 - 1, (50,), generator=generator).tolist()
    pairs = [(seed, position) for seed in seeds for position in places]
    numbers = uniform(*torch.tensor(pairs).T)
    assert numbers.dtype == torch.float64
    assert numbers.tolist() == [splitmix64(seed, position) for seed, position in pairs]


@pytest.fixture(scope="module")
def grid():
    """Numbers of seeds 0 to 999 (down) at positions 0 to 999 (across)."""
    numbers = torch.arange(1000)
    return uniform(numbers.repeat_interleave(1000), numbers.repeat(1000)).view(1000, 1000)


def test_uniform_lies_in_the_half_open_unit_interval(grid):
    assert grid.min() >= 0
    assert grid.max() < 1
    assert grid.unique().numel() == grid.numel()


def test_uniform_has_the_mean_and_variance_of_one(grid):
    """Five standard errors of a million independent numbers."""
    assert abs(grid.mean() - 1 / 2) < 5 * (1 / 12 / grid.numel()) ** 0.5
    assert abs(grid.var() - 1 / 12) < 5 * (1 / 180 / grid.numel()) ** 0.5


def test_neighbouring_seeds_and_positions_are_uncorrelated(grid):
    limit = 5 / (999 * 999) ** 0.5
    assert abs(correlation(grid[:-1], grid[1:])) < limit
    assert abs(correlation(grid[:, :-1], grid[:, 1:])) < limit
    assert abs(correlation(grid[1:, :-1], grid[:-1, 1:])) < limit
    assert abs(correlation(grid[1:, 1:], grid[:-1, :-1])) < limit
