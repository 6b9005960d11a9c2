"""`Head`: what the network of a draft head computes, and how its target stores what it reads."""

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import nn

from nanovllm.attention.batch import Batch
from nanovllm.models.decoder import Decoder, DecoderForCausalLM, DecoderLayer


class Head(nn.Module):
    """The network of a draft head. Its position i takes the token of position i + 1.

    Its methods are called in their order here, after its weights are loaded.
    """

    features_size: int
    """Numbers of a token's hidden states of the target."""

    def share(self, target: DecoderForCausalLM) -> torch.Tensor | None:
        """Use what the head lacks of `target`, which stays the target's own.

        Returns:
            The target's token, int64, of each draft id; None if they are the same.
        """
        raise NotImplementedError

    def capture(self, target: DecoderForCausalLM, features: torch.Tensor) -> None:
        """Let the target store hidden states in `features`, [slots, features_size], from its next
        forward pass on.
        """
        raise NotImplementedError

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


def capture_features(
    model: DecoderForCausalLM, layer_ids: Sequence[int], pool: torch.Tensor
) -> None:
    """Store what enters the layers `layer_ids` in `pool`, from the next forward pass on.

    Args:
        layer_ids: from 0 on, each one once.
        pool: [slots, len(layer_ids) * hidden_size], a row for each slot of the KV cache. The
            layers' hidden states lie side by side in the order of `layer_ids`.
    """
    parts = pool.chunk(len(layer_ids), dim=1)
    for layer_id, part in zip(layer_ids, parts, strict=True):
        layer = model.model.layers[layer_id]
        assert isinstance(layer, DecoderLayer)
        kernels = layer.input_layernorm.kernels
        layer.store_input = functools.partial(kernels.store_rows, part)


def capture_output(decoder: Decoder, pool: torch.Tensor) -> None:
    """Store what leaves `decoder`, after its last norm, in `pool`, from the next forward pass on.

    Its last layer then computes all tokens of a batch, not only those that need logits.

    Args:
        pool: [slots, hidden_size], a row for each slot of the KV cache.
    """
    forward = decoder.forward
    kernels = decoder.norm.kernels

    def storing(batch: Batch) -> torch.Tensor:
        hidden = forward(dataclasses.replace(batch, output_indices=None))
        kernels.store_rows(pool, hidden, batch.slot_mapping)
        return hidden if batch.output_indices is None else hidden[batch.output_indices]

    decoder.forward = storing  # type: ignore[method-assign]
