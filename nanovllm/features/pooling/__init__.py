"""Vectors and scores of texts: the hidden states of prompts, pooled."""
