"""`Head`: what the network of a draft head computes. Knows no sequence and no drafting."""

import torch
from torch import nn

from nanovllm.attention.batch import Batch


class Head(nn.Module):
    """The network of a draft head. Its position i takes the token of position i + 1."""

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [T, hidden_size] contiguous of `features` [T, features_size]."""
        raise NotImplementedError

    def forward(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        """Write the batch's KV; return the hidden states [O, hidden_size] that are fed back.

        Args:
            hidden: [T, hidden_size] contiguous, from `combine` or fed back. The kernels overwrite
                it.
        """
        raise NotImplementedError

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return logits [N, V] of what `forward` returned; None except on rank 0."""
        raise NotImplementedError
