"""Whether the answers of another engine depend on how they are computed, and what the order costs.

`python -m benchmarks.exactness vllm --model DIR --python PYTHON` sends the requests of `nanovllm
prove` to an engine, alone and then in the ways that it has; `python -m benchmarks.exactness.cost`
measures what the fixed order of our sums costs.
"""
