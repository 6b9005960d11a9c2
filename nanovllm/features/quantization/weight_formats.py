"""The formats of weights: by what a checkpoint says of itself, and by what the user asks for."""

import logging
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from nanovllm.errors import CheckpointError, ConfigError, UnsupportedModelError
from nanovllm.features.quantization.compressed_tensors import CompressedTensors
from nanovllm.features.quantization.fp4 import Mxfp4Format
from nanovllm.features.quantization.gguf import GgufFormat
from nanovllm.features.quantization.gptq import Awq, Gptq
from nanovllm.features.quantization.integer import GROUP_SIZES
from nanovllm.features.quantization.modelopt import ModelOpt
from nanovllm.features.quantization.quantized_fp8 import Fp8Format, QuantizedFp8
from nanovllm.features.quantization.rounding import Rounding
from nanovllm.features.quantization.settings import UNREAD_SCALES, kv_scheme
from nanovllm.kernels.torch_kernels import Kernels
from nanovllm.layers.embed_head import VocabParallelEmbedding
from nanovllm.layers.experts import StackedLinear
from nanovllm.layers.linear import LinearBase, WeightFormat, WeightModule, shared_matrices
from nanovllm.layers.pieces import HeadLinear
from nanovllm.loading.files import is_gguf
from nanovllm.loading.shards import model_shards
from nanovllm.loading.tensor_files import read_header
from nanovllm.options.config import Config
from nanovllm.options.plugins import at_start, guarded, installed, load_class
from nanovllm.options.validation import shown
from nanovllm.utils.distributed import tensor_parallel
from nanovllm.utils.pages import PageReserve

logger = logging.getLogger(__name__)


class UserFormat(NamedTuple):
    """A format of the user's, in place of a quantization_config. No config.json can say this."""

    plugin: str
    """The option `quantization`: "module:Class"."""
    config: dict[str, Any]
    """The checkpoint's quantization_config; empty without one."""

    @property
    def name(self) -> str:
        """What errors call it."""
        return f'quantization="{self.plugin}"'


FORMATS: dict[str, Callable[[dict[str, Any]], WeightFormat]] = {
    "fp8": Fp8Format,
    "compressed-tensors": CompressedTensors,
    "modelopt": ModelOpt,
    "modelopt_fp4": ModelOpt,
    "gptq": Gptq,
    "awq": Awq,
    "mxfp4": lambda _: Mxfp4Format(),  # it has no other settings
}
"""By `quant_method` of config.json: what reads the other settings."""
_LINEARS = (LinearBase, StackedLinear, HeadLinear)
"""What a quantization_config is about."""
_VOCABULARY = (VocabParallelEmbedding,)
"""What it is about only if the checkpoint has scales for it: few name these among what is left out,
and nearly all have them as plain numbers."""


def checkpoint_format(config: Any) -> WeightFormat | None:
    """Read `quantization_config` of config.json, or an `UserFormat`; None: the weights are plain
    numbers. A quant_method that is not in `FORMATS` may be the name of an installed plugin.

    Raises:
        UnsupportedModelError: a setting is not implemented.
        CheckpointError: a field has the wrong type.
        ConfigError: the user's format cannot be loaded.
    """
    if config is None:
        return None
    own = user_format(config)
    if own is not None:
        kind = load_class("quantization", own.plugin, WeightFormat, ("config",))  # type: ignore[type-abstract]
        made = at_start(own.name, "__init__()", kind, own.config)
        made.name = own.name  # for errors
        return guarded(made, WeightFormat, own.name, at_start)
    if not isinstance(config, dict):
        raise CheckpointError(
            f"config.json: quantization_config must be an object, is {shown(config)}"
        )
    method = config.get("quant_method")
    if method is None and {"bits", "group_size"} <= config.keys():
        raise UnsupportedModelError(
            f"these weights are quantised by MLX (bits {shown(config['bits'])}, group_size "
            f"{shown(config['group_size'])}), whose form is not supported: take the original "
            f"checkpoint, a GGUF file, or one in {', '.join(FORMATS)}"
        )
    if not isinstance(method, str) or method not in FORMATS:
        raise UnsupportedModelError(
            f"quantization_config quant_method {shown(method)} is not supported (only "
            f"{', '.join(FORMATS)})"
        )
    kv_scheme(config)
    return FORMATS[method](config)


def user_format(config: Any) -> UserFormat | None:
    """Return the format of the user's that reads `config`, as for `checkpoint_format`."""
    if isinstance(config, UserFormat):
        return config
    method = config.get("quant_method") if isinstance(config, dict) else None
    if not isinstance(method, str) or method in FORMATS:
        return None
    plugin = installed("format").get(method)
    return None if plugin is None else UserFormat(plugin, config)


def check_quantization(stored: Any, config: Config) -> None:
    """Check `stored`, the quantization_config of config.json, and what the user asks for.

    Raises:
        UnsupportedModelError, CheckpointError: as for `checkpoint_format`.
        ConfigError: the weights cannot be converted to what the user asks for.
    """
    found = checkpoint_format(stored)
    asked = config.quantization
    if isinstance(stored, UserFormat):
        if is_gguf(Path(config.model)):
            raise ConfigError(
                f'quantization="{asked}" is for safetensors files, and {config.model} has blocks '
                "of its own: leave it out"
            )
        return
    if found is not None and (asked == "none" or (asked == "fp8" and not _is_fp8(stored))):
        raise ConfigError(
            f"quantization {asked!r}: {config.model} is in {found.name}, whose linears stay in "
            'their form; leave it out, or use "int8" or "int4" to round the other weights'
        )
    if found is not None and (scheme := kv_scheme(stored)):
        logger.info(
            "%s asks for keys and values in %s: they are kept in %s, and its scales are not used",
            config.model,
            scheme,
            "the model's dtype" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        )


