"""Gives each weight its final form while a model is loaded: packed for the kernels, or as `stored`
says.
"""

import logging
from collections import Counter

import torch
from torch import nn

from nanovllm.kernels.cpu.build import PANEL
from nanovllm.kernels.cpu.packed import PackedWeight
from nanovllm.kernels.torch_kernels import Kernels, LinearMethod
from nanovllm.layers.linear import QuantizedRows, WeightModule, shared_matrices
from nanovllm.utils.memory import return_freed
from nanovllm.utils.pages import PageReserve

logger = logging.getLogger(__name__)

_TRIM_EVERY = 2**24
"""Numbers of stored weights."""


class WeightForms:
    """Takes what the loader reads for the matrices of a model, and replaces their weights.

    A weight that is packed as it is, row by row, takes no memory in its first form.

    Args:
        dtype: of the model.
        reserve: gives packed weights their memory while it lasts.
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
            first_rows = [
                shard.target.storage_offset() // weight.shape[1]
                for shard in matrix.shards(prefix)
                if shard.target.ndim == 2
            ]
            if all(row % PANEL == 0 for row in first_rows):
                found.add(weight)
    return found


def pack(
    weight: torch.Tensor, matrices: list[WeightModule], kernels: Kernels
) -> LinearMethod | None:
    """Return the method for the loaded `weight` of `matrices`; None keeps it as it is."""
    return kernels.pack(weight, is_embedding=any(matrix.is_gathered for matrix in matrices))
