"""Linear layers split over the tensor-parallel ranks. Each knows which checkpoint tensors it loads.

Column-parallel layers split the outputs. Row-parallel layers split the inputs and sum the results
over the ranks. `QuantizedWeight` is what a format of weights says of a matrix.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.errors import ConfigError
from nanovllm.kernels.torch_kernels import Kernels, LinearMethod
from nanovllm.loading.shards import Shard
from nanovllm.utils.distributed import all_reduce, tensor_parallel


class OutputSlice(NamedTuple):
    """The outputs of one checkpoint linear that this rank computes."""

    output_size: int  # all outputs of the checkpoint linear
    start: int
    size: int


def divide(total: int, name: str) -> int:
    """Return `total` divided by the number of ranks.

    Raises:
        ConfigError: `total` is not a multiple of the number of ranks.
    """
    size = tensor_parallel().size
    if total % size:
        raise ConfigError(
            f"tensor_parallel_size {size} does not divide this model's {name} ({total})"
        )
    return total // size


class QuantizedWeight(Protocol):
    """The weight [n, k] of a matrix while it is loaded, if not as numbers of the model's dtype.

    The matrix's own weight is on torch's meta device: this object owns all memory.
    """

    @property
    def label(self) -> str:
        """Name the form, for the report on a checkpoint: "GPTQ W4A16 g128"."""
        ...

    @property
    def description(self) -> str:
        """Say what the weight became, for the log: "in FP8, kept in 8 bits". Valid after
        `method`.
        """
        ...

    def shards(self, weight: Shard) -> Iterator[Shard]:
        """Yield the checkpoint tensors that stand in place of `weight`, a part of the matrix.

        It is called several times for each part, and for models on torch's meta device: it
        allocates what it loads into once, and then on the device of the matrix.

        Args:
            weight: named "<linear>.weight"; that of all experts has no suffix, and an `index`.
                `shape` is that of the whole linear's weight, `dim` and `start` say which part
                this rank has. `target` is a view of the matrix on the meta device: its first row
                is row `target.storage_offset() // k` of the matrix.

        Raises:
            ConfigError: this rank's part begins or ends inside a group of numbers.
            UnsupportedModelError: the form does not exist for such a weight.
        """
        ...

    def method(self, dtype: torch.dtype, kernels: Kernels) -> LinearMethod:
        """Return what multiplies, made of what was loaded; release what is not needed any more.

        Dummy weights fill integers with zeros: such tensors must be valid, too.

        Args:
            dtype: of inputs and results.
        """
        ...


class WeightFormat(ABC):
    """How the weights of a checkpoint are stored, or are to be stored.

    A format that `quantization_config` names is made of that. It raises UnsupportedModelError for a
    setting that is not implemented, and CheckpointError for a field of the wrong type.
    """

    name: str  # for errors: "FP8"

    @abstractmethod
    def quantized(self, matrix: "WeightModule", names: list[str]) -> QuantizedWeight | None:
        """Return how the weight of `matrix` is stored; None: as plain numbers.

        The shape [n, k], dtype and device of `matrix.weight` are those of the weight on this rank;
        it has no memory. The caller puts a weight on the meta device in its place.

        Args:
            names: dotted paths, as the checkpoint has them, of the linears that `matrix` merges.
                Experts are a linear each, or one for all.

        Raises:
            UnsupportedModelError: only some of them are in this format, or not in the same form.
            ConfigError: this rank's part begins or ends inside a group of numbers.
        """


@runtime_checkable
class QuantizedRows(QuantizedWeight, Protocol):
    """One that takes numbers or a GGUF file's blocks row by row, for targets on the meta device."""

    def store(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Store some rows.

        Args:
            target: the view on the meta device where they belong, one of `shards`.
            values: [rows, k] of any float dtype, or uint8 [rows, bytes of a row]; on the CPU, maybe
                not contiguous. The memory is used again after this call.
        """
        ...


class WeightModule(nn.Module):
    """Base of linears and embeddings: this rank's weight [outputs, inputs].

    After loading, a `method` may replace the weight.
    """

    # Whether the weight is read otherwise than by `method`, as rows by index are.
    is_gathered: bool = False

    def __init__(self, output_size: int, input_size: int) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(output_size, input_size))
        self.output_size = output_size
        self.quantized: QuantizedWeight | None = None
        """How the weight, which is then on the meta device, is stored; None: as plain numbers."""
        self.method: LinearMethod | None = None
        """Multiplies in place of `weight`; None: plain torch does."""

    def shards(self, prefix: str) -> Iterator[Shard]:
        """Yield this rank's parts of the checkpoint tensors, for the layer at path `prefix`.

        A `Shard` says which slice of which tensor the loader copies to which memory.
        """
        for name, parameter in self.named_parameters(recurse=False):
            whole = Shard(f"{prefix}.{name}", tuple(parameter.shape), parameter.data)
            yield from self.weight_shards(whole) if name == "weight" else [whole]

    def weight_shards(self, weight: Shard) -> Iterator[Shard]:
        """Yield `weight`, a part of the weight, or the tensors that are stored in its place."""
        yield from [weight] if self.quantized is None else self.quantized.shards(weight)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x [T, inputs] times the transpose of the weight, plus `bias`: [T, outputs]."""
        if self.method is None:
            assert self.weight is not None
            return F.linear(x, self.weight, bias)
        return self.method.apply(x, bias)

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows `ids` [T] of the weight: [T, inputs]."""
        if self.method is None:
            assert self.weight is not None
            return F.embedding(ids, self.weight)
        return self.method.embedding(ids)

    def replace_weight(self, method: LinearMethod) -> None:
        """Use `method`, which was made from the weight, and release the weight."""
        self.method = method
        self.weight = None


class LinearBase(WeightModule):
    """A linear that each rank computes whole, and the base of those that are split or merged."""

    transposed = False  # whether plain numbers of the weight are stored as [inputs, outputs]

    def __init__(self, input_size: int, output_size: int, *, bias: bool = False) -> None:
        super().__init__(output_size, input_size)
        self.bias = nn.Parameter(torch.empty(output_size)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x, self.bias)

    def weight_shards(self, weight: Shard) -> Iterator[Shard]:
        if self.transposed and (
            self.quantized is None or isinstance(self.quantized, QuantizedRows)
        ):
            shape = weight.shape[::-1]
            weight = dataclasses.replace(weight, shape=shape, transposed=True)
        yield from super().weight_shards(weight)


class ColumnParallelLinear(LinearBase):
    """Several checkpoint linears with the same input, merged: their outputs lie side by side.

    Args:
        slices: by the checkpoint linear's name, which replaces this module's name in the path.
        fused: whether the checkpoint has them merged, too, under this module's name.
    """

    def __init__(
        self, input_size: int, slices: Mapping[str, OutputSlice], bias: bool, fused: bool = False
    ) -> None:
        output_size = sum(outputs.size for outputs in slices.values())
        super().__init__(input_size, output_size, bias=bias)
        self.slices = dict(slices)
        self.fused = fused

    def shards(self, prefix: str) -> Iterator[Shard]:
        assert self.weight is not None
        parent = prefix.rpartition(".")[0]
        total = sum(outputs.output_size for outputs in self.slices.values())
        row = 0
        before = 0
        for name, outputs in self.slices.items():
            rows = slice(row, row + outputs.size)
            row += outputs.size
            path = f"{parent}.{name}"
            size = outputs.output_size
            start = outputs.start
            if self.fused:
                path = prefix
                size = total
                start = before + outputs.start
            before += outputs.output_size
            weight = self.weight.data[rows]
            shape = size, weight.shape[1]
            yield from self.weight_shards(Shard(f"{path}.weight", shape, weight, start=start))
            if self.bias is not None:
                yield Shard(f"{path}.bias", (size,), self.bias.data[rows], start=start)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """The gate_proj and up_proj of an MLP, each split evenly over the ranks.

    Args:
        output_sizes: all outputs of each checkpoint linear, by its name.
    """

    def __init__(self, input_size: int, output_sizes: Mapping[str, int], **options: bool) -> None:
        rank = tensor_parallel().rank
        slices = {}
        for name, output_size in output_sizes.items():
            size = divide(output_size, f"{name} outputs")
            slices[name] = OutputSlice(output_size, rank * size, size)
        super().__init__(input_size, slices, **options)


class QKVParallelLinear(ColumnParallelLinear):
    """q_proj, k_proj and v_proj, split by heads.

    With more ranks than KV heads, neighbouring ranks hold copies of the same KV head.

    Args:
        parts: which of the three there are: "qkv"; "qk" where values are the raw keys; "q" where
            the keys and values are another layer's.
    """

    def __init__(
        self,
        input_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        parts: str = "qkv",
        **options: bool,
    ) -> None:
        rank = tensor_parallel().rank
        size = tensor_parallel().size
        self.num_heads = divide(num_heads, "num_attention_heads")
        if size > num_kv_heads:
            if size % num_kv_heads:
                raise ConfigError(
                    f"tensor_parallel_size {size} is no multiple of this model's "
                    f"num_key_value_heads ({num_kv_heads})"
                )
            self.num_kv_heads = 1
            kv_start = rank * num_kv_heads // size
        else:
            self.num_kv_heads = divide(num_kv_heads, "num_key_value_heads")
            kv_start = rank * self.num_kv_heads
        q_size = self.num_heads * head_dim
        kv_size = self.num_kv_heads * head_dim
        kv = OutputSlice(num_kv_heads * head_dim, kv_start * head_dim, kv_size)
        q = OutputSlice(num_heads * head_dim, rank * q_size, q_size)
        slices = {f"{part}_proj": q if part == "q" else kv for part in parts}
        super().__init__(input_size, slices, **options)


class RowParallelLinear(LinearBase):
    """A linear whose inputs are split over the ranks. The results are summed over the ranks."""

    def __init__(self, input_size: int, output_size: int, *, bias: bool) -> None:
        super().__init__(divide(input_size, "linear input size"), output_size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias if tensor_parallel().rank == 0 else None  # the sum must contain it once
        return all_reduce(self.linear(x, bias))

    def shards(self, prefix: str) -> Iterator[Shard]:
        assert self.weight is not None
        output_size, size = self.weight.shape
        start = tensor_parallel().rank * size
        shape = (output_size, tensor_parallel().size * size)
        yield from self.weight_shards(
            Shard(f"{prefix}.weight", shape, self.weight.data, dim=1, start=start)
        )
        if self.bias is not None:
            yield Shard(f"{prefix}.bias", (output_size,), self.bias.data)


def base_method(matrix: WeightModule) -> LinearMethod | None:
    """Return what multiplies with the weight of `matrix` itself, not what wraps it for adapters."""
    return getattr(matrix.method, "base", matrix.method)


def shared_matrices(model: nn.Module) -> dict[nn.Parameter, dict[str, WeightModule]]:
    """Return the matrices that have a weight, by weight and then by path: tied ones have the same
    weight.
    """
    sharing: dict[nn.Parameter, dict[str, WeightModule]] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, WeightModule) and module.weight is not None:
            sharing.setdefault(module.weight, {})[prefix] = module
    return sharing
