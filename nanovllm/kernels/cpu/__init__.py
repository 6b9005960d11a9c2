"""The C kernels for CPUs: their sources, how they are built, called and recorded."""
