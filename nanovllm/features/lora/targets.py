"""The linears of a model that adapters may change, according to its config alone."""

import dataclasses

import torch

from nanovllm.features.lora.layer_parts import Target, layer_targets
from nanovllm.models.model_config import ModelConfig
from nanovllm.worker.model_loader import make_modules


def adapter_targets(model_config: ModelConfig) -> dict[str, Target]:
    """Return this rank's layers that adapters may change, by their module's path in the model.

    Whatever form the checkpoint's weights have.
    """
    plain = dataclasses.replace(model_config, quantization_config=None)
    return layer_targets(make_modules(plain, 1, torch.device("meta")))


def adapter_linears(model_config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the outputs and inputs of each checkpoint linear that adapters may change, by path."""
    targets = adapter_targets(model_config).values()
    return {part.name: part.shape for target in targets for part in target.slices}
