"""The Triton kernels for CUDA GPUs. Every module here imports triton."""
