"""Builds one rank's model and loads its weights. Two functions, because the attention backend is
selected between them: an unsupported model is refused before its weights are read.

Knows no KV cache, no batch and no step.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from nanovllm.checkpoint.dummy_weights import init_dummy_weights
from nanovllm.checkpoint.gguf import is_gguf
from nanovllm.checkpoint.loader import check_tensors, load_weights, read_header
from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.kernels.cpu.build import PANEL
from nanovllm.kernels.cpu.packed import PackedWeight
from nanovllm.kernels.torch_kernels import Kernels, WeightMethod
from nanovllm.layers.embed_head import VocabParallelEmbedding
from nanovllm.layers.experts import Router, SigmoidRouter, StackedLinear
from nanovllm.layers.linear import LinearBase, Matrix
from nanovllm.layers.pieces import SmallLinear
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.registry import model_class
from nanovllm.options.config import Config
from nanovllm.utils.distributed import tensor_parallel
from nanovllm.utils.memory import return_freed
from nanovllm.utils.pages import PageReserve

logger = logging.getLogger(__name__)

KEPT = (Router, SigmoidRouter, SmallLinear)
"""Matrices that quantization leaves as they are: small, and a rounded logit may choose another
expert, or close a gate."""
_DEFAULT_DTYPE_LOCK = threading.Lock()
"""Held while torch's default dtype, which is global to the process, is changed."""


class NetworkSpec(NamedTuple):
    """A checked checkpoint, which each rank loads."""

    config: Config
    """Options; `config.model` is this checkpoint, also for a draft network."""
    model_config: ModelConfig
    files: list[Path]
    """The weight files; none for dummy weights."""
    reserve: PageReserve | None = None
    """Has memory for the weights already."""
    one_table: bool = False
    """See `AttentionGroups`."""


def num_positions(config: Config, model_config: ModelConfig) -> int:
    """Return max_model_len, cut to the positions that the model was made for; warn if it is cut."""
    found = min(config.max_model_len, model_config.max_position)
    if found < config.max_model_len and tensor_parallel().rank == 0:
        logger.warning(
            "max_model_len cut from %d to %d, the positions that the model was made for",
            config.max_model_len,
            found,
        )
    return found


def check_weights(model_config: ModelConfig, files: list[Path]) -> None:
    """Check that safetensors `files` hold what the model needs, by their headers alone.

    Allocates nothing: the model that names the tensors is on torch's meta device.

    Raises:
        CheckpointError: a file is unsound, or a tensor's name, shape or dtype is wrong.
    """
    headers = [read_header(file) for file in files]
    num_tensors = sum(len(header) for header in headers)
    if model_config.num_layers > num_tensors:  # so many modules would take minutes
        raise CheckpointError(
            f"{files[0].parent}: config.json: num_hidden_layers {model_config.num_layers}, but the "
            f"weights have only {num_tensors} tensors"
        )
    model = make_modules(model_config, 1, torch.device("meta"))
    ignored: frozenset[str] = model.ignored_weights  # type: ignore[assignment]
    check_tensors(model, dict(zip(files, headers, strict=True)), ignored)


def build_model(
    config: Config,
    model_config: ModelConfig,
    files: list[Path],
    max_model_len: int,
    device: torch.device,
    kernels: Kernels,
) -> nn.Module:
    """Return the model on `device`, with `kernels` in its layers and uninitialised weights.

    Args:
        files: what will be loaded, because weights may stay in the form that a file has.
    """
    packed = model_config.quantization_config is not None or any(map(is_gguf, files))
    # Such a model is built on the CPU, so that a GPU never holds the wide weights.
    first = torch.device("cpu") if packed and device.type == "cuda" else device
    try:
        model = make_modules(model_config, max_model_len, first)
        for file in filter(is_gguf, files):
            from nanovllm.formats.gguf import keep_blocks

            keep_blocks(model, _matrices(model).values(), config, model_config.dtype, file)
        model.to(device)
    except RuntimeError as error:  # torch cannot allocate the weights
        raise CheckpointError(
            f"{config.model}: the model does not fit into memory: {error!s:.200}"
        ) from error
    for module in model.modules():
        if isinstance(getattr(module, "kernels", None), Kernels):
            module.kernels = kernels  # type: ignore[assignment]
    return model.eval().requires_grad_(False)


def make_modules(model_config: ModelConfig, max_model_len: int, device: torch.device) -> nn.Module:
    """Return the modules of a model, whose weights have no values; on torch's meta device, none."""
    with _default_dtype(model_config.dtype), device:
        model = model_class(model_config)(model_config, max_model_len)
    if model_config.quantization_config is not None:
        from nanovllm.formats.registry import expect_format

        expect_format(model, model_config.quantization_config)
    return model


