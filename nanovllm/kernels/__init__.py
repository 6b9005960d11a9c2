"""Kernels written for nanovllm: C for CPUs, Triton for CUDA GPUs. They know tensors only."""
