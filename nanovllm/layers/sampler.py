"""Turns logits into token ids, each row with its own parameters. Knows no requests.

A token's weight is exp((logit - largest logit) / temperature); 0 if a filter leaves it out. A draw
takes one uniform number and inverts the cumulative sum of the weights, chunk by chunk. top_k and
top_p become a threshold on the logits. It is found without sorting the vocabulary, because the n
largest logits of a row lie in the n chunks with the largest maxima.
"""

import dataclasses

import torch
from torch.nn.functional import pad

from nanovllm.layers.sampling_filters import Sampling, thresholds_of, weights_of
from nanovllm.options.sampling_params import GREEDY_BELOW

CHUNK = 128
"""Tokens in a chunk. A search over the vocabulary first chooses a chunk, then a token in it."""
NO_TOKEN = -1
"""Stands for the token of a row whose logits are no distribution: some are NaN or +inf, or all are
-inf. Then the largest logit is not finite, where NaN counts as the largest."""


def draw(logits: torch.Tensor, sampling: Sampling, num_candidates: int = 0) -> torch.Tensor:
    """Draw a token for each row: temperature, then min_p, then top_k, then top_p (vLLM's order).

    Args:
        logits: [R, vocab_size], any float dtype.
        num_candidates: 0 if no row has a top_k or top_p. Else how many of the largest logits to
            examine first, at least the largest top_k below vocab_size. A row that may keep more
            tokens than these is sorted, so the number changes the speed and no token.
            `Kernels.sample` ignores it.

    Returns:
        [R] int64, NO_TOKEN for a row whose logits are no distribution. A row's token depends only
        on its own logits and sampling parameters.
    """
    if sampling.kernels.sample is not None:
        return sampling.kernels.sample(
            logits,
            sampling.temperatures,
            sampling.seeds,
            sampling.positions,
            sampling.top_ks,
            sampling.top_ps,
            sampling.min_ps,
        )
    if sampling.any_greedy:
        temperatures = sampling.temperatures.clamp(min=GREEDY_BELOW)
        sampled = dataclasses.replace(sampling, temperatures=temperatures, any_greedy=False)
        drawn = draw(logits, sampled, num_candidates)
        largest = sampling.kernels.greedy(logits)
        return torch.where(sampling.temperatures < GREEDY_BELOW, largest, drawn)
    vocab_size = logits.shape[-1]
    if vocab_size % CHUNK:
        logits = pad(logits, (0, -vocab_size % CHUNK), value=-torch.inf)
    chunks = logits.view(len(logits), -1, CHUNK)
    maxima = chunks.amax(-1)
    largest = maxima.amax(-1).float()
    if num_candidates == 0:
        sums = weights_of(chunks, largest, sampling).sum(-1, dtype=torch.float64)
        return _checked(_invert(chunks, sums, largest, None, sampling), largest)

    num_candidates = min(num_candidates, vocab_size)
    total = None
    if sampling.any_top_p_of_all:
        sums = weights_of(chunks, largest, sampling).sum(-1, dtype=torch.float64)
        total = sums.sum(-1, dtype=torch.float64)
    chunk_ids = maxima.topk(min(num_candidates, maxima.shape[-1])).indices.sort(-1).values
    near = chunks.gather(1, chunk_ids[..., None].expand(-1, -1, CHUNK))
    values = near.flatten(1).topk(num_candidates).values
    thresholds, complete = thresholds_of(values, largest, total, sampling)
    sums = weights_of(near, largest, sampling, thresholds).sum(-1, dtype=torch.float64)
    chosen = _invert(near, sums, largest, thresholds, sampling)
    tokens = chunk_ids.gather(1, chosen[:, None] // CHUNK)[:, 0] * CHUNK + chosen % CHUNK
    if num_candidates < vocab_size:
        spilled = (~complete).nonzero()[:, 0]
        if len(spilled):
            tokens[spilled] = draw(logits[spilled, :vocab_size], sampling.take(spilled), vocab_size)
    return _checked(tokens, largest)


def _checked(tokens: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Return `tokens` [R], but NO_TOKEN where the row's largest logit is not finite."""
    return torch.where(largest.isfinite(), tokens, NO_TOKEN)


def _invert(
    chunks: torch.Tensor,
    sums: torch.Tensor,
    largest: torch.Tensor,
    thresholds: torch.Tensor | None,
    sampling: Sampling,
) -> torch.Tensor:
    """Return [R]: the index in [chunks * CHUNK] where the cumulative sum of the weights exceeds
    the row's uniform number times the sum of all.

    Args:
        sums: [R, chunks], the sums of each chunk's kept weights.
    """
    sums = sums.double()
    mass = sums.cumsum(-1)
    target = uniform(sampling.seeds, sampling.positions)[:, None] * mass[:, -1:]
    chunk = torch.searchsorted(mass, target, right=True).clamp_(max=mass.shape[-1] - 1)
    chunk_sum = sums.gather(1, chunk)
    # Rounding can give a share below 0, which would choose a first token of weight 0.
    share = ((target - mass.gather(1, chunk) + chunk_sum) / chunk_sum).clamp_(min=0.0)
    chosen = chunks.gather(1, chunk[..., None].expand(-1, 1, CHUNK))
    inner = weights_of(chosen, largest, sampling, thresholds)[:, 0].double().cumsum(-1)
    place = torch.searchsorted(inner, share * inner[:, -1:], right=True)
    # Rounding can choose an index past the last token with a weight above 0.
    place = place.minimum((inner < inner[:, -1:]).sum(-1, keepdim=True))
    return (chunk * CHUNK + place)[:, 0]


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return a float64 number in [0, 1) for each (seed, position).

    Hashes the seed, then the position, with SplitMix64 (Steele, Lea and Flood, 2014).
    """
    mixed = _mix(_mix(seeds + _GOLDEN) + (positions + 1) * _GOLDEN)
    return (mixed >> 11 & 2**53 - 1).double() * 2.0**-53


def _mix(x: torch.Tensor) -> torch.Tensor:
    # int64 multiplication wraps, as the algorithm needs. >> is arithmetic: mask off the sign bits.
    x = (x ^ (x >> 30 & 2**34 - 1)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ (x >> 27 & 2**37 - 1)) * (0x94D049BB133111EB - 2**64)
    return x ^ (x >> 31 & 2**33 - 1)


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
