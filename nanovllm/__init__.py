"""nanovllm: a small LLM inference engine. Start with `from nanovllm import LLM, SamplingParams`."""

import importlib.util
from typing import TYPE_CHECKING, Any

from nanovllm.errors import NanoVLLMError
from nanovllm.options.config import Config
from nanovllm.options.lora_request import LoRARequest
from nanovllm.options.sampling_params import RequestOutputKind, SamplingParams
from nanovllm.options.structured_outputs import StructuredOutputsParams
from nanovllm.outputs import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from nanovllm.async_llm import AsyncLLM
    from nanovllm.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Config",
    "LoRARequest",
    "NanoVLLMError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> Any:
    homes = {"LLM": "nanovllm.llm", "AsyncLLM": "nanovllm.async_llm"}
    if name not in homes:
        raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")
    # On first use, because both import torch.
    return getattr(importlib.import_module(homes[name]), name)


if importlib.util.find_spec("nanovllm.compat"):  # other engines' names; the folder may be deleted
    importlib.import_module("nanovllm.compat").install()
