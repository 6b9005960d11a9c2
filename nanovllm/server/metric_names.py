"""Names, explanations and buckets of the metrics; most are vLLM's. Knows no values."""

from itertools import count, takewhile
from typing import NamedTuple

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


class HistogramName(NamedTuple):
    """What is known of a histogram before there are values."""

    help: str
    bounds: tuple[float, ...] | None
    """Upper bounds of its buckets; None: those of `token_buckets`."""


REQUEST_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": HistogramName(
        "Seconds from a request's arrival to its first token.", _FIRST_TOKEN
    ),
    "vllm:inter_token_latency_seconds": HistogramName(
        "Seconds between output tokens; tokens that come together share the time.", _BETWEEN_TOKENS
    ),
    "vllm:request_time_per_output_token_seconds": HistogramName(
        "Mean seconds between a continuation's output tokens.", _BETWEEN_TOKENS
    ),
    "vllm:e2e_request_latency_seconds": HistogramName(
        "Seconds from a request's arrival to the end of a continuation.", _LATENCY
    ),
    "vllm:request_queue_time_seconds": HistogramName(
        "Seconds from a request's arrival until it was first scheduled.", _LATENCY
    ),
    "vllm:request_inference_time_seconds": HistogramName(
        "Seconds from the first scheduling to the last token.", _LATENCY
    ),
    "vllm:request_prefill_time_seconds": HistogramName(
        "Seconds from the first scheduling to the first token.", _LATENCY
    ),
    "vllm:request_decode_time_seconds": HistogramName(
        "Seconds from the first token to the last.", _LATENCY
    ),
    "vllm:request_prompt_tokens": HistogramName("Prompt tokens of a continuation.", None),
    "vllm:request_prefill_kv_computed_tokens": HistogramName(
        "Prompt tokens that were not in the prefix cache.", None
    ),
    "vllm:request_generation_tokens": HistogramName("Output tokens of a continuation.", None),
    "vllm:request_max_num_generation_tokens": HistogramName(
        "Output tokens of a request's longest continuation.", None
    ),
    "vllm:request_params_n": HistogramName("The parameter n.", (1, 2, 5, 10, 20)),
    "vllm:request_params_max_tokens": HistogramName("The parameter max_tokens.", None),
    "nanovllm:event_loop_lag_seconds": HistogramName(
        "How late the server's event loop wakes a task, in seconds.", _LAG
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


def token_buckets(most: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50 and so on, up to `most`."""
    numbers = (digit * 10**power for power in count() for digit in (1, 2, 5))
    return tuple(takewhile(lambda number: number <= most, numbers))
