"""Speculative decoding: how many drafts pay, who proposes them."""
