"""The model's forward pass on the CPU, recorded once and replayed by a single C call.

In a small step, the Python code between two kernels would take as long as a short kernel. Any
function that only calls kernels can be recorded.
"""

import dataclasses
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence as Seq
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.attention.batch import Batch
from nanovllm.core.messages import Row
from nanovllm.kernels.cpu import library, ops
from nanovllm.kernels.cpu.calls import pack_call, size_of
from nanovllm.kernels.states import Replay, StateRows
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.hooks import StepRunner, StepTensors

if TYPE_CHECKING:
    from nanovllm.worker.state_table import Replays

Forward = Callable[[Batch], torch.Tensor]  # returns hidden states [T, hidden_size]

MAX_TOKENS = 64
"""Larger steps run call by call: there Python's share of the time is small, and a recording keeps
the memory of all intermediate tensors."""

_ALLOCATES = (torch.ops.aten.empty, torch.ops.aten.empty_like)


class Unrecordable(Exception):
    """The recorded function does work other than kernel calls; the message says which."""


class CPUGraph(TorchDispatchMode):
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

    def __enter__(self) -> "CPUGraph":
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


def _record(model: Forward, batch: Batch) -> tuple[CPUGraph, torch.Tensor]:
    """Return the recorded forward pass over `batch`, and where it writes the hidden states."""
    with CPUGraph(MAX_TOKENS) as recording:
        hidden = model(batch)
    return recording, hidden


class CPUGraphRunner(StepRunner):
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
            zeros(MAX_TOKENS, dtype=torch.int64),
        )
        input_ids, positions, slots, cu_seqlens_q, seq_lens, blocks, rope = self._inputs
        batch, *others = (
            Batch(
                *(input_ids, positions, slots[i], cu_seqlens_q, seq_lens, blocks[i]),
                rope_positions=rope,
            )
            for i in range(num_tables)
        )
        batch = dataclasses.replace(batch, others=tuple(others))
        self._state: ops.StateColumns | None = None
        self._replays: Replays | None = None  # of the rows that `_replaying` is for
        if tables.state_table is not None:
            source = tables.state_table.pages
            pages = zeros(MAX_TOKENS, source.shape[1])
            write_lens = zeros(MAX_TOKENS)
            self._state = ops.StateColumns(source, pages, write_lens)
            state = StateRows(pages, cu_seqlens_q, write_lens)
            batch = dataclasses.replace(batch, state=state)
            if tables.state_table.replays.num_drafts:
                self._replays = tables.state_table.replays
        self._plain = _record(model, batch)
        if self._replays is not None and batch.state is not None:
            own = zeros(MAX_TOKENS, dtype=torch.int64)
            sources, kept = zeros(2, 2 * MAX_TOKENS, dtype=torch.int64)
            ends = zeros(MAX_TOKENS + 1)
            replay = Replay(own, sources, kept, self._replays.num_log_rows)
            state = dataclasses.replace(batch.state, cu_seqlens=ends, replay=replay)
            self._replayed = [x.numpy() for x in (own, sources, kept, ends, state.write_lens)]
            self._replaying = _record(model, dataclasses.replace(batch, state=state))

    def fits(self, rows: Seq[Row]) -> bool:
        """Return whether the recordings are large enough for `rows`."""
        counts = [row.num_scheduled_tokens for row in rows]
        replays = self._replays
        again = [] if replays is None else [replays.count(row.table_idx) for row in rows]
        return sum(counts) <= MAX_TOKENS and sum(again) <= MAX_TOKENS

    def run(self, rows: Seq[Row]) -> StepTensors:
        """Write the KV of the tokens of `rows`; return their hidden states."""
        return StepTensors(self.forward(rows))

    def forward(self, rows: Seq[Row]) -> torch.Tensor:
        """Do the same; return [T, hidden_size], which the next call overwrites."""
        table_indices = [row.table_idx for row in rows]
        query_lens = [row.num_scheduled_tokens for row in rows]
        seq_lens = [row.num_computed_tokens + row.num_scheduled_tokens for row in rows]
        tables = self._tables
        num_tokens = sum(query_lens)
        ops.batch(
            tables.token_ids,
            tables.block_tables,
            tables.block_size,
            table_indices,
            query_lens,
            seq_lens,
            tables.rope_offsets,
            self._inputs,
            self._state,
        )
        recording, hidden = self._plain
        if self._replays is not None and self._replays.concern(rows):
            recording, hidden = self._replaying
            for numbers, found in zip(self._replayed, self._replays.lay_out(rows), strict=True):
                numbers[: len(found)] = found
        recording.run(num_tokens, len(rows))
        return hidden[:num_tokens]
