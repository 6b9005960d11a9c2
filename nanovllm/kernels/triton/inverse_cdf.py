"""Inverse transform sampling: a uniform number, weights of logits, the token where they meet.

Functions that the sampling kernels call; launches no kernel.
"""

import triton
import triton.language as tl


@triton.jit
def weigh(x, largest, scale, min_p):
    """Return the weights of logits x, relative to the largest; 0 for what min_p leaves out."""
    weights = tl.exp((x.to(tl.float32) - largest) * scale)
    return tl.where(weights < min_p, 0.0, weights)


@triton.jit
def invert(weights, target):
    """Return the first place at which the sum of `weights` passes `target`, and the sum before it.

    Where rounding leads past the end, it is the last place with any weight; never one without.
    """
    places = tl.arange(0, weights.shape[0])
    sums = tl.cumsum(weights)
    last = tl.max(tl.where(weights > 0, places, 0))
    place = tl.min(tl.where((weights > 0) & (sums > target), places, last))
    return place, tl.sum(tl.where(places < place, weights, 0.0))


@triton.jit
def uniform(seed, position):
    """`layers.sampler.uniform` of one pair."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    mixed = _mix(_mix(seed.to(tl.uint64) + golden) + (position.to(tl.uint64) + 1) * golden)
    return (mixed >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2**-53


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)
