"""Small steps as CUDA graphs, one graph for each number of tokens.

A graph reads its tokens from the device tables and writes the next ones there. This module owns the
static tensors that the graphs read and the memory that they share.
"""

import dataclasses
import functools
import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence as Seq
from typing import ClassVar, NamedTuple

import torch

from nanovllm.attention.backend import Backend
from nanovllm.attention.batch import Batch
from nanovllm.core.messages import Row
from nanovllm.features.graphs.cuda_capture import CUDACapture, Graph
from nanovllm.layers.sampler import Sampling, draw
from nanovllm.utils.distributed import broadcast_from_first
from nanovllm.utils.progress import progress_bar
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.hooks import LAPS, StepRunner, StepTensors

logger = logging.getLogger(__name__)

ComputeLogits = Callable[[Batch], torch.Tensor | None]
"""Computes a planned batch of T rows of one token; returns logits [T, vocab_size], or None on a
rank without logits."""
Choose = Callable[[torch.Tensor, Sampling], torch.Tensor]


def graph_sizes(max_tokens: int) -> list[int]:
    """Return the tokens of the graphs: 1, 2, 4, every 8 to 512, every 64, and max_tokens."""
    sizes = {1, 2, 4, *range(8, 513, 8), *range(512, max_tokens, 64), max_tokens}
    return sorted(size for size in sizes if size <= max_tokens)


def draft_graph_sizes(max_tokens: int) -> list[int]:
    """Return the same for a draft network, which is cheap to pad: powers of two and max_tokens."""
    return [*(1 << i for i in range((max_tokens - 1).bit_length())), max_tokens]


