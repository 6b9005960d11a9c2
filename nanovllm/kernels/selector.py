"""Choose the kernels for a device: C on CPUs, Triton on CUDA GPUs, else plain torch.

Log a warning with the reason where the Triton kernels cannot run. Knows no layer and no model.
"""

import functools
import importlib
import logging
from types import ModuleType

import torch

from nanovllm.kernels.cpu import ops as cpu_ops
from nanovllm.kernels.cpu.library import supports

logger = logging.getLogger(__name__)

_MIN_CAPABILITY = (8, 0)


def kernels_for(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """Return the module whose `add_rms_norm` and `silu_and_mul` support such tensors, or None."""
    if device.type == "cuda":
        return triton_kernels("ops")
    return cpu_ops if supports(device, dtype) else None


def triton_kernels(module: str) -> ModuleType | None:
    """Return `nanovllm.kernels.triton.<module>`, or None where the current GPU cannot run it."""
    if not triton_available():
        return None
    return importlib.import_module(f"nanovllm.kernels.triton.{module}")


@functools.cache
def triton_available() -> bool:
    """Return whether the Triton kernels run on the current GPU; log why if they do not."""
    reason = _why_no_triton()
    if reason is not None:
        logger.warning("Triton kernels are off, using plain torch, which is slower: %s", reason)
        return False
    logger.info("Triton kernels are on")
    return True


def _why_no_triton() -> str | None:
    """Return why the Triton kernels cannot run, or None. Run one of them to find out."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability < _MIN_CAPABILITY:
        return f"compute capability {capability} is below {_MIN_CAPABILITY}"
    try:
        from nanovllm.kernels.triton import ops as triton_ops

        ones = torch.ones(1, 64, dtype=torch.float32, device="cuda")
        expected = torch.nn.functional.silu(ones[:, :32])
        difference = (triton_ops.silu_and_mul(ones) - expected).abs().max()
        return None if difference < 1e-5 else "the compiled kernels compute wrong numbers"
    except Exception as error:  # the compilers and the driver raise many types
        return f"{type(error).__name__}: {error}"
