"""Kernels of our own: C for CPUs, Triton for CUDA GPUs. Below everything that calls them."""
