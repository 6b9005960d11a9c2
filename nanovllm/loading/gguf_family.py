"""What can be specific to a llama.cpp architecture in a GGUF file: `GgufFamily`.

llama.cpp's converter changes some tensors; a `Reading` undoes that. Imports no torch.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nanovllm.loading.gguf_header import MAX_SIZE, GGUFMetadata, GgufTensor
from nanovllm.options.validation import check_int


class Order(NamedTuple):
    """An order of a tensor's rows or columns in which the converter has swapped two levels.

    Those from `start` on are [blocks, n, inner, size] in the file and [blocks, inner, n, size] in
    transformers' tensor. n follows from how many there are.
    """

    inner: int
    size: int = 1
    """Neighbours that stay together."""
    blocks: int = 1
    start: int = 0

    def misfit(self, count: int) -> str:
        """Return how many rows or columns there must be; "" if there can be `count` of them."""
        rest = count - self.start
        unit = self.blocks * self.inner * self.size
        fits = rest > 0 and rest % unit == 0
        return "" if fits else f"must have {self.start} and a multiple of {unit}"

    def indices(self, count: int) -> npt.NDArray[np.int64]:
        """Return, for each of `count` rows or columns in transformers' order, its place in the
        file. They must fit.
        """
        moved = np.arange(self.start, count).reshape(self.blocks, -1, self.inner, self.size)
        return np.concatenate([np.arange(self.start), moved.swapaxes(1, 2).ravel()])

    def of_blocks(self, block_size: int) -> "Order | None":
        """Return the order of blocks of `block_size` neighbours; None if it cuts a block."""
        if self.size % block_size or self.start % block_size:
            return None
        return self._replace(size=self.size // block_size, start=self.start // block_size)


def rotary_pairs(num_heads: int) -> Order:
    """Return the order of the rows of q or k in which the two rows of a rotary pair are neighbours:
    llama.cpp's architecture llama, and those like it.
    """
    return Order(inner=2, blocks=num_heads)


class Reading(NamedTuple):
    """What reading does to the numbers of a tensor."""

    rows: Order | None = None
    columns: Order | None = None
    offset: float = 0.0
    """What is added to each number."""
    is_decay: bool = False
    """Whether the file has -exp(x) where transformers has x."""
    axis: int | None = None
    """Where a dimension of 1 is inserted, if the tensor has `axis` + 1 dimensions."""
    is_flat: bool = False
    """Whether transformers has one dimension, of all numbers."""

    def shaped(self, tensor: GgufTensor) -> GgufTensor:
        """Return a tensor with transformers' shape. Its bytes are the same."""
        if self.is_flat:
            return tensor._replace(shape=(math.prod(tensor.shape),))
        if self.axis is None or len(tensor.shape) != self.axis + 1:
            return tensor
        return tensor._replace(shape=(*tensor.shape[: self.axis], 1, *tensor.shape[self.axis :]))

    def misfit(self, tensor: GgufTensor) -> str:
        """Return what is wrong with a tensor that is to be read so; "" if nothing is."""
        if (len(tensor.shape) == 1 or self.is_flat) and tensor.type.block_size > 1:
            return f"has one dimension and type {tensor.type.name}, must be F32, F16 or BF16"
        if self.rows is not None and (rule := self.rows.misfit(tensor.shape[0])):
            return f"has {tensor.shape[0]} rows, {rule}"
        if self.columns is not None and (rule := self.columns.misfit(tensor.shape[-1])):
            return f"has {tensor.shape[-1]} columns, {rule}"
        return ""

    def moves_whole_blocks(self, block_size: int) -> bool:
        """Return whether the blocks of a tensor are transformers' numbers, in another order."""
        changed = self.offset or self.is_decay
        order = self.columns
        return not changed and (order is None or order.of_blocks(block_size) is not None)

    def values(self, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the numbers of some rows, whose order is right, as transformers has them."""
        if self.columns is not None:
            stored = stored[..., self.columns.indices(stored.shape[-1])]
        if self.is_decay:
            stored = np.log(-stored)
        return stored + np.float32(self.offset) if self.offset else stored


AS_STORED = Reading()


class GgufWeight(NamedTuple):
    """A tensor of the model."""

    tensor: GgufTensor
    """Its shape is transformers'."""
    reading: Reading = AS_STORED
    others: tuple[GgufTensor, ...] = ()
    """Tensors of the file, of the same shape, that follow it along `axis`."""
    axis: int = 0
    """The first dimension, or a new one after that."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, which is transformers'."""
        shape = self.tensor.shape
        number = 1 + len(self.others)
        if self.axis == 0:
            return number * shape[0], *shape[1:]
        return shape if number == 1 else (*shape[: self.axis], number, *shape[self.axis :])

    @property
    def blocks_shape(self) -> tuple[int, ...]:
        """The shape as bytes: [outputs, bytes of a row]."""
        *rows, columns = self.shape
        return *rows, self.tensor.type.row_bytes(columns)

    @property
    def has_blocks(self) -> bool:
        """Whether the bytes can be read, too, in transformers' order of rows and columns."""
        return self.reading.moves_whole_blocks(self.tensor.type.block_size)


_NO_NAMES: Mapping[str, str] = MappingProxyType({})
Fields = dict[str, Any]
"""Of a config.json."""


class GgufFamily(NamedTuple):
    """An architecture of llama.cpp."""

    architecture: str
    """transformers' name."""
    layers: str = "model.layers"
    """transformers' name of the list of layers."""
    modules: Mapping[str, str] = _NO_NAMES
    """A layer's modules beyond `gguf.MODULES`, by llama.cpp's name. {} stands for the number of an
    expert: such a tensor has the weights of all experts, one after the other."""
    per_head: frozenset[str] = frozenset()
    """Those of them, by llama.cpp's name, that have a part for each head, not for each expert."""
    is_latent: bool = False
    """Whether attention is latent: the heads have other sizes than what is kept of a token."""
    tensors: Mapping[str, str] = _NO_NAMES
    """Tensors with special names: those of a layer without blk.N., and without that of the list."""
    draft_tensors: Mapping[str, str] = _NO_NAMES
    """Tensors of the layer that drafts (MTP), which follows the others in the file: the names
    without blk.N. and mtp. No names: there is no such layer."""
    leaves_out_drafts: bool = False
    """Whether the blocks after the layers, which are for drafts, are left out."""
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
    fields: Callable[[GGUFMetadata, Fields], Fields] = lambda metadata, config: {}
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
"""Modules of a layer that has norms after attention and MLP, too."""
SHARED_EXPERT = {
    f"ffn_{name}_shexp": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")
}
EXPERT_SIZES = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
LOCAL_EXPERT_SIZES = {
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "intermediate_size",
}
SOFTCAP = {"final_logit_softcapping": "final_logit_softcapping"}


def has_tensor(metadata: GGUFMetadata, end: str) -> bool:
    """Return whether a tensor's name has this end."""
    return any(name.endswith(end) for name in metadata.tensors)


def windows(
    metadata: GGUFMetadata, config: Fields, interval: int, default: int = 0, first: int = 1
) -> Fields:
    """Return the window, null for none, and the type of each layer.

    Args:
        interval: without a pattern, every so many layers have full attention.
        default: the window, if the file has none.
        first: the number of the first layer; multiples of `interval` have full attention.
    """
    key = "attention.sliding_window"
    num_layers = config["num_hidden_layers"]
    window = metadata.setting(key, check_int, 0, MAX_SIZE, default=default)
    has_window = metadata.listed(f"{key}_pattern", num_layers, bool)
    if has_window is None:
        interval = metadata.setting(f"{key}_pattern", check_int, 0, MAX_SIZE, default=interval)
        layers = range(first, first + num_layers)
        has_window = [not interval or number % interval != 0 for number in layers]
    types = [
        "sliding_attention" if window and slides else "full_attention" for slides in has_window
    ]
    return {"sliding_window": window or None, "layer_types": types}


def theta_of_windows(metadata: GGUFMetadata, config: Fields, default: float) -> Fields:
    """Return rotary settings by type of layer: those with a window have no scaling."""
    theta = metadata.number("rope.freq_base_swa", default)
    return {
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_theta": theta},
        }
    }


def rope_sections(metadata: GGUFMetadata, config: Fields) -> Fields:
    """Return the rotary settings with how many pairs rotate by a picture's time, row and column."""
    key = "rope.dimension_sections"
    sections = metadata.own(key)
    if sections is None:
        return {}
    is_listed = isinstance(sections, list) and len(sections) in (3, 4)
    if not is_listed or any(type(size) is not int or not 0 <= size < 2**12 for size in sections):
        raise metadata.unsupported(key, sections, "3 or 4 sizes")
    return {"rope_parameters": {**config["rope_parameters"], "mrope_section": sections[:3]}}


def dense_layers(metadata: GGUFMetadata, config: Fields) -> int:
    """Return how many of the first layers have an MLP in place of experts."""
    key = "leading_dense_block_count"
    num_layers = config["num_hidden_layers"]
    found: int = metadata.setting(key, check_int, 0, num_layers, default=0)
    return found


def without_drafts(metadata: GGUFMetadata, config: Fields) -> Fields:
    """Return the number of layers: the last blocks may be for drafts."""
    num_blocks = config["num_hidden_layers"]
    drafting = metadata.setting("nextn_predict_layers", check_int, 0, num_blocks - 1, default=0)
    return {"num_hidden_layers": num_blocks - drafting}
