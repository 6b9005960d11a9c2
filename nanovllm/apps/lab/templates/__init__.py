"""The files that `nanovllm lab new` writes: a minimal plugin of each kind."""
