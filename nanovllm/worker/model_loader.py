"""Builds one rank's model and loads its weights. Two functions, because the attention backend is
selected between them: an unsupported model is refused before its weights are read.
"""

import contextlib
import dataclasses
import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from nanovllm.errors import CheckpointError
from nanovllm.kernels.cpu.build import PANEL
from nanovllm.kernels.cpu.packed import PackedWeight
from nanovllm.kernels.torch_kernels import Kernels, LinearMethod
from nanovllm.layers.linear import QuantizedRows, WeightModule, shared_matrices
from nanovllm.loading.files import is_gguf
from nanovllm.loading.loader import (
    check_tensors,
    init_dummy_shards,
    init_dummy_weights,
    load_weights,
)
from nanovllm.loading.tensor_files import TensorInfo, equal_tensors, read_header
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.registry import model_class, user_family
from nanovllm.options.config import Config
from nanovllm.options.plugins import at_start
from nanovllm.utils.distributed import tensor_parallel
from nanovllm.utils.memory import return_freed
from nanovllm.utils.pages import PageReserve

if TYPE_CHECKING:
    from nanovllm.features.vision.family import VisionFamily

logger = logging.getLogger(__name__)

_DEFAULT_DTYPE_LOCK = threading.Lock()  # held while torch's default dtype is changed


class NetworkSpec(NamedTuple):
    """A checked checkpoint, which each rank loads."""

    config: Config  # `config.model` is this checkpoint, also for a draft network
    model_config: ModelConfig
    files: list[Path]  # of weights; none for dummy weights
    reserve: PageReserve | None = None  # has memory for the weights already
    # Keep the KV of all layers in the pages of table 0: a draft network's, whose blocks are its
    # target's.
    one_table: bool = False
    vision: "VisionFamily | None" = None  # how it reads pictures; None: it reads none


def num_positions(spec: NetworkSpec) -> int:
    """Return max_model_len, cut to the positions that the model was made for; warn if it is cut."""
    wanted = spec.config.max_model_len
    found = spec.model_config.max_position
    if wanted > found and tensor_parallel().rank == 0:
        logger.warning(
            "max_model_len cut from %d to %d, the positions that the model was made for",
            wanted,
            found,
        )
    return min(wanted, found)


def check_weights(model_config: ModelConfig, files: list[Path]) -> ModelConfig:
    """Return `model_config`, untied if the files have a separate language-model head, and tied if
    they are those of a network without one. First check that they hold what the model needs, by
    their headers alone.

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
    known = {name for header in headers for name in header}
    header_of = dict(zip(files, headers, strict=True))
    meta = torch.device("meta")
    model = make_modules(model_config, 1, meta, known)
    is_tied = model_config.tie_word_embeddings
    is_headless = "embed_tokens.weight" in known and "lm_head.weight" not in known
    if is_headless and not is_tied:  # as embedding models are saved
        logger.warning(
            "%s: there is no language-model head: the model makes vectors, and what it generates "
            "means nothing",
            files[0].parent,
        )
    is_wrong = _has_own_head(model, header_of) if is_tied else is_headless
    if is_wrong:
        model_config = dataclasses.replace(model_config, tie_word_embeddings=not is_tied)
        model = make_modules(model_config, 1, meta, known)
    ignored: frozenset[str] = model.ignored_weights  # type: ignore[assignment]
    check_tensors(model, header_of, ignored)
    return model_config


def _has_own_head(model: nn.Module, headers: dict[Path, dict[str, TensorInfo]]) -> bool:
    """Return whether the files of a tied model have a head that differs from the embedding."""
    if not isinstance(model, DecoderForCausalLM):  # a draft head uses its target's
        return False
    file_of = {name: file for file, header in headers.items() for name in header}
    head, embedding = (
        model.checkpoint_name(name, file_of)
        for name in ("lm_head.weight", "model.embed_tokens.weight")
    )
    if head not in file_of or embedding not in file_of:
        return False
    if equal_tensors((file_of[head], head), (file_of[embedding], embedding)):
        return False
    logger.warning(
        "%s: config.json says tie_word_embeddings, but %s differs from %s, so both are used; set "
        "tie_word_embeddings to false if that is meant, or remove %s from the file",
        file_of[head],
        head,
        embedding,
        head,
    )
    return True


def build_model(
    spec: NetworkSpec, max_model_len: int, device: torch.device, kernels: Kernels
) -> nn.Module:
    """Return the model on `device`, with `kernels` in its layers and uninitialised weights, in the
    form that a file has if they stay in that.
    """
    config = spec.config
    model_config = spec.model_config
    files = spec.files
    stored = model_config.quantization_config
    has_format = stored is not None or config.quantization is not None or any(map(is_gguf, files))
    # Such a model is built on the CPU, so that a GPU never holds the wide weights.
    first = torch.device("cpu") if has_format else device
    try:
        model = _build(model_config, max_model_len, first)
        if has_format:
            from nanovllm.features.quantization.weight_formats import expect_weights

            expect_weights(model, config, stored, files, device, kernels, spec.reserve)
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:  # otherwise it is stored in another form
                tensor.data = tensor.data.to(device)
    except RuntimeError as error:  # torch cannot allocate the weights
        raise CheckpointError(
            f"{config.model}: the model does not fit into memory: {error!s:.200}"
        ) from error
    use_kernels(model, kernels)
    return model.eval().requires_grad_(False)


def use_kernels(model: nn.Module, kernels: Kernels) -> None:
    """Give the modules of `model` the kernels of the device."""
    for module in model.modules():
        if isinstance(getattr(module, "kernels", None), Kernels):
            module.kernels = kernels  # type: ignore[assignment]


def make_modules(
    model_config: ModelConfig,
    max_model_len: int,
    device: torch.device,
    known: Collection[str] = (),
) -> nn.Module:
    """Return the modules of a model, which expect the weights in the form that config.json says.
    `known` has the names of the checkpoint's tensors, if they are known.
    """
    model = _build(model_config, max_model_len, device)
    if model_config.quantization_config is not None:
        from nanovllm.features.quantization.weight_formats import expect_format

        expect_format(model, model_config.quantization_config, known)
    return model


def _build(model_config: ModelConfig, max_model_len: int, device: torch.device) -> nn.Module:
    family = user_family(model_config)
    with default_dtype(model_config.dtype), device:
        make = model_class(model_config)
        return at_start(family, "__init__()", make, model_config, max_model_len)


def user_parts(model_config: ModelConfig) -> str | None:
    """Return the names of the user's family and weight format, for errors; None: all is ours."""
    names = [user_family(model_config)]
    if model_config.quantization_config is not None:
        from nanovllm.features.quantization.weight_formats import user_format

        own = user_format(model_config.quantization_config)
        names.append(None if own is None else own.name)
    return " or ".join(filter(None, names)) or None


