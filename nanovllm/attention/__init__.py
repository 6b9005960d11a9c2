"""Attention over a paged KV cache: the backend's contract, and one file for each backend."""
