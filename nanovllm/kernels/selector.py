"""Chooses the kernels for a device: C on CPUs, Triton on CUDA GPUs, else plain torch.

A warning says why where there are none.
"""

import functools
import importlib
import logging
from types import ModuleType

import torch

from nanovllm.kernels.cpu import ops as cpu_ops
from nanovllm.kernels.cpu.library import supports

logger = logging.getLogger(__name__)

_CAPABILITY = (8, 0)


def kernels_for(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """Return the module whose `add_rms_norm` and `silu_and_mul` take such tensors, or None."""
    if device.type == "cuda":
        return triton_kernels()
    return cpu_ops if supports(device, dtype) else None


def triton_kernels(module: str = "ops") -> ModuleType | None:
    """Return a module of Triton kernels, or None where they cannot be used on the current GPU."""
    return importlib.import_module(f"nanovllm.kernels.triton.{module}") if triton_serves() else None


@functools.cache
def triton_serves() -> bool:
    """Whether the Triton kernels can be used on the current GPU; the log says why not."""
    reason = _no_triton()
    if reason is not None:
        logger.warning("Triton kernels are off, plain torch serves, slower: %s", reason)
        return False
    logger.info("Triton kernels are on")
    return True


def _no_triton() -> str | None:
    """Return why the Triton kernels cannot be used, after trying one of them."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability < _CAPABILITY:
        return f"compute capability {capability} is below {_CAPABILITY}"
    try:
        from nanovllm.kernels.triton import ops as triton_ops

        ones = torch.ones(1, 64, dtype=torch.float32, device="cuda")
        wrong = (triton_ops.silu_and_mul(ones) - torch.nn.functional.silu(ones[:, :32])).abs().max()
        return None if wrong < 1e-5 else "the compiled kernels compute wrong numbers"
    except Exception as error:  # whatever the compilers and the driver raise
        return f"{type(error).__name__}: {error}"