def _is_fp8(stored: dict[str, Any]) -> bool:
    """Return whether a quantization_config says FP8 of all its linears."""
    return (
        stored["quant_method"] == "fp8"
        or stored.get("format") == "float-quantized"
        or str(stored.get("quant_algo")).startswith("FP8")
    )


def expect_format(
    model: nn.Module,
    config: Any,
    known: Collection[str] = (),
    device: torch.device | None = None,
) -> None:
    """Prepare the linears of `model` to load what `quantization_config` says.

    Args:
        known: the names of the checkpoint's tensors; empty: unknown.
        device: where the weights will lie; None: where the model is.

    Raises:
        ConfigError, UnsupportedModelError, CheckpointError: as for `checkpoint_format` and
            `WeightFormat.quantized`.
    """
    found = checkpoint_format(config)
    if found is not None:
        ignored = getattr(model, "ignored_weights", frozenset[str]())
        model.ignored_weights = ignored | UNREAD_SCALES  # type: ignore[assignment]
        store_as(model, found, known, device)
        if not isinstance(config, UserFormat):
            store_as(model, found, known, device, _VOCABULARY)
        matrices = [module for module in model.modules() if isinstance(module, WeightModule)]
        if isinstance(config, UserFormat) and not any(matrix.quantized for matrix in matrices):
            raise ConfigError(
                f"{found.name}: stored() returned None for all {len(matrices)} matrices of this "
                "model, so it does nothing: leave it out"
            )


def expect_weights(
    model: nn.Module,
    config: Config,
    stored: Any,
    files: Iterable[Path],
    device: torch.device,
    kernels: Kernels,
    reserve: PageReserve | None,
) -> None:
    """Prepare the matrices of `model` for the form in which `files` have their weights, and the
    others for the rounding that the user asks for.

    Args:
        stored: the quantization_config of config.json.
        reserve: see `Rounding`.

    Raises:
        ConfigError, UnsupportedModelError, CheckpointError: as for `expect_format`.
    """
    headers = {file: read_header(file) for file in files}
    known = {name for header in headers.values() for name in header}
    if stored is not None:
        expect_format(model, stored, known, device)
    for file in filter(is_gguf, headers):
        blocks = GgufFormat(headers[file], config.quantization, kernels)
        store_as(model, blocks, known, device, (WeightModule,))
        if tensor_parallel().rank == 0:
            logger.info("%s: %s", file, blocks.summary())
    asked = config.quantization
    if asked in GROUP_SIZES or (asked == "fp8" and stored is None):
        store_as(model, Rounding(asked, kernels, reserve), known, device, (WeightModule,))
    if asked in GROUP_SIZES:
        for module in model.modules():
            if isinstance(module, WeightModule) and isinstance(module.quantized, QuantizedFp8):
                module.quantized.round_to(asked, kernels)


def store_as(
    model: nn.Module,
    weight_format: WeightFormat,
    known: Collection[str] = (),
    device: torch.device | None = None,
    kinds: tuple[type[WeightModule], ...] = _LINEARS,
) -> None:
    """Set `stored` of those matrices of `kinds` whose weights are in `weight_format`.

    Args:
        known, device: see `expect_format`.

    Raises:
        ConfigError, UnsupportedModelError: as for `WeightFormat.quantized`.
    """
    # A stored weight may have no tensor of its linear's name, which decides on a prefix.
    modules = {name.rpartition(".")[0] for name in known}
    shards_of = dict(model_shards(model, {*known, *(f"{module}.weight" for module in modules)}))
    for weight, matrices in shared_matrices(model).items():
        prefix, matrix = next(iter(matrices.items()))
        if not isinstance(matrix, kinds) or matrix.quantized is not None:
            continue
        two_dimensional = (each.name for each in shards_of[matrix] if each.target.ndim == 2)
        names = list(dict.fromkeys(name.removesuffix(".weight") for name in two_dimensional))
        if kinds == _VOCABULARY and not _has_scales(names, known):
            continue
        one = torch.empty(1, dtype=weight.dtype, device=device or weight.device)
        matrix.weight = nn.Parameter(one.expand(weight.shape), requires_grad=False)
        stored = weight_format.quantized(matrix, names)
        if stored is not None:
            meta = torch.empty_like(weight, device="meta")
            weight = nn.Parameter(meta, requires_grad=False)
        for sharing in matrices.values():
            sharing.quantized = stored
            sharing.weight = weight
        for _ in matrix.shards(prefix):
            pass  # their errors belong here, before anything is read


def _has_scales(names: list[str], known: Collection[str]) -> bool:
    """Return whether `known` has more of the linears `names` than a weight and a bias."""
    parts = [name.rpartition(".") for name in known]
    return any(path in names and part not in ("weight", "bias") for path, _, part in parts)
