"""The engine's numbers by their names: vLLM's where vLLM has them. Owns and changes nothing."""

from collections.abc import Mapping

from nanovllm.core.worker_info import WorkerInfo, pages_for
from nanovllm.outputs import Counter, Gauge, Histogram, Metric, Vector
from nanovllm.scheduler.scheduler import Scheduler

_STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the buckets, in tokens: vLLM's."""


def kv_cache_tokens(info: WorkerInfo) -> int:
    """Return how many tokens the KV pool holds: with window groups or states, in sequences of
    max_model_len that generate.
    """
    if not info.kv.windows and not info.kv.state_pages:
        return info.num_blocks * info.block_size
    of_one = (
        pages_for(info.max_model_len, info.block_size, info.kv.windows, 1) + info.kv.state_pages
    )
    return info.num_blocks * info.max_model_len // of_one


def read_metrics(scheduler: Scheduler, num_held: int = 0) -> list[Metric | Vector | Histogram]:
    """Return what `LLMEngine.get_metrics` returns.

    Args:
        num_held: how many sequences wait besides those of the scheduler.
    """
    stats = scheduler.stats
    pool = scheduler.block_manager
    found: list[Metric | Vector | Histogram] = [
        Gauge("vllm:num_requests_running", len(scheduler.running)),
        Gauge("vllm:num_requests_waiting", scheduler.num_waiting + num_held),
        Gauge("vllm:kv_cache_usage_perc", 1 - pool.num_free_blocks / len(pool.blocks)),
        Counter("vllm:prefix_cache_queries", stats.num_queried_tokens),
        Counter("vllm:prefix_cache_hits", stats.num_cached_tokens),
        Counter("vllm:num_preemptions", stats.num_preemptions),
        Counter("vllm:prompt_tokens", stats.num_prompt_tokens),
        Counter("vllm:generation_tokens", stats.num_decode_tokens),
        Counter("nanovllm:prefill_tokens", stats.num_prefill_tokens),
        _step_sizes(stats.step_sizes),
    ]
    if stats.tiers is not None:
        found += [
            Counter("nanovllm:host_cache_hits", stats.tiers.num_host_tokens),
            Counter("nanovllm:store_cache_hits", stats.tiers.num_store_tokens),
            Counter("nanovllm:swapped_tokens", stats.tiers.num_swapped_tokens),
            Counter("nanovllm:offloaded_pages", stats.tiers.num_offloaded_pages),
            Counter("nanovllm:kv_loads", stats.tiers.num_loads),
            Counter("nanovllm:failed_kv_loads", stats.tiers.num_failed_loads),
        ]
    if scheduler.drafting is not None:
        drafts = scheduler.drafting.counts
        prefix = "vllm:spec_decode_num"
        found += [
            Counter(f"{prefix}_drafts", drafts.num_drafts),
            Counter(f"{prefix}_draft_tokens", drafts.num_draft_tokens),
            Counter(f"{prefix}_accepted_tokens", drafts.num_accepted_tokens),
            Vector(f"{prefix}_accepted_tokens_per_pos", list(drafts.num_accepted_tokens_per_pos)),
            Gauge("nanovllm:mean_acceptance_length", drafts.mean_acceptance_length),
        ]
    return found


def _step_sizes(counts: Mapping[int, int]) -> Histogram:
    """Return how many tokens the steps computed, from the number of steps by their tokens."""
    num_steps = sum(counts.values())
    buckets = {
        str(float(bound)): sum(count for size, count in counts.items() if size <= bound)
        for bound in _STEP_SIZES
    }
    num_tokens = sum(size * count for size, count in counts.items())
    name = "vllm:iteration_tokens_total"
    return Histogram(name, num_steps, num_tokens, {**buckets, "+Inf": num_steps})