class GraphRunner(StepRunner):
    """Runs steps of few tokens by replaying graphs.

    To a graph each token is a separate row. So the tokens of one sequence are rows that share a
    table row and have consecutive positions. Each sees the ones before it, because the KV of all is
    stored before any attends: see `Backend.supports_graph`.

    A graph reads its static state: for each token the table index, the table index that takes the
    token sampled after it, the position, the move, by which the step advances the position, and
    its place in the buffer of sampled tokens. The second is the scratch table row's for a token
    whose successor is known. Padding uses the scratch table row for both, with a move of 0 instead
    of 1. The step itself advances the state, so a following step with the same rows needs no
    upload.

    The buffer has LAPS parts, which steps take in turn. If the GPU can write to the host's memory,
    it lies there: a copy between two steps would cost more than the last kernel's write.

    Args:
        max_tokens: size of the largest graph.
        accepts: whether `Kernels.accept` counts the drafts that each step confirms.
        max_known_tokens: how many tokens a row may have besides drafts. Rows of a decode step
            have one.
        choose: returns tokens [T] for logits of T rows; None: draw them.
    """

    follows_drafts: ClassVar[bool] = True

    def __init__(
        self,
        compute_logits: ComputeLogits,
        backend: Backend,
        tables: DeviceTables,
        max_tokens: int,
        capture: CUDACapture,
        *,
        accepts: bool = False,
        max_known_tokens: int = 1,
        choose: Choose | None = None,
    ) -> None:
        self.max_tokens = max_tokens
        self.sizes: list[int] = []
        self._accepts = accepts
        self._compute_logits = compute_logits
        self._choose = choose or _draw
        self._backend = backend
        self._tables = tables
        self._capture = capture
        self._graphs: dict[int, tuple[Graph, torch.Tensor | None]] = {}
        device = tables.device
        self._max_known_tokens = max_known_tokens
        # A graph of `size` tokens reads the first 5 * size numbers as [5, size]: table indices,
        # table indices that take tokens, positions, moves, places. So one copy fills them. Behind
        # them are the marks of `_relative`, if there are any.
        self._state = torch.zeros(6 * max_tokens, dtype=torch.int64, device=device)
        self._tokens = _token_buffer(tables, max_tokens)
        self._lap = 0  # the part of the buffer that the next run writes
        self._cu_seqlens_q = torch.arange(max_tokens + 1, dtype=torch.int32, device=device)
        self._held: _Tokens | None = None  # the host's copy of what the state holds; None: unknown

    def capture(self, sizes: Seq[int], *, progress: bool = False) -> None:
        """Capture a graph of each size, the largest first: the others then reuse its memory."""
        order = sorted(sizes, reverse=True)
        for size in progress_bar(order, desc="Capturing CUDA graphs", shown=progress):
            self._upload(_Tokens([], [], []), size, [])
            self._graphs[size] = self._capture(functools.partial(self._step, size))
        self.sizes = sorted(self._graphs)

    def fits(self, rows: Seq[Row]) -> bool:
        """Return whether a graph can run `rows`: few tokens, and each row samples."""
        num_tokens = sum(row.num_scheduled_tokens for row in rows)
        return num_tokens <= self.sizes[-1] and all(
            row.samples
            and row.num_scheduled_tokens - row.num_draft_tokens <= self._max_known_tokens
            for row in rows
        )

    def run(self, rows: Seq[Row]) -> StepTensors:
        """Compute the tokens of `rows`; draw and store what follows, without logits rules.

        The tables keep the known tokens. Each draft is overwritten by the token drawn in its place:
        after the first wrong draft they do not count, as in `StepSampler.store`. A row with
        `num_unverified_tokens` begins where the device says.
        """
        follows: list[int] = []
        if self._accepts and any(row.num_unverified_tokens for row in rows):
            rows, follows = _relative(rows)
        tokens = _tokens_of(rows, self._tables.scratch_idx)
        num_tokens = len(tokens.positions)
        size = self.sizes[bisect_left(self.sizes, num_tokens)]
        if follows or tokens != self._held:
            self._upload(tokens, size, follows)
        self._held = None  # in case the replay fails
        if follows:
            table_indices, _, positions, _, _ = self._columns(size)
            last = self._tables.last_positions[table_indices]
            positions.addcmul_(last, self._state[5 * size : 6 * size])  # marks of 1 or 0
        draft_ids = None
        if num_tokens > len(rows) and any(row.num_draft_tokens for row in rows):
            table_indices, _, positions, _, _ = self._columns(size)
            draft_ids = self._tables.token_ids[table_indices, positions + 1][:num_tokens].long()
        graph, logits = self._graphs[size]
        graph.replay()
        if not follows:
            self._held = tokens._replace(positions=[position + 1 for position in tokens.positions])
        if logits is not None:
            logits = logits[:num_tokens]
        sampled = self._tokens.view(LAPS, -1)[self._lap, :num_tokens]
        self._lap = (self._lap + 1) % LAPS
        return StepTensors(tokens=sampled, logits=logits, draft_ids=draft_ids)

    def _upload(self, tokens: "_Tokens", size: int, follows: list[int]) -> None:
        num_tokens = len(tokens.positions)
        padding = size - num_tokens
        scratch = [self._tables.scratch_idx] * padding
        state = [*tokens.table_indices, *scratch, *tokens.targets, *scratch]
        state += [*tokens.positions, *[0] * padding, *[1] * num_tokens, *[0] * padding]
        state += range(self._lap * self.max_tokens, self._lap * self.max_tokens + size)
        if follows:
            state += [*follows, *[0] * padding]
        host = self._tables.platform.staging((len(state),), torch.int64)
        host.copy_(torch.tensor(state))
        self._state[: len(state)].copy_(host, non_blocking=True)

    def _columns(self, size: int) -> tuple[torch.Tensor, ...]:
        """Return the parts of the state that a graph of `size` tokens reads."""
        return self._state[: 5 * size].view(5, size).unbind()

    def _step(self, size: int) -> torch.Tensor | None:
        table_indices, targets, positions, moves, places = self._columns(size)
        tables = self._tables
        cu_seqlens_q = self._cu_seqlens_q[: size + 1]
        batch, sampling = _decode_inputs(tables, table_indices, positions, cu_seqlens_q)
        batch = dataclasses.replace(batch, metadata=self._backend.plan(batch))
        logits = self._compute_logits(batch)
        if logits is None:
            tokens = torch.empty_like(table_indices)
        else:
            tokens = self._choose(logits, sampling)
        broadcast_from_first(tokens)
        if self._accepts:
            ends = sampling.positions, batch.input_ids, tokens
            tables.kernels.accept(tables.last_positions, targets, *ends)
        rows = targets, positions, moves, places, tokens
        tables.kernels.advance(tables.token_ids, *rows, self._tokens, self.max_tokens)
        return logits


