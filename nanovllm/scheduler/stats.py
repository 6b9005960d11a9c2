"""`SchedulerStats`: what the scheduler counts."""

import dataclasses
from collections import Counter


@dataclasses.dataclass(slots=True)
class TierStats:
    """Counts since the engine started."""

    num_host_tokens: int = 0
    """Tokens whose KV came from host memory."""
    num_store_tokens: int = 0
    """Tokens whose KV came from a byte store."""
    num_swapped_tokens: int = 0
    """Those of both whose sequence had been preempted."""
    num_loads: int = 0
    """Loads that have ended."""
    num_failed_loads: int = 0
    """Those of them of which a part was missing or wrong."""
    num_offloaded_pages: int = 0
    """Pages that were copied to host memory."""


@dataclasses.dataclass(slots=True)
class SchedulerStats:
    """Counts since the engine started."""

    num_prefill_tokens: int = 0
    """Computed tokens from which no output token was sampled, without drafts."""
    num_decode_tokens: int = 0
    """Output tokens."""
    num_prompt_tokens: int = 0
    """Prompt tokens of the sequences that were admitted, each counted once."""
    num_queried_tokens: int = 0
    """Those of them that were looked up in the prefix cache."""
    num_cached_tokens: int = 0
    """Those of them whose KV came from the prefix cache."""
    num_preemptions: int = 0
    """Sequences that lost their KV because the pool was full."""
    step_sizes: Counter[int] = dataclasses.field(default_factory=Counter)
    """Launched steps, by the number of tokens that they compute."""
    tiers: TierStats | None = None
    """None: there is no tier below the pool."""

    def count_prompt(self, num_tokens: int, num_cached: int, *, queries: bool) -> None:
        """Count the prompt of a sequence that was admitted for the first time.

        Args:
            queries: whether it was looked up in the prefix cache.
        """
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached
        self.num_queried_tokens += num_tokens * queries
