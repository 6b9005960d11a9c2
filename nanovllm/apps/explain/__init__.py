"""`nanovllm explain` and `--narrate`: what the engine does, step by step. Stands on `LLM`."""
