"""A stand-in for CUDA, over which benchmarks.gpu runs to its end on a machine without a GPU."""
