"""`ModelRunner`, in the place that nano-vllm has it."""

from nanovllm.worker.model_runner import ModelRunner

__all__ = ["ModelRunner"]
