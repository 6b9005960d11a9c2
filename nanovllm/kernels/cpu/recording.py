"""Records the kernel calls of a forward pass and replays them with one call of C.

Knows no model: any function whose work is all kernel calls can be recorded.
"""

import ctypes
import struct
import weakref
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.kernels.cpu import library
from nanovllm.kernels.cpu.build import ARGUMENTS

_CALL = 17
"""64-bit words per recorded call: the kernel's index, its arguments, padding. See batch.c."""

# Kernels in the order of the indices in `nv_run`, and the position of the argument that holds the
# number of tokens (nv_attention: the number of rows).
_RECORDABLE = {
    "nv_linear": 4,
    "nv_linear_int": 5,
    "nv_gather": 3,
    "nv_gather_int": 4,
    "nv_add_rms_norm": 4,
    "nv_silu_and_mul": 1,
    "nv_store": 9,
    "nv_attention": 8,
}
_ALLOCATES = (torch.ops.aten.empty, torch.ops.aten.empty_like)


class Unrecordable(Exception):
    """The recorded function does work other than kernel calls; the message says which."""


class Recording(TorchDispatchMode):
    """Stores the kernel calls made inside `with` without running them; `run` runs them.

    Record with batches of `size` tokens in `size` rows; `run` accepts fewer of both. The caller
    must keep the calls' inputs alive. The recording owns the memory of tensors that are made
    inside `with`: each run overwrites it, and a later tensor may reuse the memory of an earlier
    one that has been freed.

    Raises:
        Unrecordable: inside `with`, torch computes something or a call has another size.
    """

    def __init__(self, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size = size
        self._calls = bytearray()
        self._memory: list[np.ndarray] = []
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)  # by size

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps __torch_dispatch__ and imports torch._dynamo, 1 to 2 s

    def __enter__(self) -> "Recording":
        library.record_calls(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        library.record_calls(None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket not in _ALLOCATES:
            if not func.is_view:
                raise Unrecordable(f"torch computes {func}")
            return func(*args, **(kwargs or {}))
        return self._empty(func(*args, **{**(kwargs or {}), "device": "meta"}))

    def add(self, name: str, args: tuple[library.Argument, ...]) -> None:
        """Store a call of kernel `name`.

        Raises:
            Unrecordable: `nv_run` does not know the kernel, or the call has another size.
        """
        if name not in _RECORDABLE or args[_RECORDABLE[name]] != self.size:
            raise Unrecordable(f"{name} is not a call for {self.size} tokens")
        words = [list(_RECORDABLE).index(name), *map(_address, args)]
        kinds = "q" + "".join("d" if kind == "f" else "q" for kind in ARGUMENTS[name])
        padding = [0] * (_CALL - len(words))
        self._calls += struct.pack("@" + kinds.ljust(_CALL, "q"), *words, *padding)

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        free = self._free[like.nbytes]
        if not free:
            free.append(torch.zeros(like.nbytes, dtype=torch.uint8).numpy())
            self._memory += free
        memory = free.pop()
        owned = memory[:]  # alive as long as the tensor or a view of it is
        weakref.finalize(owned, free.append, memory)
        return torch.from_numpy(owned).view(like.dtype).view(like.shape)

    def run(self, num_tokens: int, num_rows: int) -> None:
        """Run the recorded calls for the first `num_tokens` tokens in the first `num_rows` rows."""
        calls = (ctypes.c_char * len(self._calls)).from_buffer(self._calls)
        num_calls = len(calls) // (8 * _CALL)
        library.call("nv_run", ctypes.addressof(calls), num_calls, num_tokens, num_rows)


def _address(arg: library.Argument) -> int | float:
    return arg.data_ptr() if isinstance(arg, torch.Tensor) else arg or 0
