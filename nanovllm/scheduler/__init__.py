"""Decides which tokens each step computes and which KV blocks hold them. Does not import torch."""
