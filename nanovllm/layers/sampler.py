"""Turns logits into token ids, each row with its own parameters.

A token's weight is exp((logit - largest logit) / temperature); 0 if a filter leaves it out. A draw
takes one uniform number and inverts the cumulative sum of the weights, chunk by chunk. top_k and
top_p become a threshold on the logits. It is found without sorting the vocabulary, because the n
largest logits of a row lie in the n chunks with the largest maxima. In plain torch, rows are
grouped on the host by the work that they need, so that one row's filters cost the other rows no
time. A kernel needs no groups: it gives each row its own work.
"""

import dataclasses
from collections.abc import Sequence as Seq

import torch
from torch.nn.functional import pad

from nanovllm.kernels.torch_kernels import TORCH, Kernels
from nanovllm.layers.sampling_tensors import SamplingTensors
from nanovllm.options.sampling_params import GREEDY_BELOW, SamplingParams

CHUNK = 128
"""Tokens in a chunk. A search over the vocabulary first chooses a chunk, then a token in it."""
NO_TOKEN = -1
"""Marks the token of a row whose logits are not a distribution: some are NaN or +inf, or all are
-inf. Then the largest logit is not finite, where NaN counts as the largest."""
RULED_OUT = -2  # stands for the token of a row whose logits were a distribution before the rules
_SPARE = 8  # candidates in addition to top_k, so that logits equal to the k-th are candidates too
_TOP_P_CANDIDATES = 256
"""Candidates for top_p without top_k. A row that keeps more tokens than that is sorted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling(SamplingTensors):
    """How one call of `draw` samples R rows: their parameters and positions, and flags of the host.

    The first two flags save work. They change no token, so True is always correct.
    """

    positions: torch.Tensor  # [R] int64, the position of the new token in its sequence
    any_min_p: bool = True  # whether some row has a min_p above 0
    any_top_p_of_all: bool = True  # whether some row has a top_p and a top_k that keeps all tokens
    any_greedy: bool = False  # whether some row may have a temperature below GREEDY_BELOW
    kernels: Kernels = TORCH


def draw_by_group(
    logits: torch.Tensor, sampling: Sampling, all_params: Seq[SamplingParams]
) -> torch.Tensor:
    """Do what `draw` does: rows with the same kind of filters in one call each.

    Args:
        logits: [R, vocab_size].
        all_params: of each row, on the host.
    """
    if sampling.kernels.sample is not None:
        return draw(logits, sampling)
    groups: dict[str, list[int]] = {"greedy": [], "plain": [], "top_k": [], "top_p": []}
    for index, params in enumerate(all_params):
        kind = "plain"
        if params.is_greedy:
            kind = "greedy"
        elif 0 < params.top_k < logits.shape[-1]:
            kind = "top_k"
        elif params.top_p < 1.0:
            kind = "top_p"
        groups[kind].append(index)
    tokens = torch.empty_like(sampling.positions)
    if greedy := groups.pop("greedy"):
        rows = torch.tensor(greedy).to(logits.device, non_blocking=True)
        tokens[rows] = sampling.kernels.greedy(logits[rows])
    max_top_k = max((all_params[index].top_k for index in groups["top_k"]), default=0)
    num_candidates = {"plain": 0, "top_k": max_top_k + _SPARE, "top_p": _TOP_P_CANDIDATES}
    for kind, group in groups.items():
        if group:
            rows = torch.tensor(group).to(logits.device, non_blocking=True)
            part = dataclasses.replace(
                sampling.take(rows),
                any_min_p=any(all_params[index].min_p > 0 for index in group),
                any_top_p_of_all=kind == "top_p",
            )
            group_logits = logits if len(group) == len(all_params) else logits[rows]
            tokens[rows] = draw(group_logits, part, num_candidates[kind])
    return tokens


def draw(logits: torch.Tensor, sampling: Sampling, num_candidates: int = 0) -> torch.Tensor:
    """Draw a token for each row: temperature, then min_p, then top_k, then top_p (vLLM's order).

    Args:
        logits: [R, vocab_size], any float dtype.
        num_candidates: 0 if no row has a top_k or top_p. Else how many of the largest logits to
            examine first, at least the largest top_k below vocab_size. A row that may keep more
            tokens than these is sorted, so the number changes the speed and no token.
            `Kernels.sample` ignores it.

    Returns:
        [R] int64, NO_TOKEN where the logits are not a distribution. A row's token depends only
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


def mark_ruled_out(tokens: torch.Tensor, likeliest: torch.Tensor) -> torch.Tensor:
    """Return `tokens` [S], but RULED_OUT for NO_TOKEN where the rules are the reason.

    Args:
        likeliest: [S], what `Kernels.greedy` returns of the logits before the rules.
    """
    return torch.where((tokens < 0) & (likeliest >= 0), RULED_OUT, tokens)


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


def thresholds_of(
    values: torch.Tensor, largest: torch.Tensor, total: torch.Tensor | None, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's threshold, and whether `values` were enough to find it: both [R].

    A row's threshold is the smallest logit that top_k and top_p keep. All equal logits are kept
    too. `values` are enough if they contain every kept logit and every logit that counts for top_p.

    Args:
        values: [R, n], each row's largest logits in descending order.
        total: [R], the weight of the whole vocabulary, for rows without top_k.
    """
    last = (sampling.top_ks - 1).clamp(max=values.shape[-1] - 1)
    kth = values.gather(1, last[:, None])
    smallest = values[:, -1]
    in_top_k = values >= kth
    weights = weights_of(values, largest, sampling).double() * in_top_k
    mass = weights.cumsum(-1)
    whole = mass[:, -1]
    if total is not None:
        whole = torch.where(sampling.top_ks > values.shape[-1], total, whole)
    before = mass - weights
    kept = in_top_k & (before < sampling.top_ps[:, None].double() * whole[:, None])
    # `kept` is empty if top_p underflows or the row is not a distribution.
    place = (kept.sum(-1, keepdim=True) - 1).clamp_(min=0)
    thresholds = values.gather(1, place)[:, 0]
    # If all candidates after the k-th equal it, more equal logits may lie outside `values`, and
    # `whole` would lack their weight.
    ties_cut = (sampling.top_ks <= values.shape[-1]) & (smallest >= kth[:, 0])
    return thresholds, (smallest < thresholds) & ~ties_cut


def weights_of(
    x: torch.Tensor,
    largest: torch.Tensor,
    sampling: Sampling,
    thresholds: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return exp((x - largest) / temperature) in float32.

    It is 0 for tokens that min_p excludes, or that are below the row's threshold [R], if given.
    """
    shape = (-1, *[1] * (x.ndim - 1))
    weights = x.float().sub(largest.view(shape))
    weights.div_(sampling.temperatures.view(shape)).exp_()
    if sampling.any_min_p:  # min_p is relative to the most likely token, whose weight is 1
        weights.masked_fill_(weights < sampling.min_ps.view(shape), 0.0)
    if thresholds is not None:
        weights.masked_fill_(x < thresholds.view(shape), 0.0)
    return weights


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
