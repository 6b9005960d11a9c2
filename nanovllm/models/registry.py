"""Maps architectures to model files. A new model family is one file here and one line below."""

import importlib

from torch import nn

from nanovllm.errors import UnsupportedModelError
from nanovllm.models.model_config import ModelConfig
from nanovllm.options.validation import shown
from nanovllm.speculation.proposers.eagle3_config import EAGLE3, Eagle3Config

_MODULES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def check_architecture(name: str) -> None:
    """Check that there is a model of this architecture.

    Raises:
        UnsupportedModelError: no model file implements it, or it is a draft head alone.
    """
    if name == EAGLE3:
        raise UnsupportedModelError(
            f"architecture {EAGLE3} is a draft head: name its target as the model, and the head in "
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
    if isinstance(config, Eagle3Config):
        module = "eagle3"
    else:
        check_architecture(config.architecture)
        module = _MODULES[config.architecture]
    return getattr(importlib.import_module(f"nanovllm.models.{module}"), config.architecture)
