"""Which file implements which architecture. A new family is a file here and a line below."""

import importlib

from torch import nn

from nanovllm.errors import UnsupportedModelError
from nanovllm.models.config import ModelConfig

_MODULES = {"Qwen3ForCausalLM": "qwen3"}


def model_class(config: ModelConfig) -> type[nn.Module]:
    """Return the class that implements `config.architecture`.

    Raises:
        UnsupportedModelError: none does.
    """
    module = _MODULES.get(config.architecture)
    if module is None:
        raise UnsupportedModelError(
            f"architecture {config.architecture!r} is not supported ({', '.join(_MODULES)})"
        )
    found: type[nn.Module] = getattr(
        importlib.import_module(f"nanovllm.models.{module}"), config.architecture
    )
    return found
