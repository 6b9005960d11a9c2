"""What a checkpoint's config.json asks for, and the memory that it takes. Reads headers alone.

The model is built on torch's meta device, so the report says what a run would do.
"""

import bisect
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanovllm.core.worker_info import pages_for
from nanovllm.errors import ConfigError, UnsupportedModelError
from nanovllm.layers.activation import Act, ActAndMul
from nanovllm.layers.attention import Attention
from nanovllm.layers.experts import Experts, Router, SharedExpertMLP
from nanovllm.layers.linear import WeightModule
from nanovllm.layers.state_layer import StateLayer
from nanovllm.loading.files import is_gguf, local_path
from nanovllm.loading.hub import Checkpoint, open_checkpoint, weight_files
from nanovllm.loading.shards import model_shards
from nanovllm.loading.tensor_files import TORCH_DTYPES, TensorInfo, read_header
from nanovllm.models.config_fields import architecture_of, text_fields
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.mla_parts import LatentAttention
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import PlainMLP
from nanovllm.models.registry import MODULES, read_config, supported
from nanovllm.worker.kv_pool import page_layout
from nanovllm.worker.model_loader import check_weights, make_modules
from nanovllm.worker.state_layers import StateLayers

POOL_BYTES = 4 * 2**30  # of the KV pool whose tokens are counted
_BLOCK_SIZE = 16
_ENDLESS = 2**30  # tokens of a text that is longer than every window
_SCALE_BYTES = 2  # of the scale of a group of weights in int8 or int4
_META = torch.device("meta")
_PARTS = {
    "vision": ("visual", "vision", "multi_modal_projector"),
    "audio": ("audio",),
    "mtp": ("mtp", "nextn", "eh_proj"),
}
"""What is left out: by its name here, words in the names of its tensors and fields."""
_SETTINGS = ("vision_config", "audio_config", "num_nextn_predict_layers")


def all_supported() -> list[dict[str, str]]:
    """Return what is known of each supported architecture, see `registry.Supported`."""
    return [supported(name)._asdict() for name in MODULES]


def report(model: str) -> dict[str, Any]:
    """Return what would run of `model`, in values that JSON has.

    Args:
        model: as for `open_checkpoint`.

    Raises:
        CheckpointError: there is no such checkpoint, or it is not sound.
    """
    checkpoint = open_checkpoint(model)
    found: dict[str, Any] = {"model": model, "architecture": architecture_of(checkpoint.config)}
    try:
        config = read_config(checkpoint.config)
        if config.quantization_config is not None:
            from nanovllm.features.quantization.weight_formats import checkpoint_format

            checkpoint_format(config.quantization_config)
        files = _local_files(checkpoint, model)
        if files:
            config = check_weights(config, list(files))
        network = make_modules(
            config, 1, _META, {name for header in files.values() for name in header}
        )
        memory = _memory(network, config, files)
    except UnsupportedModelError as error:
        return {**found, "supported": False, "error": str(error)}
    assert isinstance(network, DecoderForCausalLM)
    form = "gguf" if is_gguf(checkpoint.path) else None
    return {
        **found,
        "supported": True,
        **supported(config.architecture, config.module)._asdict(),
        "dtype": str(config.dtype).removeprefix("torch."),
        "quantization": (config.quantization_config or {}).get("quant_method", form),
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "tied": config.tie_word_embeddings,
        "positions": config.max_position,
        "stored": _stored_linears(network),
        "attention": _counted(_attention(network)),
        "states": _counted(map(_state, StateLayers(network).layers)),
        "mlps": _counted(map(_mlp, _layers(network))),
        "logit_softcap": config.fields.get("final_logit_softcapping"),
        "left_out": _left_out(network, checkpoint, files),
        "memory": memory,
    }


def _local_files(checkpoint: Checkpoint, model: str) -> dict[Path, Any]:
    """Return the headers of the weight files that are here; none for a hub id."""
    path = checkpoint.path
    if not (is_gguf(path) or (local_path(model).is_dir() and [*path.glob("*.safetensors")])):
        return {}
    return {file: read_header(file) for file in weight_files(checkpoint, model)}


