"""`LoRARequest` where vLLM has it."""

from nanovllm.options.lora_request import LoRARequest

__all__ = ["LoRARequest"]
