"""Writes mmproj files of transformers' models as llama.cpp's converter does.

Names come from the gguf package's table, but for some. Knows nothing of the engine.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

from tests.gguf_files import quantized, to_llama_order

CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
HALF = ([0.5] * 3, [0.5] * 3)
PROJECTORS: dict[str, str] = {
    "gemma3": "gemma3",
    "gemma4": "gemma4v",
    "gemma4_unified": "gemma4uv",
    "lfm2_vl": "lfm2",
    "mistral3": "pixtral",
    "qwen2_5_vl": "qwen2.5vl_merger",
    "qwen3_5": "qwen3vl_merger",
    "qwen3_vl": "qwen3vl_merger",
    "qwen3_vl_moe": "qwen3vl_merger",
}
"""The projector_type by transformers' model_type."""
_UNIFIED = {
    "patch_ln1": "v.patch_norm.1",
    "patch_ln2": "v.patch_norm.2",
    "pos_norm": "v.patch_norm.3",
    "patch_dense": "v.patch_embd",
}
_BOUNDS = (".input_min", ".input_max", ".output_min", ".output_max")


def write_mmproj(
    model: PreTrainedModel,
    file: Path,
    *,
    kind: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write what reads pictures of `model` to `file`.

    Args:
        kind: the type of all matrices whose rows fit; convolutions and positions are in F32.
        metadata: fields to add or replace; None leaves one out.
        extra: tensors to add, or to replace.
    """
    writer = gguf.GGUFWriter(file, "clip")
    for key, value in {**settings(model), **(metadata or {})}.items():
        if value is not None:
            stored = gguf.GGUFValueType.get_type(value)
            stored = gguf.GGUFValueType.UINT32 if type(value) is int else stored
            writer.add_key_value(key, value, stored)
    rng = np.random.default_rng(0)
    for name, tensor in {**dict(tensors(model)), **(extra or {})}.items():
        values = tensor.contiguous().float().numpy()
        block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
        keeps = values.ndim != 2 or "position_embd" in name or values.shape[-1] % block
        used = "F32" if keeps else kind
        writer.add_tensor(
            name, quantized(values, used, rng), raw_dtype=gguf.GGMLQuantizationType[used]
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def settings(model: PreTrainedModel) -> dict[str, Any]:
    """Return the metadata."""
    config: Any = model.config
    vision, text = config.vision_config, config.text_config
    projector = PROJECTORS[config.model_type]
    is_unified = projector == "gemma4uv"
    depth = 0 if is_unified else getattr(vision, "num_hidden_layers", None) or vision.depth
    heads = getattr(vision, "num_attention_heads", None) or getattr(vision, "num_heads", 0)
    clip = projector in ("pixtral", "qwen2.5vl_merger")
    eps = getattr(vision, "layer_norm_eps", 1e-5 if projector == "pixtral" else 1e-6)
    own = {
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.vision.projection_dim": text.hidden_size,
        "clip.vision.image_size": getattr(vision, "image_size", 256),
        "clip.vision.patch_size": vision.patch_size,
        "clip.vision.embedding_length": vision.mm_embed_dim if is_unified else vision.hidden_size,
        "clip.vision.feed_forward_length": 0 if is_unified else vision.intermediate_size,
        "clip.vision.block_count": depth,
        "clip.vision.attention.head_count": 0 if is_unified else heads,
        "clip.vision.attention.layer_norm_epsilon": eps,
        "clip.vision.image_mean": (CLIP if clip else HALF)[0],
        "clip.vision.image_std": (CLIP if clip else HALF)[1],
        "clip.projector_type": projector,
    }
    if projector.startswith("gemma4"):  # as in a file that also hears
        own["clip.vision.projector_type"] = own.pop("clip.projector_type")
        own |= {"clip.has_audio_encoder": True, "clip.audio.projector_type": "gemma4a"}
    elif projector == "qwen2.5vl_merger":
        own |= {"clip.use_silu": True}
        own |= {"clip.vision.n_wa_pattern": vision.fullatt_block_indexes[0] + 1}
    else:
        own["clip.use_gelu"] = True
    if projector == "qwen3vl_merger":
        deep = getattr(vision, "deepstack_visual_indexes", None) or []
        own["clip.vision.is_deepstack_layers"] = [index in deep for index in range(depth)]
        own["clip.vision.spatial_merge_size"] = vision.spatial_merge_size
    if projector == "pixtral":
        own["clip.vision.spatial_merge_size"] = config.spatial_merge_size
    if projector == "gemma3":
        side = vision.image_size // vision.patch_size
        own["clip.vision.projector.scale_factor"] = side // int(config.mm_tokens_per_image**0.5)
    if projector == "lfm2":
        own["clip.vision.projector.scale_factor"] = config.downsample_factor
    return own


def tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors as the converter names and changes them."""
    projector = PROJECTORS[model.config.model_type]
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)
    for name, tensor in model.state_dict().items():
        name = name.removeprefix("model.")
        if name.startswith(("language_model.", "lm_head", "vision_tower.head.")):
            continue
        for part, values in parts(name, tensor, projector, model.config):
            if part.startswith(("v.", "mm.")):
                yield part, values
                continue
            named = table.get_name(part, (".weight", ".bias", *_BOUNDS))
            named = named or table.get_name(f"model.{part}", (".weight", ".bias", *_BOUNDS))
            assert named is not None, part
            yield named, values


