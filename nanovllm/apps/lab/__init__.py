"""`nanovllm lab`: a place to try plugins."""
