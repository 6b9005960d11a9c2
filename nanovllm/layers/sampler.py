"""From logits to token ids: greedy, or one uniform number a row through the inverse cumulative sum.

Knows nothing of requests: a row is its logits, temperature, seed and position.
"""

import torch

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow."""


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Choose a token for each row.

    Args:
        logits: [R, vocab_size], any float dtype.
        temperatures: [R] float32.
        seeds: [R] int64.
        positions: [R] int64, position of the token to be chosen in its sequence.

    Returns:
        [R] int64 token ids. A row's choice depends on nothing but its own arguments.
    """
    wide = logits.float()
    greedy = wide.argmax(dim=-1)
    rows = (temperatures >= GREEDY_BELOW).nonzero().flatten()
    if rows.numel() == 0:
        return greedy
    wide = wide[rows]
    scaled = (wide - wide.amax(-1, keepdim=True)) / temperatures[rows, None]
    cumulative = scaled.double().exp_().cumsum_(dim=-1)
    target = uniform(seeds[rows], positions[rows])[:, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, target, right=True).flatten()
    return greedy.index_copy(0, rows, chosen.clamp_(max=logits.shape[-1] - 1))


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return float64 numbers in [0, 1), one for each (seed, position): SplitMix64 (Steele et al.
    2014) of both.
    """
    mixed = _mix(_mix(seeds + _GOLDEN) + (positions + 1) * _GOLDEN)
    return (mixed >> 11 & 2**53 - 1).double() * 2.0**-53


def _mix(x: torch.Tensor) -> torch.Tensor:
    # int64 multiplication wraps, as the algorithm wants; >> is arithmetic, so the sign bits are
    # masked off
    x = (x ^ (x >> 30 & 2**34 - 1)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ (x >> 27 & 2**37 - 1)) * (0x94D049BB133111EB - 2**64)
    return x ^ (x >> 31 & 2**33 - 1)


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
