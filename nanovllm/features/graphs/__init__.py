"""Faster ways to run a step of known shape: recorded calls, CUDA graphs, pieces, fused kernels."""
