"""Inverse transform sampling: a uniform number, the weights of logits, and the token they select.

Functions for the sampling kernels. Launches no kernel.
"""

import triton
import triton.language as tl


@triton.jit
def weigh(x, largest, scale, min_p):
    """Return exp((x - largest) * scale) in float32, the weights of logits x; 0 below min_p.

    `largest` is the largest logit of the row, so min_p compares with the largest weight, 1.
    """
    weights = tl.exp((x.to(tl.float32) - largest) * scale)
    return tl.where(weights < min_p, 0.0, weights)


@triton.jit
def invert(weights, target):
    """Return the first index whose cumulative weight exceeds `target`, and the sum before it.

    The index always has a weight above 0. If rounding makes `target` exceed the whole sum, return
    the last such index.
    """
    indices = tl.arange(0, weights.shape[0])
    sums = tl.cumsum(weights)
    last = tl.max(tl.where(weights > 0, indices, 0))
    index = tl.min(tl.where((weights > 0) & (sums > target), indices, last))
    return index, tl.sum(tl.where(indices < index, weights, 0.0))


@triton.jit
def uniform(seed, position):
    """Return the float64 in [0, 1) that `layers.sampler.uniform` returns for one row."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    mixed = _mix(_mix(seed.to(tl.uint64) + golden) + (position.to(tl.uint64) + 1) * golden)
    return (mixed >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2**-53


@triton.jit
def _mix(x):
    """Return the bits of x, mixed as in SplitMix64 (Steele et al., 2014)."""
    x = (x ^ (x >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)
