"""Maps architectures to model files. A new model family is one file here and one line below."""

import importlib

from torch import nn

from nanovllm.errors import UnsupportedModelError
from nanovllm.models.config import ModelConfig
from nanovllm.models.eagle3_config import EAGLE3, Eagle3Config
from nanovllm.validation import shown

_MODULES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def model_class(config: ModelConfig) -> type[nn.Module]:
    """Return the class that implements `config.architecture`.

    Raises:
        UnsupportedModelError: no model file implements it, or it is a draft head alone.
    """
    module = _MODULES.get(config.architecture)
    if config.architecture == EAGLE3:
        if not isinstance(config, Eagle3Config):
            raise UnsupportedModelError(
                f"architecture {EAGLE3} is a draft head: name its target as the model, and the "
                "head in speculative_config"
            )
        module = "eagle3"
    if module is None:
        raise UnsupportedModelError(
            f"architecture {shown(config.architecture)} is not supported ({', '.join(_MODULES)})"
        )
    return getattr(importlib.import_module(f"nanovllm.models.{module}"), config.architecture)
