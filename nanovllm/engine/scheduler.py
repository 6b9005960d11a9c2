"""`Scheduler`, in the place that nano-vllm has it."""

from nanovllm.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
