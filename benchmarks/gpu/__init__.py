"""Tests and measurements on a CUDA machine: `python -m benchmarks.gpu --out DIR`.

One file for each part, and what the parts share. docs/benchmarks/README.md explains the results.
"""
