"""The logits from which a token was drawn: behind rules, temperature, min_p, top_k and top_p.

vLLM's processed logits. Knows no request.
"""

import dataclasses

import torch

from nanovllm.layers.sampling_filters import Sampling, thresholds_of, weights_of
from nanovllm.options.sampling_params import GREEDY_BELOW


def processed_logits(
    logits: torch.Tensor, tokens: torch.Tensor, sampling: Sampling
) -> torch.Tensor:
    """Return logits / temperature, and -inf for the tokens that the row's filters leave out.

    A greedy row has neither temperature nor filters. A drawn token is never left out: rounding may
    put a token at the edge of top_p on either side.

    Args:
        logits: [L, vocab_size], behind the rules.
        tokens: [L], the drawn tokens.
        sampling: of these rows.

    Returns:
        [L, vocab_size] float32, a new tensor.
    """
    scores = logits.float().clone()
    greedy = sampling.temperatures < GREEDY_BELOW
    temperatures = torch.where(greedy, 1.0, sampling.temperatures)
    sampling = dataclasses.replace(sampling, temperatures=temperatures)
    own = scores.gather(1, tokens[:, None])
    largest = scores.amax(-1)
    excluded = torch.zeros_like(scores, dtype=torch.bool)
    filtered = (sampling.top_ks < scores.shape[-1]) | (sampling.top_ps < 1) | (sampling.min_ps > 0)
    rows = (filtered & ~greedy).nonzero()[:, 0]
    if len(rows):
        excluded[rows] = _excluded(scores[rows], largest[rows], own[rows], sampling.take(rows))
    return scores.div_(temperatures[:, None]).masked_fill_(excluded, -torch.inf)


def _excluded(
    scores: torch.Tensor, largest: torch.Tensor, own: torch.Tensor, sampling: Sampling
) -> torch.Tensor:
    """Return which tokens top_k, top_p and min_p leave out: [R, vocab_size]."""
    weights = weights_of(scores, largest, sampling)
    total = weights.sum(-1, dtype=torch.float64)
    values = scores.sort(descending=True).values
    thresholds, _ = thresholds_of(values, largest, total, sampling)
    keeps_all = (sampling.top_ks >= scores.shape[-1]) & (sampling.top_ps >= 1)
    thresholds = thresholds.masked_fill(keeps_all, -torch.inf)
    below = (scores < thresholds[:, None]) | (weights < sampling.min_ps[:, None])
    return below & (scores != own)
