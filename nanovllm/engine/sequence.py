"""`Sequence`, in the place that nano-vllm has it."""

from nanovllm.scheduler.sequence import Sequence

__all__ = ["Sequence"]
