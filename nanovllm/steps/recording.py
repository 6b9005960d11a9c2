"""Records the kernel calls of a forward pass and replays them with one call of C.

Knows no model: any function whose work is all kernel calls can be recorded.
"""

import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.kernels.cpu import library
from nanovllm.kernels.cpu.calls import pack_call, size_of

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
        self._calls = b""
        self._memory: list[np.ndarray] = []
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)  # by size

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps __torch_dispatch__ and imports torch._dynamo, 1 to 2 s

    def __enter__(self) -> "Recording":
        library.record_calls(self.add)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        library.record_calls(None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket not in _ALLOCATES:
            viewed = func(*args, **(kwargs or {})) if func.is_view else None
            if viewed is None or not _is_part_of(args[0], viewed):
                raise Unrecordable(f"torch computes {func}")
            return viewed
        return self._empty(func(*args, **{**(kwargs or {}), "device": "meta"}))

    def add(self, name: str, args: list[int | float]) -> None:
        """Store a call of kernel `name`.

        Raises:
            Unrecordable: the call cannot be run with another size, or is not for `size` tokens.
        """
        if size_of(name, args) != self.size:
            raise Unrecordable(f"{name} is not a call for {self.size} tokens")
        self._calls += pack_call(name, args)

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
        library.run(self._calls, num_tokens, num_rows)


def _is_part_of(x: torch.Tensor, viewed: torch.Tensor | Sequence[torch.Tensor]) -> bool:
    """Return whether `viewed` has the memory of `x`. What torch calls a view may be a copy."""
    views = [viewed] if isinstance(viewed, torch.Tensor) else viewed
    memory = x.untyped_storage().data_ptr()
    return all(view.untyped_storage().data_ptr() == memory for view in views)
