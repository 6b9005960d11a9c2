"""The linears of a model that adapters may change, according to its config alone."""

import dataclasses

import torch
from torch import nn

from nanovllm.features.lora.layer_parts import LoRATarget, Slice, layer_targets, named_slices
from nanovllm.models.model_config import ModelConfig
from nanovllm.worker.model_loader import make_modules


def adapter_targets(model_config: ModelConfig) -> dict[str, LoRATarget]:
    """Return this rank's layers that adapters may change, by their module's path in the model.

    Whatever form the checkpoint's weights have.
    """
    return layer_targets(_plain_twin(model_config))


def adapter_linears(model_config: ModelConfig) -> dict[str, Slice]:
    """Return what `named_slices` does, of a model with `model_config`."""
    model = _plain_twin(model_config)
    return named_slices(model, layer_targets(model).values())


def _plain_twin(model_config: ModelConfig) -> nn.Module:
    plain = dataclasses.replace(model_config, quantization_config=None)
    return make_modules(plain, 1, torch.device("meta"))
