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
    **dict.fromkeys(
        ("start_profile", "stop_profile"),
        "use the option trace for the engine's steps, or torch.profiler around generate()",
    ),
    "set_tokenizer": "to use another tokenizer, give token ids as prompts",
    "preprocess_chat": "render() returns the token ids of a conversation",
    "tokenizer": "get_tokenizer() returns it",
    "get_world_size": "it is the option tensor_parallel_size",
    **dict.fromkeys(
        ("supported_tasks", "get_supported_tasks"), "nanovllm generates only: it is one task"
    ),
    **dict.fromkeys(
        ("reset_mm_cache", "reset_encoder_cache"),
        "the models here read text only, so there is no such cache",
    ),
    **dict.fromkeys(
        ("pause_generation", "resume_generation", "is_paused", "wait_for_requests_to_drain"),
        "update_weights() and sleep() first end the requests in flight, or with mode='wait' "
        "await them",
    ),
    "release_kv_cache_memory": "sleep() gives it back, and wake_up() takes it again",
    **dict.fromkeys(
        ("checkpoint_prepare", "checkpoint_restore"),
        "sleep() gives memory back, and wake_up() takes it again",
    ),
    **dict.fromkeys(
        ("init_weight_transfer_engine", "shutdown_weight_transfer_engine"),
        "update_weights(pairs) takes tensors of any source: receive them, and give them",
    ),
    "start_draft_weight_update": "a draft model keeps its weights: its drafts change no token",
    **dict.fromkeys(
        ("update_weight_version", "set_weight_version"),
        "update_weights(pairs, weight_version=...) sets it",
    ),
    "get_weight_version": "each RequestOutput has its weight_version, and so has LLM",
    "compute_weight_checksums": "compare the prompt_logprobs of a text",
    **dict.fromkeys(
        ("get_num_unfinished_requests", "get_num_queued_tokens"),
        "get_metrics() counts the requests that run and wait",
    ),
    **dict.fromkeys(("do_log_stats", "do_log_stats_with_interval"), "get_metrics() counts"),
    "check_admission": "an engine takes all requests; the server has --max-waiting",
    "has_unfinished_requests_dp": "use has_unfinished_requests()",
    "is_tracing_enabled": "it is so if the option trace is given",
    **dict.fromkeys(
        ("notify_kv_transfer_request_rejected", "get_kv_event_sources"),
        "KV has no transfers and no events",
    ),
    **dict.fromkeys(
        ("scale_elastic_ep", "get_external_elastic_ep_status"),
        "the number of ranks is fixed: make another engine",
    ),
    **dict.fromkeys(
        (
            *("handle_fault", "get_status", "is_running", "is_stopped", "errored", "dead_error"),
            "should_keep_api_server_alive",
        ),
        "check_health() raises EngineDeadError if the engine is down",
    ),
}
"""vLLM's and nano-vllm's attributes that `LLM` and `AsyncLLM` lack, and what to use instead."""


LACKS = {
    "AsyncLLM": {
        "add_request": "stream(prompt, params) queues a request, and yields its outputs",
        **dict.fromkeys(
            ("start_weight_update", "finish_weight_update"),
            "update_weights(pairs, weight_version=...) is a whole update",
        ),
    },
    "LLMEngine": dict.fromkeys(
        ("sleep", "wake_up", "is_sleeping"), "LLM and AsyncLLM have it: use llm.sleep()"
    ),
}
"""The same for one class alone: another one has the attribute."""

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
        kind = type(self).__name__
        advice = {**NOT_IMPLEMENTED, **LACKS.get(kind, {})}
        use = f": {advice[name]}" if name in advice else ""
        raise AttributeError(f"{kind!r} object has no attribute {name!r}{use}", name=name, obj=self)


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
