"""Merges one adapter into the weights while they are loaded: `LLM(model, merge_lora=path)`.

Each part of a weight is changed in float32 as it is read, before it is rounded or packed.
"""

from itertools import chain

import torch
from torch import nn

from nanovllm.errors import ConfigError, UnsupportedModelError
from nanovllm.features.lora.layer_parts import LoRATarget, layer_targets, named_slices, own_outputs
from nanovllm.features.lora.peft_config import MAX_RANK
from nanovllm.features.lora.peft_files import Factors, fitting, read_adapter
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.pieces import HeadLinear
from nanovllm.loading.loader import Store
from nanovllm.options.config import Config

_KINDS = (LinearBase, HeadLinear)


def merging(store: Store, model: nn.Module, config: Config) -> Store:
    """Return `store`, which then gets the weights of `model` with `config.merge_lora` added.

    Raises:
        CheckpointError: as for `read_adapter` and `fitting`.
        UnsupportedModelError: a weight is in few bits in the checkpoint already.
        ConfigError: there are no weights.
    """
    assert config.merge_lora is not None
    if config.load_format == "dummy":
        raise ConfigError("lora: load_format 'dummy' loads no weights to merge it into")
    adapter = read_adapter(config.merge_lora, MAX_RANK)
    _check_plain(model)
    targets = layer_targets(model, _KINDS)
    factors = fitting(adapter, named_slices(model, targets.values()))
    changed = {
        model.get_submodule(path): target
        for path, target in targets.items()
        if any(part.name in factors for part in target.slices)
    }

    def store_merged(module: nn.Module, part: torch.Tensor, values: torch.Tensor) -> bool:
        target = changed.get(module)
        if target is None or part.ndim != 2:
            return store(module, part, values)
        first = part.storage_offset() // target.inputs
        merged = values.float()
        _add(merged, first, target, factors)
        if not store(module, part, merged):
            part.copy_(merged)
        return True

    return store_merged


def _add(rows: torch.Tensor, first: int, target: LoRATarget, factors: dict[str, Factors]) -> None:
    """Add the adapter's product to `rows` [m, inputs] float32 of a layer's weight, in place.

    Args:
        first: the layer's row that is the first of them.
    """
    start = 0
    for part in target.slices:
        low = max(start, first)
        high = min(start + part.size, first + len(rows))
        found = factors.get(part.name)
        if found is not None and low < high:
            b = own_outputs(found.b, part)[low - start : high - start].float()
            a = found.a[:, target.input_start : target.input_start + target.inputs].float()
            rows[low - first : high - first] += b @ a * found.scale
        start += part.size


def _check_plain(model: nn.Module) -> None:
    """Check that the weights of the linears are read as numbers, not in a format's bits.

    Raises:
        UnsupportedModelError: they are not.
    """
    layers = [(path, each) for path, each in model.named_modules() if isinstance(each, _KINDS)]
    for shard in chain.from_iterable(layer.shards(path) for path, layer in layers):
        is_plain = shard.name.endswith((".weight", ".bias"))
        if not is_plain or not shard.target.is_floating_point() or shard.target.itemsize == 1:
            raise UnsupportedModelError(
                f"lora: the checkpoint has {shard.name} in few bits, to which an adapter cannot be "
                "added: use enable_lora=True and lora_request, or a checkpoint in 16 bits with "
                'quantization="int4"'
            )
