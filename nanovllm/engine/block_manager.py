"""`BlockManager`, in the place that nano-vllm has it."""

from nanovllm.scheduler.block_manager import Block, BlockManager

__all__ = ["Block", "BlockManager"]
