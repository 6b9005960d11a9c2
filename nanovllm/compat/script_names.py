"""What scripts import from vLLM beside engines and options: types of prompts, clean-up."""

import gc
from typing import NotRequired, TypedDict

from nanovllm.compat.generation import AsyncLLM
from nanovllm.engine.prompt import PromptInput

AsyncLLMEngine = AsyncLLM
PromptType = PromptInput


class TextPrompt(TypedDict):
    """A prompt of text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt of token ids, with its text if the output is to show it."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free engines that nothing refers to any more."""
    gc.collect()