def load_model(model: nn.Module, spec: NetworkSpec, kernels: Kernels) -> None:
    """Load the weights of a model made by `build_model`. Close the reserve of `spec`.

    Each weight gets its final form (packed or quantised) before the next one is read, so memory
    never holds all weights in both forms. A weight that is packed as it is, row by row, takes no
    memory in its first form.
    """
    config = spec.config
    reserve = spec.reserve
    forms = WeightForms(model, spec.model_config.dtype, kernels, reserve)
    if config.load_format == "dummy":
        init_dummy_weights(model, config.seed)
        for prefix, module in model.named_modules():
            if isinstance(module, WeightModule) and module.quantized and module.weight is not None:
                init_dummy_shards(module, module.shards(prefix), forms.store, config.seed)
            forms.finish(module)
    else:
        ignored: frozenset[str] = model.ignored_weights  # type: ignore[assignment]
        progress = tensor_parallel().rank == 0
        options: dict[str, Any] = {"ignored": ignored, "progress": progress}
        load_weights(model, spec.files, on_loaded=forms.finish, store=forms.store, **options)
    if reserve is not None:
        reserve.close()
    return_freed()
    if tensor_parallel().rank == 0:
        forms.log()


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create parameters of `dtype` inside; restore torch's default dtype afterwards."""
    with _DEFAULT_DTYPE_LOCK:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


_TRIM_EVERY = 2**24  # numbers of stored weights


class WeightForms:
    """Takes what the loader reads for the matrices of a model, and replaces their weights. The
    `reserve` gives packed ones their memory while it lasts.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        kernels: Kernels,
        reserve: PageReserve | None = None,
    ) -> None:
        self._dtype = dtype
        self._kernels = kernels
        self._reserve = reserve
        self._sharing = shared_matrices(model)
        self._packable = _packable(self._sharing, kernels)
        self._packed: dict[nn.Parameter, PackedWeight] = {}
        self._found: Counter[str] = Counter()
        self._num_freed = 0

    def store(self, module: nn.Module, target: torch.Tensor, values: torch.Tensor) -> bool:
        """Store some rows of a weight; return False if they are to be copied. See `Store`."""
        if not isinstance(module, WeightModule) or target.ndim != 2:
            return False
        if target.is_meta:
            assert isinstance(module.quantized, QuantizedRows)
            module.quantized.store(target, values)
            return True
        weight = module.weight
        if weight is None or weight not in self._packable:
            return False
        if weight not in self._packed:
            n, k = weight.shape
            self._packed[weight] = PackedWeight(n, k, self._reserve)
        self._packed[weight].store(target.storage_offset() // weight.shape[1], values)
        return True

    def finish(self, module: nn.Module) -> None:
        """Replace the weight of `module`, which is complete, in all modules that share it."""
        weight = module.weight if isinstance(module, WeightModule) else None
        if weight is None or weight not in self._sharing:
            return
        matrices = self._sharing.pop(weight)
        prefix, matrix = next(iter(matrices.items()))
        method: LinearMethod | None = self._packed.pop(weight, None)
        if matrix.quantized is not None:
            linears = {shard.name.rpartition(".")[0] for shard in matrix.shards(prefix)}
            method = matrix.quantized.method(self._dtype, self._kernels)
            self._found[matrix.quantized.description] += len(linears)
            self._num_freed += weight.numel()
            if self._num_freed > _TRIM_EVERY:  # malloc keeps what is freed between other memory
                self._num_freed = 0
                return_freed()
        elif method is None:
            method = pack(weight, list(matrices.values()), self._kernels)
        if method is not None:
            for sharer in matrices.values():
                sharer.replace_weight(method)

    def log(self) -> None:
        """Log what the stored weights became."""
        for description, count in self._found.items():
            logger.info("%d linears %s", count, description)


def _packable(
    sharing: dict[nn.Parameter, dict[str, WeightModule]], kernels: Kernels
) -> set[nn.Parameter]:
    """Return the weights that are packed as they are, in parts of whole panels."""
    found = set()
    for weight, matrices in sharing.items():
        prefix, matrix = next(iter(matrices.items()))
        if matrix.quantized is None and kernels.can_pack_rows(weight):
            targets = [shard.target for shard in matrix.shards(prefix) if shard.target.ndim == 2]
            if all(x.storage_offset() // weight.shape[1] % PANEL == 0 for x in targets):
                found.add(weight)
    return found


def pack(
    weight: torch.Tensor, matrices: list[WeightModule], kernels: Kernels
) -> LinearMethod | None:
    """Return the method for the loaded `weight` of `matrices`; None keeps it as it is."""
    return kernels.pack(weight, is_embedding=any(matrix.is_gathered for matrix in matrices))
