"""Offline batches: the rows of a file through a model, each exactly once, whatever is killed.

The parts know no Ray: `nanovllm.apps.ray` runs the same rows on other machines.
"""
