"""The adapters that an engine knows: each is read and checked when a request first names it.

Keeps paths and digests, not weights: thousands may be known. The workers read an adapter again when
a slot takes it.
"""

import dataclasses
import logging
import threading
from collections.abc import Mapping

import torch
from torch import nn

from nanovllm.core.messages import AdapterSlot
from nanovllm.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from nanovllm.features.lora.layer_parts import LoRATarget, Slice, layer_targets, named_slices
from nanovllm.features.lora.peft_files import fitting, read_adapter
from nanovllm.loading.hub import Checkpoint
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.registry import read_config
from nanovllm.options.config import Config
from nanovllm.options.lora_request import LoRARequest
from nanovllm.options.validation import shown
from nanovllm.worker.model_loader import make_modules

logger = logging.getLogger(__name__)


class AdapterRegistry:
    """Adapters by id. Several threads may call it at once."""

    def __init__(self, linears: Mapping[str, Slice], max_rank: int) -> None:
        self._linears = linears
        self._max_rank = max_rank
        self._known: dict[int, tuple[LoRARequest, AdapterSlot]] = {}
        self._reading = threading.Lock()  # for one adapter at a time; others are found meanwhile

    def find(self, lora_request: LoRARequest | None) -> AdapterSlot | None:
        """Return the adapter that a request names; read and check it if it is new.

        Raises:
            InvalidRequestError: it is not an adapter of this model, or its id is another's.
        """
        if lora_request is None:
            return None
        if not isinstance(lora_request, LoRARequest):
            raise InvalidRequestError(
                f"lora_request must be a LoRARequest or None, got {shown(lora_request)}"
            )
        if (known := self._same(lora_request)) is not None:
            return known
        with self._reading:
            if (known := self._same(lora_request)) is not None:  # another thread has read it
                return known
            adapter = self._read(lora_request)
            self._known[lora_request.lora_int_id] = lora_request, adapter
            return adapter

    def _same(self, given: LoRARequest) -> AdapterSlot | None:
        """Return the adapter that was read for the id before; None: it is to be read."""
        if given.lora_int_id not in self._known or given.load_inplace:
            return None
        known, adapter = self._known[given.lora_int_id]
        if (known.lora_name, known.lora_path) != (given.lora_name, given.lora_path):
            raise InvalidRequestError(
                f"lora_int_id {given.lora_int_id} is that of adapter {shown(known.lora_name)} at "
                f"{shown(known.lora_path)}, not of {shown(given.lora_name)} at "
                f"{shown(given.lora_path)}: give each adapter an id of its own, or "
                "load_inplace=True to replace it"
            )
        return adapter

    def _read(self, lora_request: LoRARequest) -> AdapterSlot:
        try:
            adapter = read_adapter(lora_request.lora_path, self._max_rank)
            fitting(adapter, self._linears)
        except (CheckpointError, UnsupportedModelError, InvalidRequestError, OSError) as error:
            raise InvalidRequestError(
                f"lora_request {shown(lora_request.lora_name)}: {error}"
            ) from error
        logger.info("adapter %s: %s", lora_request.lora_name, lora_request.lora_path)
        return AdapterSlot(-1, lora_request.lora_path, adapter.digest)


def make_registry(config: Config, checkpoint: Checkpoint) -> AdapterRegistry:
    """Return an empty registry for the model of `checkpoint`."""
    model_config = read_config(checkpoint.config, config.dtype, config.model_family)
    return AdapterRegistry(adapter_linears(model_config), config.max_lora_rank)


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
