"""Copies between the host and a device that do not wait for the device."""

from array import array
from collections.abc import Sequence as Seq

import torch


def upload(values: Seq[int], device: torch.device) -> torch.Tensor:
    """Return host numbers as [len(values)] int64 on `device`."""
    if not values:
        return torch.empty(0, dtype=torch.int64, device=device)
    host = torch.frombuffer(array("q", values), dtype=torch.int64)
    if device.type == "cuda":
        host = host.pin_memory()  # torch keeps the pinned memory until the copy is done
    return host.to(device, non_blocking=True)


def to_host(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of `x` on the host. From CUDA it is not complete when this returns."""
    if not x.is_cuda:
        return x.clone()
    copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return copy.copy_(x, non_blocking=True)
