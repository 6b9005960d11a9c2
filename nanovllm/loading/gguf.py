"""A model in one GGUF file: its settings as a config.json has them, and its weights under the names
and in the row order of transformers.

Reads tensors one by one. Imports no torch.
"""

import functools
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.loading.gguf_config import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, make_config
from nanovllm.loading.gguf_families import family_of
from nanovllm.loading.gguf_family import (
    AS_STORED,
    GgufFamily,
    GgufWeight,
    Reading,
    rotary_pairs,
)
from nanovllm.loading.gguf_header import GGUFMetadata, GgufTensor, read_gguf_header
from nanovllm.loading.gguf_tokenizer import tokenizer_settings
from nanovllm.loading.mmproj import ARCHITECTURE, read_mmproj
from nanovllm.options.validation import shown

SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""Keys of `general.sampling`, by their names in a generation_config.json."""
MODULES = {
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
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
"""A decoder layer's modules, by llama.cpp's name. gguf_families.py has those of single families."""
_WHOLE_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


_IN_CONFIG = (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS)
_MAX_WEIGHTS = 2**17
"""Weights of a model, each expert's counted. One of 94 layers and 128 experts has 36,500."""


class GgufModel(NamedTuple):
    """What the header of a file says of its model."""

    config: dict[str, Any]
    """As in a config.json. `eos_token_id` lists all tokens that end a text. See `read_mmproj`."""
    weights: Mapping[str, GgufWeight]
    """By transformers' name; tensors that it does not have keep their own."""
    tokenizer: Mapping[str, Any]
    """As `tokenizer_settings` returns it; empty if there are no tokens."""
    sampling: Mapping[str, Any]
    """What the file recommends, as in a generation_config.json."""


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
    metadata = GGUFMetadata(file, header)
    if metadata.values.get("split.count", 1) not in (0, 1):
        raise UnsupportedModelError(
            f"{file} is one part of a split model: merge the parts with llama.cpp's "
            "llama-gguf-split --merge"
        )
    if metadata.architecture == ARCHITECTURE:
        return GgufModel(*read_mmproj(metadata), {}, {})
    family = family_of(metadata)
    tokenizer = tokenizer_settings(metadata)
    config = make_config(metadata, family)
    return GgufModel(config, _weights(metadata, family, config), tokenizer, _sampling(metadata))


def _sampling(metadata: GGUFMetadata) -> dict[str, Any]:
    given = {name: metadata.values.get(f"general.sampling.{key}") for name, key in SAMPLING.items()}
    return {
        name: float(f"{value:.6g}") if isinstance(value, float) else value  # stored in 32 bits
        for name, value in given.items()
        if value is not None
    }


def read_rows(file: Path, weight: GgufWeight, rows: slice, *, raw: bool) -> npt.NDArray[Any]:
    """Return `rows` of a weight of `file`, in transformers' order.

    Args:
        raw: return the blocks as bytes, [rows, bytes of a row], for which the weight must have
            blocks; otherwise float32 of the tensor's shape.

    Raises:
        CheckpointError: the file has become shorter.
    """
    import gguf

    if weight.others:
        return _read_joined(file, weight, rows)
    tensor = weight.tensor
    reading = weight.reading
    num_rows = tensor.shape[0]
    row_bytes = tensor.num_bytes // num_rows
    order = np.arange(num_rows) if reading.rows is None else reading.rows.indices(num_rows)
    order = order[rows]
    blocks = np.empty((len(order), row_bytes), np.uint8)
    ends = [0, *(np.flatnonzero(np.diff(order) != 1) + 1), len(order)]  # of neighbours in the file
    with file.open("rb") as opened:
        for first, last in pairwise(ends if len(order) else ()):
            opened.seek(tensor.offset + int(order[first]) * row_bytes)
            if opened.readinto(blocks[first:last].data) < (last - first) * row_bytes:
                raise CheckpointError(f"{file} ends within its tensors; download it again")
    if raw:
        return _ordered_blocks(blocks, weight)
    with np.errstate(all="ignore"):  # a NaN in a weight is the model's matter
        values = gguf.dequantize(blocks, gguf.GGMLQuantizationType[tensor.type.name])
        return reading.values(np.array(values, np.float32).reshape(-1, *tensor.shape[1:]))


def _read_joined(file: Path, weight: GgufWeight, rows: slice) -> npt.NDArray[np.float32]:
    """Return `rows` of a weight that consists of some tensors."""
    parts = [weight._replace(tensor=each, others=()) for each in (weight.tensor, *weight.others)]
    if weight.axis:
        return np.stack([read_rows(file, part, rows, raw=False) for part in parts], weight.axis)
    size = weight.tensor.shape[0]
    found = []
    for number, part in enumerate(parts):
        start, stop = (min(max(row - number * size, 0), size) for row in (rows.start, rows.stop))
        if start < stop:
            found.append(read_rows(file, part, slice(start, stop), raw=False))
    return np.concatenate(found)


