"""`Sequence`, in the place that nano-vllm has it."""

from nanovllm.core.sequence import Sequence

__all__ = ["Sequence"]
