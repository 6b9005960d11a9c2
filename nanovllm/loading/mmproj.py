"""An mmproj file: what reads pictures for a text model in a GGUF file, as llama.cpp keeps it.

Its settings as a config.json has them, and its tensors under the names of `VisionTower`'s modules:
llama.cpp's names, too, are the same for all towers. Reads metadata, no weight. Imports no torch.
"""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.loading.gguf_family import Fields, GgufWeight, Order, Reading, rotary_pairs
from nanovllm.loading.gguf_header import MAX_SIZE, GGUFMetadata
from nanovllm.options.validation import check_float, check_int, shown

ARCHITECTURE = "clip"
"""`general.architecture` of such a file."""
WAY_OUT = 'give the mmproj file of this model, or start with limit_mm_per_prompt={"image": 0}'
"""What to do about a wrong file."""
_SIZES = {
    "embedding_length": ("hidden_size", "mm_embed_dim"),
    "feed_forward_length": ("intermediate_size",),
    "block_count": ("num_hidden_layers", "depth"),
    "attention.head_count": ("num_attention_heads", "num_heads"),
    "patch_size": ("patch_size",),
    "image_size": ("image_size",),
    "projection_dim": ("out_hidden_size",),
}
"""Sizes, by the key of the metadata: their names in vision_config, of one family or another."""
_OF_LAYERS = ("feed_forward_length", "block_count", "attention.head_count")
_MODULES = {
    "v.patch_embd": "patch_embed",
    "v.position_embd": "positions",
    "v.pre_ln": "norm_first",
    "v.post_ln": "norm_last",
    "v.std_bias": "merger.std_bias",
    "v.std_scale": "merger.std_scale",
    "mm.0": "merger.linear_fc1",
    "mm.1": "merger.linear_fc1",
    "mm.2": "merger.linear_fc2",
    "mm.input_norm": "merger.norm",
    "mm.input_projection": "merger.linear",
    "mm.patch_merger": "merger.mixer",
    "mm.soft_emb_norm": "merger.norm",
    # Of v.deepstack.N:
    "norm": "norm",
    "fc1": "linear_fc1",
    "fc2": "linear_fc2",
    # Of v.blk.N:
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_qkv": "attn.qkv",
    "attn_q": "attn.q_proj",
    "attn_k": "attn.k_proj",
    "attn_v": "attn.v_proj",
    "attn_q_norm": "attn.q_norm",
    "attn_k_norm": "attn.k_norm",
    "attn_out": "attn.proj",
    "attn_post_norm": "after_attn",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
    "ffn_post_norm": "after_mlp",
}
"""Modules of a tower, by llama.cpp's name."""
_GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj"}
_BOUNDED = {
    "attn_q": "attn.qkv.q_proj",
    "attn_k": "attn.qkv.k_proj",
    "attn_v": "attn.qkv.v_proj",
    "attn_out": "attn.proj",
    "ffn_gate": "mlp.fc1.gate_proj",
    "ffn_up": "mlp.fc1.up_proj",
    "ffn_down": "mlp.fc2",
}
"""Those of a tower with a `BoundedLinear` in place of each linear."""
_LEFT_OUT = ("a.", "mm.a.", "v.token_embd.img_break")
"""How the names begin of what hears, and of a token's embedding, which the text model has too."""
_PLACE = re.compile(r"v\.(blk|deepstack)\.(\d+)\.(.+)")


class Projector(NamedTuple):
    """A kind of towers."""

    architecture: str
    """transformers' name of the models that have it."""
    texts: tuple[str, ...]
    """llama.cpp's names of their text models."""
    merge: int
    """The side of a block of patches, if the file does not say."""
    modules: Mapping[str, str] = MappingProxyType({})
    """Modules that `_MODULES` lacks, or has for other kinds; or whole tensors."""
    readings: Callable[[Fields], Mapping[str, Reading]] = lambda vision: {}
    """Returns how tensors are read, by llama.cpp's name after v.blk.N.; gets vision_config."""
    activation: str = "gelu_pytorch_tanh"
    """What the file calls GELU."""
    fused: bool = False
    """Whether the tower has one matrix for queries, keys and values, and the file has three."""
    has_layers: bool = True
    processor: Mapping[str, int] = MappingProxyType({})
    """What preprocessor_config.json says in published models, and the file does not."""


