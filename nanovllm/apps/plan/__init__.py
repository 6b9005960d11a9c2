"""`nanovllm lab plan`: the engine's own scheduler in virtual time, for many replicas."""
