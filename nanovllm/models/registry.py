"""Maps architectures to model files. A new model family is one file here and one line below."""

import importlib

from torch import nn

from nanovllm.errors import UnsupportedModelError
from nanovllm.models.model_config import ModelConfig
from nanovllm.options.validation import shown

_MODULES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_EAGLE3 = "LlamaForCausalLMEagle3"


def check_architecture(name: str) -> None:
    """Check that there is a model of this architecture.

    Raises:
        UnsupportedModelError: no model file implements it, or it is a draft head alone.
    """
    if name == _EAGLE3:
        raise UnsupportedModelError(
            f"architecture {name} is a draft head: name its target as the model, and the head in "
            "speculative_config"
        )
    if name not in _MODULES:
        raise UnsupportedModelError(
            f"architecture {shown(name)} is not supported ({', '.join(_MODULES)})"
        )


def model_class(config: ModelConfig) -> type[nn.Module]:
    """Return the class that implements `config.architecture`.

    Raises:
        UnsupportedModelError: as for `check_architecture`.
    """
    module = config.module
    if module is None:
        check_architecture(config.architecture)
        module = f"nanovllm.models.{_MODULES[config.architecture]}"
    return getattr(importlib.import_module(module), config.architecture)
