"""Choose the kernels for a device: C on CPUs, Triton on CUDA GPUs, otherwise plain torch.

Log a warning with the reason where the Triton kernels cannot run, or raise an error that says what
to install.
"""

import functools
import importlib.util
import logging
import os
import shutil
import sysconfig
from typing import NamedTuple

import torch

from nanovllm.errors import ConfigError
from nanovllm.kernels.cpu.kernels import CKernels, CSamplingKernels, OneDnnKernels
from nanovllm.kernels.cpu.library import library
from nanovllm.kernels.torch_kernels import TORCH, Kernels

logger = logging.getLogger(__name__)

_MIN_CAPABILITY = (8, 0)


def select_kernels(device: torch.device, dtype: torch.dtype, *, native: bool = True) -> Kernels:
    """Return the fastest kernels for a model of `dtype` on `device`.

    Args:
        native: whether they may be others than plain torch.
    """
    if native and device.type == "cuda" and triton_available():
        from nanovllm.kernels.triton.kernels import TritonKernels

        return TritonKernels()
    if not native or device.type != "cpu":
        return TORCH
    if library() is None:
        return OneDnnKernels()
    return CKernels() if dtype == torch.bfloat16 else CSamplingKernels()


@functools.cache
def triton_available() -> bool:
    """Return whether the Triton kernels run on the current GPU; log why if they do not."""
    refusal = _refusal()
    if refusal is not None:
        reason = refusal.reason
        logger.warning("Triton kernels are off, using plain torch, which is slower: %s", reason)
        return False
    logger.info("Triton kernels are on")
    return True


def require_triton(device: str) -> None:
    """Check that the Triton kernels run: naming a GPU must not give a slow engine unasked.

    Args:
        device: as the user named it, for the message.

    Raises:
        ConfigError: they do not.
    """
    refusal = _refusal()
    if refusal is None:
        return
    cause = f"cannot run: {refusal.reason:.300}"
    remedy = "choose"
    if refusal.missing is not None:
        cause = f"cannot be compiled, because {refusal.missing} ({refusal.reason:.300})"
        remedy = "or choose"
    raise ConfigError(
        f"device {device!r}: the Triton kernels {cause}; {remedy} plain torch, which is slower and "
        "has no CUDA graphs, with native_kernels=False"
    )


class _Refusal(NamedTuple):
    """Why the Triton kernels cannot run."""

    reason: str
    missing: str | None = None
    """What is missing and how to install it; None if nothing can be installed."""


@functools.cache
def _refusal() -> _Refusal | None:
    """Return why the Triton kernels cannot run, or None. Run one of them to find out."""
    if not torch.cuda.is_available():
        return _Refusal("there is no CUDA device")
    capability = torch.cuda.get_device_capability()
    if capability < _MIN_CAPABILITY:
        return _Refusal(f"compute capability {capability} is below {_MIN_CAPABILITY}")
    try:
        from nanovllm.kernels.triton import ops as triton_ops

        ones = torch.ones(1, 64, dtype=torch.float32, device="cuda")
        expected = torch.nn.functional.silu(ones[:, :32])
        difference = (triton_ops.act_and_mul(ones) - expected).abs().max().item()
    except Exception as error:  # the compilers and the driver raise many types
        return _Refusal(f"{type(error).__name__}: {error}", _missing_tool())
    return None if difference < 1e-5 else _Refusal("the compiled kernels compute wrong numbers")


def _missing_tool() -> str | None:
    """Return which of the tools is missing with which Triton compiles, and how to install it."""
    if importlib.util.find_spec("triton") is None:
        return "the triton package is missing: pip install triton"
    if "CC" not in os.environ and not (shutil.which("gcc") or shutil.which("clang")):
        return "there is no C compiler: install gcc, or name another one in CC"
    include = sysconfig.get_path("include", "posix_prefix")  # where Triton looks
    if not os.path.isfile(os.path.join(include, "Python.h")):
        return f"{include} has no Python.h: install Python's headers (python3-dev, python3-devel)"
    return None
