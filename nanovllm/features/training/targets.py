"""Which part of which weight each tensor of a checkpoint fills, under every name that it may have.

A twin of the model on torch's meta device shows this, as when the weights were loaded; the loaded
model has them in other forms.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import nn

from nanovllm.errors import InvalidRequestError, UnsupportedModelError
from nanovllm.layers.experts import PER_EXPERT, StackedLinear, StoredExperts
from nanovllm.layers.linear import WeightModule
from nanovllm.loading.shards import Shard, model_shards
from nanovllm.models.decoder import Family
from nanovllm.models.expert_parts import NUMBERED
from nanovllm.options.validation import shown
from nanovllm.worker.model_loader import make_modules
from nanovllm.worker.network import Network

Region = tuple[int, tuple[int, ...]]
"""Where a shard's target lies in its weight: offset and shape."""


@dataclasses.dataclass(eq=False)
class Weight:
    """A parameter of this rank, as it was before it got its final form.

    Attributes:
        name: of the parameter.
        matrices: the loaded modules that multiply with it; none: it is a plain parameter.
        parameter: the loaded parameter; None: a matrix has another form of it.
        twin: the module on the meta device, if it is a matrix.
        regions: the name of the tensor that fills each part of it.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    matrices: list[WeightModule]
    parameter: nn.Parameter | None
    twin: WeightModule | None = None
    regions: dict[Region, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ShardTarget:
    """What a shard of a tensor fills."""

    weight: Weight
    shard: Shard

    @property
    def region(self) -> Region:
        return int(self.shard.target.storage_offset()), tuple(self.shard.target.shape)

    def view(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the part of `whole`, which has the weight's shape, that the shard fills."""
        target = self.shard.target
        part = whole.as_strided(target.shape, target.stride(), target.storage_offset())
        return part.narrow(self.shard.dim, 0, self.shard.unpadded_size)

    def as_stored(self, shape: tuple[int, ...]) -> "ShardTarget":
        """Return this target for a tensor of this shape. See `Shard.as_stored`."""
        return dataclasses.replace(self, shard=self.shard.as_stored(shape))

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a checkpoint's `tensor` that this rank has, in the shape of `view`."""
        shard = self.shard
        values = tensor if shard.index is None else tensor[shard.index]
        values = values.T if shard.transposed else values
        return values.narrow(shard.dim, shard.start, shard.unpadded_size)


class Targets:
    """What each tensor of a checkpoint fills on this rank.

    Attributes:
        weights: all that tensors fill.

    Raises:
        UnsupportedModelError: the checkpoint stores its weights in a special form.
    """

    def __init__(self, network: Network) -> None:
        _check_plain(network)
        self._by_name: dict[str, list[ShardTarget]] = {}
        twin = make_modules(network.model_config, network.max_model_len, torch.device("meta"))
        self._ignored: frozenset[str] = twin.ignored_weights  # type: ignore[assignment]
        self._left_out = tuple(name for name in self._ignored if name.endswith("."))
        self._ends = tuple(name for name in self._ignored if name.startswith("."))
        self.weights: list[Weight] = []
        self._add_all(twin, network.model)
        for companion in network.companions:
            with torch.device("meta"):
                self._add_all(companion.make_twin(), companion.model)

    def _add_all(self, twin: nn.Module, model: nn.Module) -> None:
        by_storage = _weights(twin, model)
        all_names: Callable[[str], list[str]] = twin.all_names  # type: ignore[assignment]
        for _ in _forms_of_experts(twin):
            for shard in itertools.chain.from_iterable(own for _, own in model_shards(twin)):
                if not (isinstance(twin, Family) and self._is_ignored(shard.name)):
                    target = ShardTarget(by_storage[_storage(shard.target)], shard)
                    self._add(all_names(shard.name), target)
        self.weights += [weight for weight in by_storage.values() if weight.regions]

    def _add(self, names: list[str], target: ShardTarget) -> None:
        weight = target.weight
        for name in names:
            targets = self._by_name.setdefault(name, [])
            if all((each.weight, each.region) != (weight, target.region) for each in targets):
                targets.append(target)
        weight.regions.setdefault(target.region, target.shard.name)

    def _is_ignored(self, name: str) -> bool:
        is_part = name.startswith(self._left_out) or name.endswith(self._ends)
        return is_part or name in self._ignored

    def of(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[ShardTarget]:
        """Return what a tensor fills; nothing, if the network needs none of it.

        Raises:
            InvalidRequestError: the model has no such tensor, or it has another shape, or no
                floating-point numbers.
        """
        targets = self._by_name.get(name)
        if targets is None:
            if self._is_ignored(name):
                return []
            raise InvalidRequestError(
                f"update_weights: this model has no tensor {shown(name)}; the names are those of "
                f"its checkpoint, such as {shown(next(iter(self._by_name)))}"
            )
        targets = [each.as_stored(tuple(shape)) for each in targets]
        expected = targets[0].shard.shape
        if tuple(shape) != expected:
            raise InvalidRequestError(
                f"update_weights: {name} has shape {list(shape)}, must have {list(expected)}: "
                "the architecture stays that of the loaded checkpoint"
            )
        if not dtype.is_floating_point:
            raise InvalidRequestError(
                f"update_weights: {name} has dtype {dtype}; give floating-point numbers"
            )
        return targets


def _forms_of_experts(twin: nn.Module) -> Iterator[StoredExperts | None]:
    """Have experts load each expert's linears, under each set of names, then tensors of all of
    them: checkpoints of a family often have the first, transformers the last.
    """
    stacked = [module for module in twin.modules() if isinstance(module, StackedLinear)]
    own = stacked[0].stored_as if stacked else None
    yield own
    for form in (PER_EXPERT, NUMBERED, StoredExperts(linears=None)):
        if own is not None and form != own and not (own.transposed or own.interleaved):
            for module in stacked:
                module.stored_as = form
            yield form


def _weights(twin: nn.Module, model: nn.Module) -> dict[int, Weight]:
    """Return the weights, by the memory of the twin's parameter: tied ones are one."""
    found: dict[int, Weight] = {}
    for path, module in twin.named_modules():
        loaded = model.get_submodule(path)
        for name, parameter in module.named_parameters(recurse=False):
            actual = loaded._parameters[name]
            key = _storage(parameter)
            if key not in found:
                whole = f"{path}.{name}"
                found[key] = Weight(whole, parameter.shape, parameter.dtype, [], actual)
            if (
                isinstance(loaded, WeightModule)
                and isinstance(module, WeightModule)
                and name == "weight"
            ):
                found[key].matrices.append(loaded)
                found[key].twin = found[key].twin or module
    return found


def _storage(tensor: torch.Tensor) -> int:
    """Return what is the same for all views of a tensor on the meta device."""
    return int(tensor.untyped_storage()._cdata)


def _check_plain(network: Network) -> None:
    """Raise UnsupportedModelError if trainers do not have what the checkpoint stores."""
    stored = network.model_config.quantization_config
    if stored is None and not str(network.config.model).endswith(".gguf"):
        return
    method = "GGUF blocks" if stored is None else network.config.quantization
    if isinstance(stored, dict):
        method = stored.get("quant_method", "another form")
    raise UnsupportedModelError(
        f"update_weights: {network.config.model} stores its weights as {method}, and a trainer has "
        'plain numbers; load the unquantised checkpoint, with quantization="int4" if it shall be '
        "small"
    )
