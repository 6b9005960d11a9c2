"""Decides which tokens each step computes and which KV blocks hold them. Knows no tensors."""
