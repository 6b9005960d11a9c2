"""`BlockManager`, in the place that nano-vllm has it."""

from nanovllm.kv.block_manager import BlockManager
from nanovllm.kv.pool import Block

__all__ = ["Block", "BlockManager"]
