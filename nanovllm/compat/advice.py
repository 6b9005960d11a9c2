"""Methods and keywords of vLLM's and nano-vllm's classes that are not here: what to use instead.

Knows no engine.
"""

import functools
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar

from nanovllm.errors import InvalidRequestError
from nanovllm.options.validation import other_names, shown

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

NOT_IMPLEMENTED = {
    "beam_search": "SamplingParams(n=...) draws several continuations",
    "score": "SamplingParams(prompt_logprobs=0) gives the log-probabilities of a text",
    **dict.fromkeys(
        ("encode", "embed", "classify", "reward"),
        "nanovllm generates only: use a library for embeddings and classifiers",
    ),
    **dict.fromkeys(
        ("collective_rpc", "apply_model"),
        "the workers run no code of the caller: update_weights() gives them weights",
    ),
    **dict.fromkeys(
        ("add_lora", "remove_lora", "list_loras", "pin_lora"),
        "give each request lora_request=LoRARequest(name, id, path)",
    ),
    **dict.fromkeys(
        ("enqueue", "enqueue_chat", "wait_for_completion"),
        "call generate() in several threads, or use AsyncLLM, or add_request() and step()",
    ),
    **dict.fromkeys(("start_profile", "stop_profile"), "use torch.profiler around generate()"),
    "set_tokenizer": "to use another tokenizer, give token ids as prompts",
    "preprocess_chat": "render() returns the token ids of a conversation",
    "tokenizer": "get_tokenizer() returns it",
}
"""vLLM's and nano-vllm's attributes that `LLM` and `AsyncLLM` lack, and what to use instead."""


_TEXT_ONLY = "the models here read text only; leave it out"

KEYWORDS = other_names(
    ("prompt_adapter_request", (), "put the text into the prompt"),
    ("guided_options_request", (), "use SamplingParams(structured_outputs=...)"),
    ("tokenization_kwargs", ({},), "use truncate_prompt_tokens, or give token ids as prompts"),
    ("mm_processor_kwargs", ({},), _TEXT_ONLY),
    ("chat_template_content_format", ("auto", "string"), "content is joined to a string"),
    ("trace_headers", (), "the server reads a request's trace from its headers; leave it out"),
    ("data_parallel_rank", (0,), "there is one copy of the model; leave it out"),
    ("prompt_text", (), 'use {"prompt": text, "prompt_token_ids": ids} as the prompt'),
)
"""Keywords of vLLM's methods that the methods here do not have."""

_WITHOUT_EFFECT = (
    *("usage_context", "start_engine_loop", "stat_loggers", "log_requests", "internal", "device"),
    *("disable_log_requests", "disable_log_stats", "enable_multiprocessing", "reset_connector"),
)
"""Keywords that are about vLLM's own processes and logs: any value is fine."""


class VLLMNames:
    """Base of classes that have vLLM's counterparts: says what to use for what is not there."""

    def __getattr__(self, name: str) -> NoReturn:
        use = f": {NOT_IMPLEMENTED[name]}" if name in NOT_IMPLEMENTED else ""
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}{use}", name=name, obj=self
        )


def takes_other_keywords(method: Callable[Parameters, Result]) -> Callable[..., Result]:
    """Let a method take vLLM's further keywords: those that ask for what happens anyway.

    The method then raises InvalidRequestError where a keyword of vLLM's asks for something else.
    """

    @functools.wraps(method)
    def checked(*args: Any, **keywords: Any) -> Result:
        for name in [name for name in keywords if name in KEYWORDS or name in _WITHOUT_EFFECT]:
            value, other = keywords.pop(name), KEYWORDS.get(name)
            if other is not None and not other.accepts(value):
                raise InvalidRequestError(f"{name}={shown(value)} is not supported: {other.advice}")
        return method(*args, **keywords)

    return checked
