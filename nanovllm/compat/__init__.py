"""Names and methods of vLLM and nano-vllm. Without this folder nothing else changes."""
