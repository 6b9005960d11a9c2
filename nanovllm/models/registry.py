"""Maps architectures to model files. A new model family is one file here and one line below."""

import importlib

from torch import nn

from nanovllm.errors import UnsupportedModelError
from nanovllm.models.config import ModelConfig
from nanovllm.validation import shown

_MODULES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def model_class(config: ModelConfig) -> type[nn.Module]:
    """Return the class that implements `config.architecture`.

    Raises:
        UnsupportedModelError: no model file implements it.
    """
    module = _MODULES.get(config.architecture)
    if module is None:
        raise UnsupportedModelError(
            f"architecture {shown(config.architecture)} is not supported ({', '.join(_MODULES)})"
        )
    return getattr(importlib.import_module(f"nanovllm.models.{module}"), config.architecture)
