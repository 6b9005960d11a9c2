"""`Config`, in the place that nano-vllm has it."""

from nanovllm.options.config import Config

__all__ = ["Config"]