def _by_pixel(vision: Fields) -> dict[str, Reading]:
    """The colours of a pixel come together in transformers; in the file each is a plane."""
    return {"v.patch_embd.weight": Reading(columns=Order(vision["patch_size"] ** 2))}


def _by_large_pixel(vision: Fields) -> dict[str, Reading]:
    order = Order((vision["patch_size"] * vision["pooling_kernel_size"]) ** 2)
    norm = dict.fromkeys(("v.patch_norm.1.weight", "v.patch_norm.1.bias"), Reading(order))
    return {"v.patch_embd.weight": Reading(columns=order), **norm}


def _by_pairs(vision: Fields) -> dict[str, Reading]:
    pairs = Reading(rotary_pairs(vision["num_heads"]))
    return {"attn_q.weight": pairs, "attn_k.weight": pairs}


PROJECTORS = {
    "gemma3": Projector(
        "Gemma3ForConditionalGeneration",
        ("gemma3",),
        4,
        readings=lambda vision: {"mm.soft_emb_norm.weight": Reading(offset=-1.0)},
    ),
    "gemma4uv": Projector(
        "Gemma4UnifiedForConditionalGeneration",
        ("gemma4",),
        3,
        {
            "v.patch_norm.1": "patch_embed.norm1",
            "v.patch_embd": "patch_embed.linear",
            "v.patch_norm.2": "patch_embed.norm2",
            "v.patch_norm.3": "norm_first",
        },
        _by_large_pixel,
        has_layers=False,
    ),
    "gemma4v": Projector(
        "Gemma4ForConditionalGeneration",
        ("gemma4",),
        3,
        {**_BOUNDED, **{f"{n}.weight": f"{m}.linear.weight" for n, m in _BOUNDED.items()}},
        _by_pixel,
    ),
    "lfm2": Projector("Lfm2VlForConditionalGeneration", ("lfm2",), 2, readings=_by_pixel),
    "pixtral": Projector(
        "Mistral3ForConditionalGeneration",
        ("llama", "mistral3"),
        1,
        readings=_by_pairs,
        activation="gelu",
    ),
    "qwen2.5vl_merger": Projector(
        "Qwen2_5_VLForConditionalGeneration",
        ("qwen2vl",),
        2,
        {"v.post_ln": "merger.norm"},
        fused=True,
        processor={"min_pixels": 56**2, "max_pixels": 28**2 * 16384},
    ),
    "qwen3vl_merger": Projector(
        "Qwen3VLForConditionalGeneration",
        ("qwen35", "qwen35moe", "qwen3vl", "qwen3vlmoe"),
        2,
        {"v.post_ln": "merger.norm"},
    ),
}
"""By `clip.projector_type` or `clip.vision.projector_type`."""


def can_see(architecture: Any) -> bool:
    """Return whether some towers are for text models of llama.cpp's `architecture`."""
    return any(architecture in projector.texts for projector in PROJECTORS.values())


def read_mmproj(metadata: GGUFMetadata) -> tuple[Fields, dict[str, GgufWeight]]:
    """Return the settings of a file, and its tensors by the names of `VisionTower`'s modules.

    The settings are as in a config.json without text_config. Besides, "image_processor" is as in a
    preprocessor_config.json, and "model_type" is a key of `PROJECTORS`.

    Raises:
        CheckpointError: a setting or a tensor is missing or invalid.
        UnsupportedModelError: no model that is implemented has such a tower.
    """
    kind = metadata.own("projector_type") or metadata.own("vision.projector_type")
    if metadata.own("has_vision_encoder") is not True:
        raise UnsupportedModelError(
            f"{metadata.file} reads no pictures (clip.has_vision_encoder is not true, the "
            f"projector_type is {shown(kind)}), and audio is not supported: {WAY_OUT}"
        )
    if not isinstance(kind, str) or kind not in PROJECTORS:
        raise metadata.unsupported("projector_type", kind, f"one of {', '.join(PROJECTORS)}")
    projector = PROJECTORS[kind]
    vision = _vision_config(metadata, projector)
    config = {
        "model_type": kind,
        "architectures": [projector.architecture],
        "vision_config": vision,
        "image_processor": _image_processor(metadata, projector),
        **_projector_config(metadata, vision),
    }
    if unread := sorted(key for key in metadata.unread() if key.startswith("vision.")):
        raise metadata.unsupported(unread[0], metadata.own(unread[0]))
    return config, _weights(metadata, projector, vision)


