"""How rows are sampled, and what top_k, top_p and min_p leave of their logits."""

import dataclasses

import torch

from nanovllm.kernels.torch_kernels import TORCH, Kernels
from nanovllm.layers.sampling_tensors import SamplingTensors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling(SamplingTensors):
    """How one call of `draw` samples R rows: their parameters and positions, and flags of the host.

    The first two flags save work. They change no token, so True is always correct.
    """

    positions: torch.Tensor
    """[R] int64, the position of the new token in its sequence."""
    any_min_p: bool = True
    """Whether some row has a min_p above 0."""
    any_top_p_of_all: bool = True
    """Whether some row has a top_p and a top_k that keeps all tokens."""
    any_greedy: bool = False
    """Whether some row may have a temperature below GREEDY_BELOW."""
    kernels: Kernels = TORCH


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
    kth, smallest = values.gather(1, last[:, None]), values[:, -1]
    in_top_k = values >= kth
    weights = weights_of(values, largest, sampling).double() * in_top_k
    mass = weights.cumsum(-1)
    whole = mass[:, -1]
    if total is not None:
        whole = torch.where(sampling.top_ks > values.shape[-1], total, whole)
    before = mass - weights
    kept = in_top_k & (before < sampling.top_ps[:, None].double() * whole[:, None])
    # `kept` is empty if top_p underflows or the row is no distribution.
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
