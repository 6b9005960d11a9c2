"""`GgufFamily`: what an architecture of llama.cpp can have of its own in a GGUF file, and what
several of them have.

Knows none of them. Imports no torch.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from nanovllm.checkpoint.gguf_metadata import Metadata
from nanovllm.checkpoint.gguf_reading import Reading

_NO_NAMES: Mapping[str, str] = MappingProxyType({})
Fields = dict[str, Any]
"""Of a config.json."""


class GgufFamily(NamedTuple):
    """An architecture of llama.cpp."""

    architecture: str
    """transformers' name."""
    modules: Mapping[str, str] = _NO_NAMES
    """A layer's modules beyond `gguf.MODULES`, by llama.cpp's name. {} stands for the number of an
    expert: such a tensor has the weights of all experts, one behind the other."""
    tensors: Mapping[str, str] = _NO_NAMES
    """Tensors with names of their own: those of a layer without blk.N. and model.layers.N."""
    draft_tensors: Mapping[str, str] = _NO_NAMES
    """Tensors of the layer that drafts (MTP), which follows the others in the file: the names
    without blk.N. and mtp. No names: there is no such layer."""
    permuted: bool = False
    """Whether the rows of q and k are in llama.cpp's order: see `rotary_pairs`."""
    norm_offset: float = 0.0
    """What is added to the weights of norms."""
    numbers: Mapping[str, str] = _NO_NAMES
    """Fields of a config.json, by the key that has their number. Without it the family's default
    holds."""
    sizes: Mapping[str, str] = _NO_NAMES
    """The same of sizes, which must be there."""
    per_layer: frozenset[str] = frozenset()
    """The sizes that may be lists, a number for each layer. The common fields have the largest."""
    partial_rotation: bool = False
    """Whether a part of a head may rotate."""
    fields: Callable[[Metadata, Fields], Fields] = lambda metadata, config: {}
    """Returns the family's own fields; gets the common ones."""
    readings: Callable[[Fields], Mapping[str, Reading]] = lambda config: {}
    """Returns how tensors are read, by llama.cpp's name of their module; gets all fields."""
    neutral: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
    """Keys that are not read, with the values that are supported. Without the key one is meant."""


SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Modules of a layer that has norms behind attention and MLP, too."""
EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
EXPERT_SIZES = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
SOFTCAP = {"final_logit_softcapping": "final_logit_softcapping"}