def _vision_config(metadata: GGUFMetadata, projector: Projector) -> Fields:
    """Return what a config.json says of the tower: the fields of all families."""
    tensors = metadata.tensors
    vision: Fields = {}
    for key, names in _SIZES.items():
        low = int(projector.has_layers or key not in _OF_LAYERS)
        value = metadata.setting(f"vision.{key}", check_int, low, MAX_SIZE)
        vision |= dict.fromkeys(names, value)
    merge = metadata.size("vision.projector.scale_factor", projector.merge)
    merge = metadata.size("vision.spatial_merge_size", merge)
    vision |= {"spatial_merge_size": merge, "pooling_kernel_size": merge}
    if (places := tensors.get("v.position_embd.weight")) is not None and len(places.shape) > 1:
        names = ("num_position_embeddings", "num_patches")
        names += ("position_embedding_size", "mm_posemb_size")
        vision |= dict.fromkeys(names, places.shape[-2])
    eps = _decimal(metadata.setting("vision.attention.layer_norm_epsilon", check_float, 0.0, 1.0))
    vision |= {"layer_norm_eps": eps, "rms_norm_eps": eps}
    if metadata.own("rope.freq_base") is not None:
        vision["rope_theta"] = metadata.number("rope.freq_base")
    for key, activation in (("use_gelu", projector.activation), ("use_silu", "silu")):
        if metadata.own(key) is True:
            vision["hidden_act"] = activation
    depth = vision["depth"]
    deep = metadata.listed("vision.is_deepstack_layers", depth, bool) or ()
    vision["deepstack_visual_indexes"] = [index for index, is_deep in enumerate(deep) if is_deep]
    if interval := metadata.size("vision.n_wa_pattern", 0):
        vision["fullatt_block_indexes"] = list(range(interval - 1, depth, interval))
    vision["use_clipped_linears"] = any(name.endswith(".input_min") for name in tensors)
    vision["standardize"] = "v.std_bias" in tensors
    return vision


