"""CUDA GPUs: Triton kernels; where these do not run, plain torch and a warning, or an error."""

import contextlib
import functools
import importlib.util
import logging
import os
import shutil
import sysconfig
from array import array
from collections.abc import Callable, Iterator, Sequence as Seq
from typing import Any, ClassVar, NamedTuple

import torch

from nanovllm.attention.backend import Backend
from nanovllm.errors import ConfigError
from nanovllm.kernels.torch_kernels import TORCH, Kernels
from nanovllm.platform import Event, Platform
from nanovllm.utils.distributed import NCCL, Collectives

logger = logging.getLogger(__name__)

_MIN_CAPABILITY = (8, 0)
_MATMUL = torch.backends.cuda.matmul
_REDUCED = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
"""Where cuBLAS cuts a long sum into parts, torch by default allows it to add them up in 16 bits."""


class CUDAEvent:
    """An `Event` on the current stream."""

    def __init__(self, *, timed: bool) -> None:
        self._event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        self._event.record()

    def synchronize(self) -> None:
        self._event.synchronize()

    def seconds_until(self, later: "CUDAEvent") -> float:
        return float(self._event.elapsed_time(later._event)) / 1000


class CUDA(Platform):
    """One GPU."""

    runs_ahead: ClassVar[bool] = True
    captures_graphs: ClassVar[bool] = True
    collectives: ClassVar[Collectives] = NCCL

    @classmethod
    def find(cls, asked: str, rank: int, num_ranks: int) -> torch.device:
        if not torch.cuda.is_available():
            raise ConfigError(f'device {asked!r}: torch finds no CUDA GPU here; use device="cpu"')
        device = torch.device(asked) if ":" in asked else torch.device("cuda", rank)
        needed = max(num_ranks, device.index + 1)
        if torch.cuda.device_count() < needed:
            raise ConfigError(
                f"tensor_parallel_size {num_ranks} on {asked!r} needs "
                f"{needed} GPUs, torch finds {torch.cuda.device_count()}"
            )
        return device

    @classmethod
    def is_available(cls) -> bool:
        return torch.cuda.is_available()

    def fingerprint(self) -> dict[str, Any]:
        return {
            "name": torch.cuda.get_device_name(self.device),
            "capability": torch.cuda.get_device_capability(self.device),
            "cuda": torch.version.cuda,
        }

    def kernels(self, dtype: torch.dtype, *, native: bool = True) -> Kernels:
        """See `Platform`. Naming a GPU must not give a slow engine unasked."""
        if native and self.asked != "auto":
            require_triton(self.asked)
        if native and triton_available():
            from nanovllm.kernels.triton.kernels import TritonKernels

            return TritonKernels()
        return TORCH

    def attention_backends(self, kernels: Kernels) -> Iterator[type[Backend]]:
        if kernels.name == "triton":
            from nanovllm.attention.flash_attn import FlashAttnBackend
            from nanovllm.attention.triton import TritonBackend

            yield FlashAttnBackend
            yield TritonBackend
        yield from super().attention_backends(kernels)

    @contextlib.contextmanager
    def current(self, num_threads: int) -> Iterator[None]:
        """See `Platform`. Sums are in full precision inside."""
        allowed = [name for name in _REDUCED if getattr(_MATMUL, name)]
        with torch.cuda.device(self.device), super().current(num_threads):
            try:
                for name in allowed:
                    setattr(_MATMUL, name, False)
                yield
            finally:
                for name in allowed:
                    setattr(_MATMUL, name, True)

    def make_current(self, num_threads: int) -> None:
        torch.cuda.set_device(self.device)
        for name in _REDUCED:
            setattr(_MATMUL, name, False)

    def pool_bytes(self, utilization: float, num_ranks: int, warm_up: Callable[[], int]) -> int:
        """See `Platform`: `utilization` of the GPU less this process's peak and the graphs.

        It is at most what is free now, less what the largest step allocates above the present.
        """
        graph_bytes = warm_up()
        self.synchronize()
        peak = torch.cuda.max_memory_allocated(self.device)
        current = torch.cuda.memory_allocated(self.device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        budget = int(total * utilization) - peak
        return min(budget, free - (peak - current)) - graph_bytes

    def used_bytes(self) -> int:
        """See `Platform`. torch's unused cache does not count."""
        self.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def upload(self, values: Seq[int]) -> torch.Tensor:
        """See `Platform`. torch keeps the pinned memory until the copy is done."""
        if not values:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        host = torch.frombuffer(array("q", values), dtype=torch.int64).pin_memory()
        return host.to(self.device, non_blocking=True)

    def to_host(self, x: torch.Tensor) -> torch.Tensor:
        """See `Platform`. A tensor of the host, to which a step writes, is copied at once."""
        if not x.is_cuda:
            return x.clone()
        return self.staging(tuple(x.shape), x.dtype).copy_(x, non_blocking=True)

    def record(self, *, timed: bool = False) -> Event:
        return CUDAEvent(timed=timed)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


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
