"""Names, explanations and buckets of the metrics; most are vLLM's. Knows no values."""

from itertools import count, takewhile

_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_BETWEEN_TOKENS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_LAG = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_BOUNDS: dict[str, tuple[float, ...]] = {
    "vllm:time_to_first_token_seconds": _FIRST_TOKEN,
    "vllm:inter_token_latency_seconds": _BETWEEN_TOKENS,
    "vllm:request_time_per_output_token_seconds": _BETWEEN_TOKENS,
    "vllm:request_params_n": (1, 2, 5, 10, 20),
    "nanovllm:event_loop_lag_seconds": _LAG,
}
"""Upper bounds of the buckets of histograms; other seconds have those of `_LATENCY`."""

HISTOGRAM_HELP = {
    "vllm:time_to_first_token_seconds": "Seconds from a request's arrival to its first token.",
    "vllm:inter_token_latency_seconds": (
        "Seconds between output tokens; tokens that come together share the time."
    ),
    "vllm:request_time_per_output_token_seconds": (
        "Mean seconds between a continuation's output tokens."
    ),
    "vllm:e2e_request_latency_seconds": (
        "Seconds from a request's arrival to the end of a continuation."
    ),
    "vllm:request_queue_time_seconds": (
        "Seconds from a request's arrival until it was first scheduled."
    ),
    "vllm:request_inference_time_seconds": "Seconds from the first scheduling to the last token.",
    "vllm:request_prefill_time_seconds": "Seconds from the first scheduling to the first token.",
    "vllm:request_decode_time_seconds": "Seconds from the first token to the last.",
    "vllm:request_prompt_tokens": "Prompt tokens of a continuation.",
    "vllm:request_prefill_kv_computed_tokens": "Prompt tokens that were not in the prefix cache.",
    "vllm:request_generation_tokens": "Output tokens of a continuation.",
    "vllm:request_max_num_generation_tokens": "Output tokens of a request's longest continuation.",
    "vllm:request_params_n": "The parameter n.",
    "vllm:request_params_max_tokens": "The parameter max_tokens.",
    "nanovllm:event_loop_lag_seconds": (
        "How late the server's event loop wakes a task, in seconds."
    ),
}

ENGINE_HELP = {
    "vllm:num_requests_running": "Continuations that have a place in the batch.",
    "vllm:num_requests_waiting": "Continuations that wait for one.",
    "vllm:kv_cache_usage_perc": "Part of the KV cache in use; 1 is all of it.",
    "vllm:prompt_tokens": "Prompt tokens of the continuations that were admitted.",
    "vllm:generation_tokens": "Output tokens.",
    "vllm:prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Those of them that were found.",
    "vllm:num_preemptions": "Continuations that lost their KV because the cache was full.",
    "vllm:spec_decode_num_drafts": "Steps of a continuation with drafts.",
    "vllm:spec_decode_num_draft_tokens": "Proposed tokens.",
    "vllm:spec_decode_num_accepted_tokens": "Proposed tokens that were right.",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "The same by position in the draft.",
    "vllm:iteration_tokens_total": "Tokens that a step computed.",
    "nanovllm:prefill_tokens": "Computed tokens from which no output token was sampled.",
    "nanovllm:mean_acceptance_length": "Mean tokens of a step with a draft.",
    "nanovllm:host_cache_hits": "Tokens whose KV came back from host memory.",
    "nanovllm:store_cache_hits": "Tokens whose KV came back from kv_cache_dir.",
    "nanovllm:swapped_tokens": "Those of both whose continuation had been preempted.",
    "nanovllm:offloaded_pages": "Pages of KV that were copied to host memory.",
    "nanovllm:kv_loads": "Times that a continuation waited for KV from below the cache.",
    "nanovllm:failed_kv_loads": "Those of them that found some of it missing or damaged.",
}


def bucket_bounds(name: str, most_tokens: int) -> tuple[float, ...]:
    """Return the bounds of a histogram; those of tokens are 1, 2, 5, 10 ... to `most_tokens`."""
    if name in _BOUNDS or name.endswith("_seconds"):
        return _BOUNDS.get(name, _LATENCY)
    numbers = (digit * 10**power for power in count() for digit in (1, 2, 5))
    return tuple(takewhile(lambda number: number <= most_tokens, numbers))
