"""Hidden states for a draft head, which the target's layers store."""

import dataclasses
import functools
from collections.abc import Sequence

import torch

from nanovllm.attention.batch import Batch
from nanovllm.models.decoder import Decoder, DecoderForCausalLM, DecoderLayer


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
    """Store what leaves `decoder`, behind its last norm, in `pool`, from the next forward pass on.

    Its last layer then computes all tokens of a batch, not only those that need logits.

    Args:
        pool: [slots, hidden_size], a row for each slot of the KV cache.
    """
    forward, kernels = decoder.forward, decoder.norm.kernels

    def storing(batch: Batch) -> torch.Tensor:
        hidden = forward(dataclasses.replace(batch, output_indices=None))
        kernels.store_rows(pool, hidden, batch.slot_mapping)
        return hidden if batch.output_indices is None else hidden[batch.output_indices]

    decoder.forward = storing  # type: ignore[method-assign]
