"""Attention over a paged KV cache: the contract of a backend, and one file for each backend."""