def _stored_linears(network: nn.Module) -> dict[str, int]:
    """Return the number of the checkpoint's linears in each form that has few bits."""
    found: Counter[str] = Counter()
    for prefix, module in network.named_modules():
        if isinstance(module, WeightModule) and module.quantized is not None:
            linears = {shard.name.rpartition(".")[0] for shard in module.shards(prefix)}
            found[module.quantized.label] += len(linears)
    return dict(found)


def _layers(network: DecoderForCausalLM) -> Iterator[DecoderLayer]:
    """Return the layers with an MLP."""
    layers = (module for module in network.modules() if isinstance(module, DecoderLayer))
    return (layer for layer in layers if not isinstance(layer.mlp, nn.Identity))


def _counted(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the different ones of `found`, each with the number of layers that have it."""
    counts = Counter(tuple(each.items()) for each in found)
    return [{"num_layers": count, **dict(items)} for items, count in counts.items()]


def _attention(network: DecoderForCausalLM) -> Iterator[dict[str, Any]]:
    ropes = {rotary: rope for (rope, _), rotary in network.rotary.items()}
    for attention in network.modules():
        if not isinstance(attention, SelfAttention | LatentAttention):
            continue
        heads, kv_heads, head_dim = attention.attn.sizes
        options = attention.attn.options
        rope = ropes.get(attention.rotary_emb)
        yield {
            "causal": options.causal,
            "window": options.window,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "qk_norm": isinstance(attention, SelfAttention) and attention.q_norm is not None,
            "rope": None if rope is None else rope.rope_type,
            "rope_theta": None if rope is None else rope.theta,
            "rope_share": None if rope is None else rope.partial,
            "rope_factor": None if rope is None else rope.factor,
            "scale": options.scale,
            "softcap": options.softcap or None,
            "sinks": options.sinks,
            "value_dim": options.value_dim,
            "own_kv": attention.attn.source is None,
        }


def _state(layer: StateLayer) -> dict[str, Any]:
    """Return what a layer keeps of a sequence."""
    parts = Counter(layer.parts)
    return {
        "kind": type(layer).__name__,
        "parts": tuple(
            (count, part.shape, str(part.dtype).removeprefix("torch."))
            for part, count in parts.items()
        ),
    }


def _mlp(layer: DecoderLayer) -> dict[str, Any]:
    """Return what a layer has of MLPs and experts."""
    found: dict[str, Any] = dict.fromkeys(("activation", "size", "experts", "shared"))
    kind = "shared" if isinstance(layer.mlp, SharedExpertMLP) else "size"
    for module in layer.modules():
        if isinstance(module, Act | ActAndMul):
            found["activation"] = module.activation
        elif isinstance(module, Router):
            found |= {"experts": module.output_size, "experts_per_token": module.choice.top_k}
        elif isinstance(module, Experts):
            found |= {"activation": module.activation, "expert_size": module.size}
        elif isinstance(module, PlainMLP):
            found[kind] = module.up_proj.output_size
        elif isinstance(module, GatedMLP):
            found[kind] = module.gate_up_proj.output_size // 2
    return found


def _left_out(
    network: DecoderForCausalLM, checkpoint: Checkpoint, headers: dict[Path, Any]
) -> list[str]:
    """Return the parts that are not loaded: those that have weights or, without files, fields."""
    prefixes = tuple(name for name in network.ignored_weights if name.endswith("."))
    if headers:
        names = {name for header in headers.values() for name in header}
        known = [name for name in names if name.startswith(prefixes)]
    else:
        fields = {**checkpoint.config, **text_fields(checkpoint.config)}
        known = [key for key in _SETTINGS if prefixes and fields.get(key)]
    return [part for part, words in _PARTS.items() if any(w in k for k in known for w in words)]


def _memory(
    network: nn.Module, config: ModelConfig, headers: dict[Path, dict[str, TensorInfo]]
) -> dict[str, Any]:
    """Return the bytes of the weights in each form, and of one text that decodes."""
    if headers:
        stored = _stored_bytes(network, headers)
    else:  # in the form that config.json says
        few_bits = _in_few_bits(network)
        stored = sum(few_bits.values())
        stored += sum(p.nbytes for p in network.parameters() if p not in few_bits)
    found: dict[str, Any] = {
        "weights_bytes": stored,
        "weights_from": "files" if headers else "sizes",
        "int8_bytes": None,
        "int4_bytes": None,
    }
    if not any(map(is_gguf, headers)):
        for form in ("int8", "int4"):
            found[f"{form}_bytes"] = _rounded_bytes(network, form)
    return found | _kv_memory(network, config)


def _in_few_bits(network: nn.Module) -> dict[nn.Parameter | None, int]:
    """Return the bytes of what stands in place of each weight that has few bits."""
    found = {}
    for prefix, module in network.named_modules():
        if isinstance(module, WeightModule) and module.quantized is not None:
            shards = [s for s in module.shards(prefix) if not s.name.endswith("bias")]
            found[module.weight] = sum(shard.target.nbytes for shard in shards)
    return found


def _stored_bytes(network: nn.Module, headers: dict[Path, dict[str, TensorInfo]]) -> int:
    """Return the bytes in the files of the tensors that are loaded."""
    known = {name: info for header in headers.values() for name, info in header.items()}
    names = {shard.name for _, shards in model_shards(network, known) for shard in shards}
    total = 0
    for name in names & known.keys():
        info = known[name]
        if info.blocks_shape is not None:  # in bytes
            total += math.prod(info.blocks_shape)
        else:
            dtype = TORCH_DTYPES.get(info.dtype, torch.uint8)
            total += math.prod(info.shape) * dtype.itemsize
    return total


def _rounded_bytes(network: nn.Module, form: str) -> int | None:
    """Return the bytes of the weights in "int8" or "int4"; None if a layer cannot have that form.

    Anything that is not a matrix keeps its dtype, and so do routers and other small matrices.
    Weights that the checkpoint has in few bits keep them, except FP8, for which a CPU has no
    products.
    """
    from nanovllm.features.quantization.integer import choose_group_size
    from nanovllm.features.quantization.rounding import EXACT

    matrices = [
        module
        for module in network.modules()
        if isinstance(module, WeightModule) and not isinstance(module, EXACT)
    ]
    rounded = {matrix.weight for matrix in matrices}
    fp8 = {m.weight for m in matrices if m.quantized is not None and m.quantized.label == "FP8"}
    bits = int(form.removeprefix("int"))
    total = 0
    stored = _in_few_bits(network)
    for parameter in network.parameters():
        if parameter in stored and parameter not in fp8:
            total += stored[parameter]
        elif parameter not in rounded:
            total += parameter.nbytes
        else:
            try:
                group = choose_group_size(form, parameter.shape[1])
            except ConfigError:
                return None
            total += parameter.numel() * bits // 8 + parameter.numel() // group * _SCALE_BYTES
    return total


def _kv_memory(network: nn.Module, config: ModelConfig) -> dict[str, Any]:
    sizes = []
    windows = []
    for module in network.modules():
        if isinstance(module, Attention) and module.source is None:
            _, kv_heads, head_dim = module.sizes
            parts = 1 if module.options.value_dim else 2
            token_bytes = parts * kv_heads * head_dim * config.dtype.itemsize
            sizes.append(token_bytes * _BLOCK_SIZE)
            window = module.options.window
            windows.append(None if (window or _ENDLESS) >= config.max_position else window)
    states = StateLayers(network)
    layout = page_layout(sizes, windows, states.largest_part)
    states.lay_out(layout.page_bytes)
    in_windows = None not in windows or not layout.windows
    full = sum(
        size for size, window in zip(sizes, windows, strict=True) if in_windows or window is None
    )
    window_pages = pages_for(_ENDLESS, _BLOCK_SIZE, layout.windows, 1) - _ENDLESS // _BLOCK_SIZE
    num_pages = POOL_BYTES // layout.page_bytes
    fitting = bisect.bisect_right(
        range(num_pages + 1),
        num_pages,
        key=lambda blocks: (
            states.num_pages + pages_for(blocks * _BLOCK_SIZE, _BLOCK_SIZE, layout.windows, 1)
        ),
    )
    return {
        "kv_token_bytes": full // _BLOCK_SIZE,
        "kv_window_bytes": window_pages * layout.page_bytes,
        "state_bytes": states.num_bytes,
        "pool_tokens": max(0, fitting - 1) * _BLOCK_SIZE,
    }