def _decode_inputs(
    tables: DeviceTables,
    table_indices: torch.Tensor,
    positions: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
) -> tuple[Batch, Sampling]:
    """Return the tokens at `positions` as a batch, and how to sample the next ones.

    Args:
        table_indices, positions: [R] int64.
        cu_seqlens_q: [R + 1] int32, 0 to R.
    """
    inputs, parameters = tables.kernels.gather(
        tables.token_ids,
        tables.block_tables,
        tables.block_size,
        table_indices,
        positions,
        tables.rope_offsets,
        tables.sampling_tensors.columns,
    )
    input_ids, slot_mapping, seq_lens, block_tables, following, rope_positions = inputs
    batch = Batch(
        input_ids=input_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        block_tables=block_tables,
        rope_positions=rope_positions,
    )
    kernels = tables.kernels
    return batch, Sampling(*parameters, positions=following, any_greedy=True, kernels=kernels)


def _draw(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """All tokens are candidates: a graph cannot return to the host to look for more."""
    return draw(logits, sampling, num_candidates=logits.shape[-1])


def _token_buffer(tables: DeviceTables, max_tokens: int) -> torch.Tensor:
    """Return a buffer [LAPS * max_tokens] int64: memory of the host if a step can write to it, else
    of the device.
    """
    platform = tables.platform
    buffer = platform.zeros((LAPS * max_tokens,), torch.int64)
    if not platform.runs_ahead:
        return buffer
    host = platform.staging((len(buffer),), torch.int64)
    # Because of this copy torch waits for the stream before it uses freed memory again.
    host.copy_(buffer, non_blocking=True)
    reason = "what was written did not arrive"
    state = torch.tensor([[tables.scratch_idx], [0], [0], [0], [1]], device=tables.device)
    targets, positions, moves, places, tokens = state.unbind()
    try:
        rows = targets, positions, moves, places, tokens
        tables.kernels.advance(tables.token_ids, *rows, host, max_tokens)
        platform.synchronize()
    except ValueError as error:  # see `Kernels.advance`
        reason = str(error)
    if host[0] == 1:
        return host
    logger.info("steps do not write to the host's memory: %s", reason)
    return buffer


class _Tokens(NamedTuple):
    """The tokens of a step, each with its table index, the table index that takes the token sampled
    after it, and its position.
    """

    table_indices: list[int]
    targets: list[int]
    positions: list[int]


def _relative(rows: Seq[Row]) -> tuple[list[Row], list[int]]:
    """Let the rows that follow drafts in flight begin at 0. Return all rows, and 1 for each token
    of these, 0 for each other.
    """
    relative = [
        row._replace(num_computed_tokens=0) if row.num_unverified_tokens else row for row in rows
    ]
    counts = [(int(row.num_unverified_tokens > 0), row.num_scheduled_tokens) for row in rows]
    return relative, [follows for follows, count in counts for _ in range(count)]


def _tokens_of(rows: Seq[Row], scratch_idx: int) -> _Tokens:
    """Return the tokens of `rows`. Behind a known token that is not a row's last, nothing is
    sampled: `scratch_idx` takes it.
    """
    table_indices = [row.table_idx for row in rows]
    positions = [row.num_computed_tokens for row in rows]
    if all(row.num_scheduled_tokens == 1 for row in rows):
        return _Tokens(table_indices, table_indices, positions)
    tokens = _Tokens([], [], [])
    for row in rows:
        num_samples = 1 + row.num_draft_tokens
        tokens.table_indices.extend([row.table_idx] * row.num_scheduled_tokens)
        tokens.targets.extend([scratch_idx] * (row.num_scheduled_tokens - num_samples))
        tokens.targets.extend([row.table_idx] * num_samples)
        tokens.positions.extend(range(row.num_computed_tokens, row.end))
    return tokens
