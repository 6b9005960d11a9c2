"""Shared by all tensor tiers: checkpoint files, weight loading, the tensor-parallel group."""
