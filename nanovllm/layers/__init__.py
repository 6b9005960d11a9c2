"""The parts that models are built of. Each shards itself over the tensor-parallel ranks while
loading.
"""
