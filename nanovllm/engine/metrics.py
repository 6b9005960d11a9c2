"""The engine's numbers by their names: vLLM's where vLLM has them. Owns and changes nothing."""

from nanovllm.outputs import Metric, Vector
from nanovllm.scheduler.scheduler import Scheduler


def read_metrics(scheduler: Scheduler) -> list[Metric | Vector]:
    """Return what `LLMEngine.get_metrics` returns."""
    stats, pool = scheduler.stats, scheduler.block_manager
    found: list[Metric | Vector] = [
        Metric("vllm:num_requests_running", len(scheduler.running)),
        Metric("vllm:num_requests_waiting", scheduler.num_waiting),
        Metric("vllm:kv_cache_usage_perc", 1 - pool.num_free_blocks / len(pool.blocks)),
        Metric("vllm:prefix_cache_queries", stats.num_queried_tokens),
        Metric("vllm:prefix_cache_hits", stats.num_cached_tokens),
        Metric("vllm:num_preemptions", stats.num_preemptions),
        Metric("vllm:prompt_tokens", stats.num_prompt_tokens),
        Metric("vllm:generation_tokens", stats.num_decode_tokens),
        Metric("nanovllm:prefill_tokens", stats.num_prefill_tokens),
    ]
    if scheduler.draft_controller is not None:
        drafts, prefix = stats.drafts, "vllm:spec_decode_num"
        found += [
            Metric(f"{prefix}_drafts", drafts.num_drafts),
            Metric(f"{prefix}_draft_tokens", drafts.num_draft_tokens),
            Metric(f"{prefix}_accepted_tokens", drafts.num_accepted_tokens),
            Vector(f"{prefix}_accepted_tokens_per_pos", list(drafts.num_accepted_tokens_per_pos)),
            Metric("nanovllm:mean_acceptance_length", drafts.mean_acceptance_length),
        ]
    return found
