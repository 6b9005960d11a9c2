"""Draws for rows of different parameters.

In plain torch, groups the rows on the host by the work that they need, so that one row's filters
cost the other rows no time. A kernel needs no groups: it gives each row its own work.
"""

import dataclasses
from collections.abc import Sequence as Seq

import torch

from nanovllm.layers.sampler import draw
from nanovllm.layers.sampling_filters import Sampling
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.utils.transfer import upload

_SPARE = 8
"""Candidates in addition to top_k, so that logits equal to the k-th are candidates too."""
_TOP_P_CANDIDATES = 256
"""Candidates for top_p without top_k. A row that keeps more tokens than that is sorted."""


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
        rows = upload(greedy, logits.device)
        tokens[rows] = sampling.kernels.greedy(logits[rows])
    max_top_k = max((all_params[index].top_k for index in groups["top_k"]), default=0)
    num_candidates = {"plain": 0, "top_k": max_top_k + _SPARE, "top_p": _TOP_P_CANDIDATES}
    for kind, group in groups.items():
        if group:
            rows = upload(group, logits.device)
            part = dataclasses.replace(
                sampling.take(rows),
                any_min_p=any(all_params[index].min_p > 0 for index in group),
                any_top_p_of_all=kind == "top_p",
            )
            group_logits = logits if len(group) == len(all_params) else logits[rows]
            tokens[rows] = draw(group_logits, part, num_candidates[kind])
    return tokens
