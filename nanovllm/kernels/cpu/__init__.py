"""The C kernels for CPUs: sources, build, calls from Python, and recording of calls."""