def _ordered_blocks(blocks: npt.NDArray[np.uint8], weight: GgufWeight) -> npt.NDArray[np.uint8]:
    """Return the bytes of some rows with their columns in transformers' order."""
    block = weight.tensor.type
    if (columns := weight.reading.columns) is None:
        return blocks
    order = columns.of_blocks(block.block_size)
    assert order is not None
    by_block = blocks.reshape(len(blocks), -1, block.block_bytes)
    return by_block[:, order.indices(by_block.shape[1])].reshape(len(blocks), -1)


def _weights(
    metadata: GGUFMetadata, family: GgufFamily, config: dict[str, Any]
) -> dict[str, GgufWeight]:
    readings = dict(family.readings(config))
    if family.permuted:
        readings["attn_q"] = Reading(rotary_pairs(config["num_attention_heads"]))
        readings["attn_k"] = Reading(rotary_pairs(config["num_key_value_heads"]))
    norm = Reading(offset=family.norm_offset)
    weights: dict[str, GgufWeight] = {}
    for name, tensor in metadata.tensors.items():
        if name in _IN_CONFIG or (family.leaves_out_drafts and _drafts(name, config)):
            continue
        named, module = _named(name, family, config["num_hidden_layers"])
        reading = readings.get(module, norm if module.endswith("_norm") else AS_STORED)
        parts = None
        if "{}" in named:
            of_heads = module in family.per_head
            heads = config["num_attention_heads"]
            parts = heads if of_heads else metadata.size("expert_count", 0)
        _check_tensor(metadata, name, reading, parts)
        if "{}" in named:
            parts = _split(metadata, name)
            found = {named.format(i): GgufWeight(part) for i, part in enumerate(parts)}
        else:
            found = {named: GgufWeight(reading.shaped(tensor), reading)}
        if twice := found.keys() & weights.keys():
            raise CheckpointError(
                f"{metadata.file}: tensor {shown(name)} is the second tensor for "
                f"{shown(min(twice))}"
            )
        weights |= found
        if len(weights) > _MAX_WEIGHTS:
            raise CheckpointError(
                f"{metadata.file}: the model has more than {_MAX_WEIGHTS} weights, each expert's "
                "counted"
            )
    return weights


def _drafts(name: str, config: dict[str, Any]) -> bool:
    """Return whether tensor `name` is of a block after the model's layers."""
    block, _, rest = name.partition(".")
    layer = rest.partition(".")[0]
    return block == "blk" and layer.isdecimal() and int(layer) >= config["num_hidden_layers"]


def _named(name: str, family: GgufFamily, num_layers: int) -> tuple[str, str]:
    """Return transformers' name of tensor `name`, and llama.cpp's name of its module, if known."""
    block, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    if block != "blk" or not rest:
        named = {**_WHOLE_MODEL, **family.tensors}.get(name, name)
        return named, block if named != name else ""
    prefix = f"{family.layers}.{layer}"
    if family.draft_tensors and layer.isdecimal() and int(layer) >= num_layers:
        prefix = f"mtp.layers.{int(layer) - num_layers}"
        if rest in family.draft_tensors:
            return f"mtp.{family.draft_tensors[rest]}", rest.rpartition(".")[0]
    module, _, kind = rest.rpartition(".")
    if own := family.tensors.get(rest):
        return f"{prefix}.{own}", module or rest
    known = family.modules.get(module) or MODULES.get(module)
    return (f"{prefix}.{known}.{kind}", module) if known else (name, "")


def _check_tensor(metadata: GGUFMetadata, name: str, reading: Reading, parts: int | None) -> None:
    """Check what reading tensor `name` relies on."""
    tensor = metadata.tensors[name]
    experts = parts is not None
    num_dimensions = len(tensor.shape) - experts
    if experts and (num_dimensions < 1 or tensor.shape[0] != parts):
        wrong = f"has shape {tensor.shape}, must have one part for each expert or head: {parts}"
    elif num_dimensions > 2:
        wrong = f"has {len(tensor.shape)} dimensions; {1 + experts} and {2 + experts} are supported"
    else:
        wrong = reading.misfit(tensor._replace(shape=tensor.shape[experts:]))
    if wrong:
        raise CheckpointError(f"{metadata.file}: tensor {shown(name)} {wrong}")


def _split(metadata: GGUFMetadata, name: str) -> list[GgufTensor]:
    """Return the part of each expert or head of tensor `name`."""
    tensor = metadata.tensors[name]
    num_experts, *shape = tensor.shape
    size = tensor.num_bytes // num_experts
    return [
        tensor._replace(shape=tuple(shape), offset=tensor.offset + index * size)
        for index in range(num_experts)
    ]
