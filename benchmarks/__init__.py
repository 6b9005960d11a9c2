"""Measurements of the engine and its parts. Run each as `python -m benchmarks.NAME`, from the root
of the repository; README.md has a table of them.
"""
