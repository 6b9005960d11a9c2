"""Requests for the prompts of one call: which options are one for all, and which one for each.

Knows no engine.
"""

from typing import Any

from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.prompt import PromptInput, as_list, one_for_each
from nanovllm.engine.request import Request
from nanovllm.errors import InvalidRequestError


def make_requests(
    processor: InputProcessor, prompts: Any, params: Any, priority: Any, lora_request: Any
) -> list[Request]:
    """Return a request for each prompt of `LLM.generate`.

    Args:
        params, priority, lora_request: each is one for all prompts, or a list with one for each.

    Raises:
        InvalidRequestError: a prompt or a parameter is invalid; the message has the prompt's index.
    """
    found: list[PromptInput] = as_list(prompts)
    all_params = one_for_each("sampling_params", params, len(found))
    priorities = one_for_each("priority", priority, len(found))
    adapters = one_for_each("lora_request", lora_request, len(found))
    requests = []
    for index, (prompt, own) in enumerate(zip(found, all_params, strict=True)):
        options = {"priority": priorities[index], "lora_request": adapters[index]}
        try:
            requests.append(processor.make_request(prompt, own, **options))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"prompt {index}: {error}") from None
    return requests