_Matrices = dict[nn.Parameter, list[tuple[str, Matrix]]]


def _matrices(model: nn.Module) -> _Matrices:
    """Return the matrices that have a weight, with their paths: tied ones have the same weight."""
    sharing: _Matrices = {}
    for prefix, module in model.named_modules():
        if isinstance(module, Matrix) and module.weight is not None:
            sharing.setdefault(module.weight, []).append((prefix, module))
    return sharing


def load_model(
    model: nn.Module,
    config: Config,
    model_config: ModelConfig,
    files: list[Path],
    kernels: Kernels,
    reserve: PageReserve | None = None,
) -> None:
    """Load the weights of a model made by `build_model`.

    Each weight gets its final form (packed or quantised) before the next one is read, so memory
    never holds all weights in both forms. A weight that is packed as it is, row by row, takes no
    memory in its first form.

    Args:
        reserve: gives packed weights their memory while it lasts; closed then.
    """
    sharing = _matrices(model)
    packed: dict[nn.Parameter, PackedWeight] = {}

    def store(module: nn.Module, target: torch.Tensor, values: torch.Tensor) -> bool:
        weight = module.weight if isinstance(module, Matrix) else None
        if weight is None or weight not in packable or target.ndim != 2:
            return False
        if weight not in packed:
            n, k = weight.shape
            packed[weight] = PackedWeight(n, k, reserve)
        packed[weight].store(target.storage_offset() // weight.shape[1], values)
        return True

    def finish(module: nn.Module) -> None:
        weight = module.weight if isinstance(module, Matrix) else None
        if weight is None or weight not in sharing:
            return
        matrices = [matrix for _, matrix in sharing.pop(weight)]
        method = packed.pop(weight, None) or _quant_method(
            weight, matrices, config, model_config, kernels
        )
        if method is not None:
            for matrix in matrices:
                matrix.replace_weight(method)

    if config.load_format == "dummy":
        init_dummy_weights(model, config.seed)
        for module in model.modules():
            finish(module)
    else:
        ignored: frozenset[str] = model.ignored_weights  # type: ignore[assignment]
        progress = tensor_parallel().rank == 0
        packable = set[nn.Parameter]()
        if config.quantization in (None, "none"):
            packable = _packable(sharing, model_config.dtype, kernels)
        options: dict[str, Any] = {"ignored": ignored, "progress": progress}
        load_weights(model, files, on_loaded=finish, store=store, **options)
    if reserve is not None:
        reserve.close()
    return_freed()


def _packable(sharing: _Matrices, dtype: torch.dtype, kernels: Kernels) -> set[nn.Parameter]:
    """Return the weights that are packed as they are, in parts of whole panels."""
    return {
        weight
        for weight, matrices in sharing.items()
        if weight.dtype == dtype  # neither FP8 nor a GGUF file's blocks
        and kernels.can_pack_rows(weight)
        and all(
            shard.target.storage_offset() // weight.shape[1] % PANEL == 0
            for shard in matrices[0][1].shards(matrices[0][0])
            if shard.target.ndim == 2
        )
    }


def _quant_method(
    weight: torch.Tensor,
    matrices: list[Matrix],
    config: Config,
    model_config: ModelConfig,
    kernels: Kernels,
) -> WeightMethod | None:
    """Return the method that keeps the loaded `weight` of `matrices`; None keeps it as it is."""
    quantization = config.quantization
    if (stored := matrices[0].stored) is not None:
        return stored.method(weight.data, model_config.dtype, kernels)
    if quantization == "fp8" and not isinstance(matrices[0], LinearBase):
        quantization = None  # FP8 is for linears; embedding and head keep the model's dtype
    has_experts, rounds = isinstance(matrices[0], StackedLinear), quantization in ("int8", "int4")
    if has_experts and rounds and kernels.name == "triton":
        raise ConfigError(
            f"quantization {quantization!r} is not for experts on a GPU; leave it out"
        )
    if isinstance(matrices[0], KEPT):
        quantization = None
    if model_config.quantization_config is not None or quantization == "none":
        quantization = None  # the checkpoint chose what is quantised
    if quantization is None:
        gathered = any(
            type(matrix) is VocabParallelEmbedding or isinstance(matrix, StackedLinear)
            for matrix in matrices
        )
        return kernels.pack(weight, is_embedding=gathered)
    from nanovllm.formats.registry import round_weight

    return round_weight(weight, quantization, kernels)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create parameters of `dtype` inside; restore torch's default dtype afterwards."""
    with _DEFAULT_DTYPE_LOCK:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
