"""`SchedulerStats`: what the scheduler counts. Knows no sequence."""

import dataclasses
from collections import Counter


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
