"""The model's forward pass on the CPU, recorded once and replayed by a single C call.

In a small step, the Python code between two kernels would take as long as a short kernel. Any
function that only calls kernels can be recorded.
"""

import dataclasses
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence as Seq
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.attention.batch import Batch
from nanovllm.attention.states import StateRows
from nanovllm.kernels.cpu import library, table_ops
from nanovllm.kernels.cpu.calls import pack_call, size_of
from nanovllm.scheduler.messages import Row
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.extensions import Computed

Forward = Callable[[Batch], torch.Tensor]
"""Returns hidden states [T, hidden_size]."""

MAX_TOKENS = 64
"""Larger steps run call by call: there Python's share of the time is small, and a recording keeps
the memory of all intermediate tensors."""

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


def _is_part_of(x: torch.Tensor, viewed: torch.Tensor | Seq[torch.Tensor]) -> bool:
    """Return whether `viewed` has the memory of `x`. What torch calls a view may be a copy."""
    views = [viewed] if isinstance(viewed, torch.Tensor) else viewed
    memory = x.untyped_storage().data_ptr()
    return all(view.untyped_storage().data_ptr() == memory for view in views)


class RecordedModel:
    """A forward pass for batches of up to MAX_TOKENS tokens.

    Args:
        model: a module or a function. All that it computes must be calls of C kernels.
        tables: hold the tokens and blocks of the batches, and the pages of states.

    Raises:
        Unrecordable: torch computes some of the forward pass.
    """

    def __init__(self, model: Forward, tables: DeviceTables) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype)

        self._tables = tables
        num_tables = 1 + len(tables.other_tables)
        width = tables.block_tables.shape[1]
        self._inputs = (
            zeros(MAX_TOKENS, dtype=torch.int64),
            zeros(MAX_TOKENS, dtype=torch.int64),
            zeros(num_tables, MAX_TOKENS, dtype=torch.int64),
            zeros(MAX_TOKENS + 1),
            zeros(MAX_TOKENS),
            zeros(num_tables, MAX_TOKENS, width),
        )
        input_ids, positions, slots, cu_seqlens_q, seq_lens, blocks = self._inputs
        batch, *others = (
            Batch(input_ids, positions, slots[i], cu_seqlens_q, seq_lens, blocks[i])
            for i in range(num_tables)
        )
        self._state: table_ops.StateColumns | None = None
        state = None
        if tables.state_table is not None:
            source = tables.state_table.pages
            pages = zeros(MAX_TOKENS, source.shape[1])
            write_lens = zeros(MAX_TOKENS)
            self._state = table_ops.StateColumns(source, pages, write_lens)
            state = StateRows(pages, cu_seqlens_q, write_lens)
        batch = dataclasses.replace(batch, state=state, others=tuple(others))
        with Recording(MAX_TOKENS) as self._recording:
            self._hidden: torch.Tensor = model(batch)

    def fits(self, rows: Seq[Row]) -> bool:
        """Return whether the recording is large enough for `rows`.

        In a model with state layers, it cannot run rows that follow or verify drafts.
        """
        states = self._tables.state_table
        if states is not None and states.replays.concern(rows):
            return False
        return sum(row.num_scheduled_tokens for row in rows) <= MAX_TOKENS

    def run(self, rows: Seq[Row]) -> Computed:
        """Write the KV of the tokens of `rows`; return their hidden states."""
        return Computed(self.forward(rows))

    def forward(self, rows: Seq[Row]) -> torch.Tensor:
        """Do the same; return [T, hidden_size], which the next call overwrites."""
        table_indices = [row.table_idx for row in rows]
        query_lens = [row.num_scheduled_tokens for row in rows]
        seq_lens = [row.num_computed_tokens + row.num_scheduled_tokens for row in rows]
        tables = self._tables
        num_tokens = sum(query_lens)
        table_ops.batch(
            tables.token_ids,
            tables.block_tables,
            tables.block_size,
            table_indices,
            query_lens,
            seq_lens,
            self._inputs,
            self._state,
        )
        self._recording.run(num_tokens, len(rows))
        return self._hidden[:num_tokens]
