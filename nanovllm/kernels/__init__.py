"""Kernels: what torch does not have, or not fast enough. They know tensors, and no models."""