def parts(
    name: str, tensor: torch.Tensor, projector: str, config: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what the converter makes of one tensor, under llama.cpp's names or published ones."""
    vision = config.vision_config
    module, _, kind = name.rpartition(".")
    if projector in ("lfm2", "gemma3"):
        name = name.replace("vision_tower.", "vision_tower.vision_model.")
    if projector == "qwen3vl_merger" and "merger" in name:
        _, place, *_, linear = module.split(".")
        linear = {"linear_fc1": "fc1", "linear_fc2": "fc2"}.get(linear, linear)
        if place == "merger":
            names = {"norm": "v.post_ln", "fc1": "mm.0", "fc2": "mm.2"}
            yield f"{names[linear]}.{kind}", tensor
        else:
            index = vision.deepstack_visual_indexes[int(module.split(".")[2])]
            yield f"v.deepstack.{index}.{linear}.{kind}", tensor
    elif name == "visual.patch_embed.proj.weight":
        yield "v.patch_embd.weight", tensor[:, :, 0]
        yield "v.patch_embd.weight.1", tensor[:, :, 1]
    elif projector == "qwen2.5vl_merger" and ".qkv." in name:
        for part, values in zip("qkv", tensor.chunk(3), strict=True):
            yield name.replace("qkv", part), values
    elif projector == "pixtral" and ("q_proj" in name or "k_proj" in name):
        yield name, to_llama_order(tensor, vision.num_attention_heads)
    elif name.endswith("mm_soft_emb_norm.weight"):
        yield name, tensor + 1
    elif name.endswith("mm_input_projection_weight"):
        yield name.replace("_weight", ".weight"), tensor
    elif name.endswith(("patch_embedder.input_proj.weight", "patch_embedding.weight")):
        if tensor.ndim == 2:
            side = vision.patch_size
            tensor = tensor.view(-1, side, side, 3).permute(0, 3, 1, 2)
        yield name, tensor
    elif projector == "gemma4uv":
        yield unified_part(module, kind, tensor, vision)
    else:
        name = name.replace("vision_tower.encoder.layers.", "vision_model.model.layers.")
        if projector == "gemma4v":
            name = name.replace(".linear.weight", ".weight")
            name += ".weight" if name.endswith("position_embedding_table") else ""
        yield name, tensor.reshape(1) if tensor.ndim == 0 else tensor


def unified_part(
    module: str, kind: str, tensor: torch.Tensor, vision: SimpleNamespace
) -> tuple[str, torch.Tensor]:
    """Return a tensor of Gemma 4 12B: the numbers of a patch are sorted by colour."""
    last = module.rpartition(".")[2]
    if kind == "pos_embedding":
        return "v.position_embd.weight", tensor.transpose(0, 1)
    if last == "embedding_projection":
        return "mm.input_projection.weight", tensor
    if last == "patch_ln1" or (last == "patch_dense" and kind == "weight"):
        side = vision.patch_size * vision.pooling_kernel_size
        colour, row, column = np.unravel_index(np.arange(3 * side**2), (3, side, side))
        tensor = tensor[..., (row * side + column) * 3 + colour]
    return f"{_UNIFIED[last]}.{kind}", tensor