def _projector_config(metadata: GGUFMetadata, vision: Fields) -> Fields:
    """Return what a config.json says beside vision_config."""
    merge = vision["spatial_merge_size"]
    has_bias = "mm.1.bias" in metadata.tensors
    inner = metadata.tensors.get("mm.1.weight")
    return {
        "spatial_merge_size": merge,
        "downsample_factor": merge,
        "mm_tokens_per_image": (vision["image_size"] // vision["patch_size"] // merge) ** 2,
        "projector_use_layernorm": "mm.input_norm.weight" in metadata.tensors,
        "projector_bias": has_bias,
        "multimodal_projector_bias": has_bias,
        "projector_hidden_size": inner.shape[0] if inner else None,
    }


def _image_processor(metadata: GGUFMetadata, projector: Projector) -> Fields:
    """Return what a preprocessor_config.json says."""
    found: Fields = dict(projector.processor)
    for name in ("min_pixels", "max_pixels"):
        if metadata.own(key := f"vision.image_{name}") is not None:
            found[name] = metadata.size(key)
    for name, low in (("image_mean", -10.0), ("image_std", 1e-3)):
        where = f"{metadata.file}: clip.vision.{name}"
        values = metadata.own(f"vision.{name}")
        if not isinstance(values, list) or len(values) != 3:
            raise CheckpointError(f"{where} must be a list of 3 numbers, is {shown(values)}")
        values = [check_float(CheckpointError, where, value, low, 10.0) for value in values]
        found[name] = [_decimal(value) for value in values]
    return found


def _decimal(value: float) -> float:
    """Return a number as it was written before it was stored in 32 bits."""
    return float(str(np.float32(value)))


def _weights(metadata: GGUFMetadata, projector: Projector, vision: Fields) -> dict[str, GgufWeight]:
    """Return the tensors by the names of the tower's modules; what has none keeps its own."""
    readings = projector.readings(vision)
    modules = _modules(metadata, projector, vision)
    found: dict[str, GgufWeight] = {}
    used: set[str] = set()  # as parts of others
    for name in metadata.tensors:
        if name in used or name.startswith(_LEFT_OUT):
            continue
        prefix, rest = _place(name, vision)
        parts = [name]
        has_frames = name == "v.patch_embd.weight" and f"{name}.1" in metadata.tensors
        if has_frames:
            parts.append(f"{name}.1")
        elif projector.fused and rest.startswith("attn_q."):
            parts = [name.replace("attn_q", f"attn_{part}") for part in "qkv"]
            rest = rest.replace("attn_q", "attn_qkv")
        used |= {*parts}
        weight = _weight(metadata, parts, 2 if has_frames else 0, readings.get(rest))
        if rest == "v.position_embd.weight" and not projector.has_layers:
            weight = _by_place(weight)
        module, _, kind = rest.rpartition(".")
        named = name
        if rest in modules or module in modules:
            named = prefix + (modules.get(rest) or f"{modules[module]}.{kind}")
        if named in found:
            raise CheckpointError(f"{metadata.file}: tensor {shown(name)} is the second {named}")
        found[named] = weight
    return found


def _modules(metadata: GGUFMetadata, projector: Projector, vision: Fields) -> dict[str, str]:
    """Return the tower's names, by llama.cpp's."""
    gate, up = (metadata.tensors.get(f"v.blk.0.ffn_{name}.weight") for name in ("gate", "up"))
    modules = {**_MODULES, **(_GATED if gate else {}), **projector.modules}
    sizes = vision["intermediate_size"], vision["hidden_size"]
    if up and up.shape != sizes and up.shape == sizes[::-1]:  # files of early 2025
        modules |= {"ffn_up": modules["ffn_down"], "ffn_down": modules["ffn_up"]}
    return modules


def _place(name: str, vision: Fields) -> tuple[str, str]:
    """Return the list and the index that a tensor has in the tower, as in "layers.3.", and the rest
    of its name; "" for none.
    """
    if (found := _PLACE.fullmatch(name)) is None:
        return "", name
    index = int(found[2])
    if found[1] == "blk":
        return f"layers.{index}.", found[3]
    deep: list[int] = vision["deepstack_visual_indexes"]
    return (f"deepstack.{deep.index(index)}.", found[3]) if index in deep else ("", name)


def _weight(
    metadata: GGUFMetadata, parts: list[str], axis: int, reading: Reading | None
) -> GgufWeight:
    """Return a weight that consists of some tensors."""
    reading = reading or Reading()
    name = shown(parts[0])
    if missing := [part for part in parts if part not in metadata.tensors]:
        raise CheckpointError(f"{metadata.file} has a tensor {name} and no {missing[0]}")
    first, *others = (metadata.tensors[part] for part in parts)
    if reading.columns is not None and len(first.shape) > 2:  # a convolution; a linear here
        rows, *planes = first.shape
        first = first._replace(shape=(rows, int(np.prod(planes))))
    wrong = reading.misfit(first)
    if any(other.shape != first.shape for other in others):
        wrong = f"has shape {first.shape}, must be like {', '.join(parts[1:])}"
    if wrong:
        raise CheckpointError(f"{metadata.file}: tensor {name} {wrong}")
    return GgufWeight(first, reading, tuple(others), axis)


def _by_place(weight: GgufWeight) -> GgufWeight:
    """Return two tables [2, places, numbers] as [places, 2, numbers]."""
    tensor = weight.tensor
    if len(tensor.shape) != 3 or tensor.shape[0] != 2:
        return weight
    first = tensor._replace(shape=tensor.shape[1:])
    second = first._replace(offset=first.offset + first.num_bytes)
    return GgufWeight(first, weight.reading, (second,), 1)
