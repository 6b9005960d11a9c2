"""`Platform`: what the engine asks of a device. cpu.py and cuda.py are two; a user's class may be
another. The rest of the engine asks it, and not torch, what the device is.
"""

import abc
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence as Seq
from typing import Any, ClassVar, Protocol

import torch

from nanovllm.attention.backend import Backend
from nanovllm.kernels.torch_kernels import TORCH, Kernels
from nanovllm.utils.distributed import GLOO, Collectives


class Event(Protocol):
    """A point in the order of a device's work."""

    def synchronize(self) -> None:
        """Wait until the device reaches it."""
        ...

    def seconds_until(self, later: Any) -> float:
        """Return the seconds to a later one of the same device, which has reached both."""
        ...


class HostEvent:
    """An `Event` of a device whose calls return when their work is done."""

    def __init__(self) -> None:
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        """Return at once."""

    def seconds_until(self, later: "HostEvent") -> float:
        return later._time - self._time


class Platform(abc.ABC):
    """The device of one rank.

    Three methods must be written. The others do what torch does on any device: plain torch kernels
    and attention, copies for which the host waits, and one step at a time.

    Args:
        device: what `find` returns.
        asked: the option device.
    """

    # Whether tensors of the device are memory of the host, taken as it is first written.
    in_host_memory: ClassVar[bool] = False
    # Whether calls return before the device is done, so that the host may prepare the next step.
    # Kernels that the first call compiles are compiled at the start then.
    runs_ahead: ClassVar[bool] = False
    # Whether features/graphs can capture steps as CUDA graphs.
    captures_graphs: ClassVar[bool] = False
    # Whether the kernels compute in float16. If not, a quantised checkpoint that says so is
    # computed in bfloat16.
    computes_float16: ClassVar[bool] = True
    # The option max_num_batched_tokens, if it is not given. Larger steps take more memory.
    default_num_batched_tokens: ClassVar[int] = 16384
    collectives: ClassVar[Collectives] = GLOO  # how ranks exchange tensors

    def __init__(self, device: torch.device, asked: str = "auto") -> None:
        self.device = device
        self.asked = asked

    # Which device

    @classmethod
    @abc.abstractmethod
    def find(cls, asked: str, rank: int, num_ranks: int) -> torch.device:
        """Return the device of rank `rank`.

        Args:
            asked: the option device.

        Raises:
            ConfigError: there is none.
        """

    @classmethod
    def is_available(cls) -> bool:
        """Return whether device="auto" may choose it."""
        return True

    @abc.abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Return what of the device and of its settings decides the bits of a product."""

    # What computes

    def kernels(self, dtype: torch.dtype, *, native: bool = True) -> Kernels:
        """Return the fastest kernels for a model of `dtype`.

        Args:
            native: whether they may be others than plain torch.

        Raises:
            ConfigError: the user named the device, and its kernels do not run.
        """
        return TORCH

    def attention_backends(self, kernels: Kernels) -> Iterator[type[Backend]]:
        """Yield the backends that run next to `kernels`, the best first.

        Each is imported when those before it do not support the model.
        """
        from nanovllm.attention.torch_sdpa import TorchBackend, TorchExplicitBackend

        yield TorchBackend
        yield TorchExplicitBackend

    @contextlib.contextmanager
    def current(self, num_threads: int) -> Iterator[None]:
        """Use this device, and `num_threads` threads of the CPU, inside.

        The settings are restored afterwards, because the caller's own torch code uses them too.
        Hazard: a thread that first uses torch while another thread is inside starts with
        `num_threads`.
        """
        before = torch.get_num_threads()  # in a new thread this call also applies torch's default
        try:
            if before != num_threads:
                torch.set_num_threads(num_threads)
            yield
        finally:
            if before != num_threads:
                torch.set_num_threads(before)

    def make_current(self, num_threads: int) -> None:
        """Set for good what `current` sets for a while: the process has this rank and no caller."""
        torch.set_num_threads(num_threads)

    # Memory

    @abc.abstractmethod
    def pool_bytes(self, utilization: float, num_ranks: int, warm_up: Callable[[], int]) -> int:
        """Return the bytes that the KV pool of this rank may take.

        Args:
            utilization: the option gpu_memory_utilization, of the whole device.
            num_ranks: that may share the device.
            warm_up: runs the largest step, so that its memory can be measured. Returns the bytes
                that graphs will take.
        """

    def used_bytes(self) -> int:
        """Return the bytes in use on the whole device, if it captures graphs."""
        raise NotImplementedError

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return zeros on the device."""
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the host that copies fastest; its contents are undefined."""
        return torch.empty(shape, dtype=dtype)

    # Copies, and the order of the device's work

    def upload(self, values: Seq[int]) -> torch.Tensor:
        """Return host numbers as [len(values)] int64 on the device."""
        host = self.staging((len(values),), torch.int64)
        host.copy_(torch.tensor(values, dtype=torch.int64))
        return host.to(self.device, non_blocking=True)

    def to_host(self, x: torch.Tensor) -> torch.Tensor:
        """Return a copy of `x` on the host. It is complete when the device reaches an event that
        is recorded afterwards.
        """
        return x.to("cpu", copy=True)

    def record(self, *, timed: bool = False) -> Event:
        """Return an event behind the work launched so far.

        Args:
            timed: `Event.seconds_until` will be asked.
        """
        return HostEvent()

    def synchronize(self) -> None:
        """Wait for all work launched so far."""
        self.record().synchronize()
