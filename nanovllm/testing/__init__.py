"""What the tests and `nanovllm lab check` run schedulers with: a fake worker, random runs, and what
must hold meanwhile. Imports no torch.
"""
