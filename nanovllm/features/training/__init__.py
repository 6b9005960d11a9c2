"""Weights that change under a running engine: sleep, wake_up and update_weights.

Without this folder an engine keeps the weights that it loaded.
"""
