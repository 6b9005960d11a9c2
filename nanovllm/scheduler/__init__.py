"""Decides what each step computes. Knows no tensors and no text."""
