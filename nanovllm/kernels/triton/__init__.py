"""The Triton kernels for CUDA GPUs. Importing a module here imports triton."""
