"""A model in one GGUF file: its settings as a config.json has them, and its weights under the names
and in the row order of transformers.

Reads tensors one by one. Knows no module and no rank. Imports no torch.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nanovllm.checkpoint.gguf_config import ROPE_FACTORS, Metadata, make_config, tokenizer_settings
from nanovllm.checkpoint.gguf_header import GgufTensor, read_gguf_header
from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.options.validation import check_int, shown

_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""A decoder layer's modules, by llama.cpp's name."""
_WHOLE_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class GgufWeight(NamedTuple):
    """A tensor of the model."""

    tensor: GgufTensor
    num_heads: int
    """0: the rows are in transformers' order. Else the rows of each of so many heads are in
    llama.cpp's order: the two rows of a rotary pair are neighbours."""

    @property
    def blocks_shape(self) -> tuple[int, ...]:
        """The shape as bytes: [outputs, bytes of a row]."""
        *rows, columns = self.tensor.shape
        return *rows, self.tensor.type.row_bytes(columns)


class GgufModel(NamedTuple):
    """What the header of a file says of its model."""

    config: dict[str, Any]
    """As in a config.json. `eos_token_id` lists all tokens that end a text."""
    weights: Mapping[str, GgufWeight]
    """By transformers' name; tensors that it does not have keep their own."""
    tokenizer: Mapping[str, Any]
    """As `tokenizer_settings` returns it; empty if there are no tokens."""


def is_gguf(file: Path) -> bool:
    """Return whether `file` is named as a GGUF file is."""
    return file.suffix == ".gguf"


def read_gguf(file: Path) -> GgufModel:
    """Return the model in GGUF `file`, which must be a regular file.

    Raises:
        CheckpointError: the file is not sound, or a setting is missing or invalid.
        UnsupportedModelError: the architecture, a setting or a tensor's type is not supported.
    """
    try:
        status = file.stat()
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
    return _read_gguf(file, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _read_gguf(file: Path, size: int, mtime_ns: int) -> GgufModel:
    header = read_gguf_header(file)
    metadata = Metadata(file, header)
    if metadata.values.get("split.count", 1) not in (0, 1):
        raise UnsupportedModelError(
            f"{file} is one part of a split model: merge the parts with llama.cpp's "
            "llama-gguf-split --merge"
        )
    tokenizer = tokenizer_settings(metadata)
    return GgufModel(make_config(metadata), _weights(metadata), tokenizer)


def read_rows(file: Path, weight: GgufWeight, rows: slice, *, raw: bool) -> npt.NDArray[Any]:
    """Return `rows` of a weight of `file`, in transformers' order.

    Args:
        raw: return the blocks as bytes, [rows, bytes of a row]; else float32 of the tensor's shape.
    """
    import gguf

    tensor = weight.tensor
    num_rows = tensor.shape[0]
    stored = np.memmap(file, np.uint8, "r", tensor.offset, (num_rows, tensor.num_bytes // num_rows))
    blocks = stored[rows] if not weight.num_heads else stored[_order(weight)[rows]]
    if raw:
        return np.array(blocks)
    with np.errstate(invalid="ignore", over="ignore"):  # a NaN in a weight is the model's matter
        values = gguf.dequantize(blocks, gguf.GGMLQuantizationType[tensor.type.name])
    return np.array(values, np.float32).reshape(-1, *tensor.shape[1:])


def _order(weight: GgufWeight) -> npt.NDArray[np.int64]:
    """Return, for each row in transformers' order, its number in the file."""
    rows = np.arange(weight.tensor.shape[0]).reshape(weight.num_heads, -1, 2)
    return rows.swapaxes(1, 2).ravel()


def _weights(metadata: Metadata) -> dict[str, GgufWeight]:
    heads = metadata.setting("attention.head_count", check_int, 1)
    kv_heads = metadata.setting("attention.head_count_kv", check_int, 1, default=heads)
    permuted = {"attn_q": heads, "attn_k": kv_heads} if metadata.architecture == "llama" else {}
    weights: dict[str, GgufWeight] = {}
    for name, tensor in metadata.tensors.items():
        if name == ROPE_FACTORS:
            continue
        named, module = _WHOLE_MODEL.get(name, name), ""
        parts = name.split(".")
        if len(parts) == 4 and parts[0] == "blk" and parts[2] in _MODULES:
            module = parts[2]
            named = f"model.layers.{parts[1]}.{_MODULES[module]}.{parts[3]}"
        num_heads = permuted.get(module, 0)
        wrong = None
        if named in weights:
            wrong = f"is the second tensor for {shown(named)}"
        elif len(tensor.shape) > 2:
            wrong = f"has {len(tensor.shape)} dimensions; 1 and 2 are supported"
        elif len(tensor.shape) == 1 and tensor.type.block_size > 1:
            wrong = f"has one dimension and type {tensor.type.name}, must be F32, F16 or BF16"
        elif num_heads and tensor.shape[0] % (2 * num_heads):
            wrong = f"has {tensor.shape[0]} rows, which are no pairs of {num_heads} heads"
        if wrong:
            raise CheckpointError(f"{metadata.file}: tensor {shown(name)} {wrong}")
        weights[named] = GgufWeight(tensor, num_heads)
    return weights
