"""`SchedulerStats`: what the scheduler counts. Knows no sequence."""

import dataclasses

from nanovllm.outputs import DraftCounts


@dataclasses.dataclass(slots=True)
class SchedulerStats:
    """Counts since the engine started."""

    num_prefill_tokens: int = 0
    """Computed tokens from which no output token was sampled, without drafts."""
    num_decode_tokens: int = 0
    """Output tokens."""
    drafts: DraftCounts = dataclasses.field(default_factory=DraftCounts)
