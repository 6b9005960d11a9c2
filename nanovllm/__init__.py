"""nanovllm: a small LLM inference engine. Start with `from nanovllm import LLM, SamplingParams`."""

from typing import TYPE_CHECKING, Any

from nanovllm.errors import NanoVLLMError
from nanovllm.options.config import Config
from nanovllm.options.lora_request import LoRARequest
from nanovllm.options.pooling_params import PoolingParams
from nanovllm.options.sampling_params import RequestOutputKind, SamplingParams
from nanovllm.options.structured_outputs import StructuredOutputsParams
from nanovllm.outputs import (
    CompletionOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)

if TYPE_CHECKING:
    from nanovllm.async_llm import AsyncLLM
    from nanovllm.llm import LLM

__version__ = "0.4.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Config",
    "EmbeddingRequestOutput",
    "LoRARequest",
    "NanoVLLMError",
    "PoolingParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
]


if not TYPE_CHECKING:  # a type checker finds misspelled names only without it

    def __getattr__(name: str) -> Any:
        """Import `LLM` and `AsyncLLM` on first use, because both import torch."""
        if name == "LLM":
            from nanovllm.llm import LLM

            return LLM
        if name == "AsyncLLM":
            from nanovllm.async_llm import AsyncLLM

            return AsyncLLM
        message = f"module 'nanovllm' has no attribute {name!r}"
        if name[:1].isupper():  # not a module that is to be imported
            from nanovllm.options.other_names import REMEDIES

            if name in REMEDIES:  # `from nanovllm import` shows an ImportError's message alone
                raise ImportError(f"{message}: {REMEDIES[name]}", name="nanovllm")
        raise AttributeError(message)
