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
    if name == "LLM":  # imported on first use, because both classes import torch
        from nanovllm.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from nanovllm.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")


if importlib.util.find_spec("nanovllm.compat"):  # other engines' names; the folder may be deleted
    importlib.import_module("nanovllm.compat").install()
