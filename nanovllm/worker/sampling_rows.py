"""Samples a step's tokens, each row with its own parameters, and gathers log-probabilities.

Groups the rows on the host by the work that they need, so that one row's filters cost the other
rows no time. Knows no model.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence as Seq
from typing import NamedTuple

import torch

from nanovllm.kernels.cpu.library import torch_on_one_thread
from nanovllm.layers.logits_rules import float32_copy
from nanovllm.layers.sampler import Sampling, draw, draws_all_rows, greedy as greedy_tokens
from nanovllm.scheduler.messages import Row, TokenLogprobs
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.extensions import StepMasks

_SPARE = 8
"""Candidates in addition to top_k, so that logits equal to the k-th are candidates too."""
_TOP_P_CANDIDATES = 256
"""Candidates for top_p without top_k. A row that keeps more tokens than that is sorted."""
_PIECE = 2**23
"""Logits whose log-probabilities are in memory at the same time: 32 MiB in float32."""


@dataclasses.dataclass(frozen=True, slots=True)
class GatheredLogprobs:
    """Log-probabilities of L positions, on the device or on the host."""

    token_ids: torch.Tensor
    """[L, 1 + k] int64: the position's own token, then the k most likely tokens."""
    logprobs: torch.Tensor
    """[L, 1 + k] float32."""
    ranks: torch.Tensor
    """[L] int64, of the position's own token; 1 is the most likely."""

    def to_host(self) -> "GatheredLogprobs":
        """Return a copy on the host. On CUDA the copy is asynchronous."""
        return GatheredLogprobs(*map(to_host, (self.token_ids, self.logprobs, self.ranks)))

    def tolist(self, counts: Seq[int]) -> list[TokenLogprobs]:
        """Return Python numbers; position i gets its own token and the `counts[i]` most likely."""
        columns = (self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist())
        return [
            TokenLogprobs(tokens[: 1 + count], logprobs[: 1 + count], rank)
            for count, tokens, logprobs, rank in zip(counts, *columns, strict=True)
        ]


class SampledLogprobs(NamedTuple):
    """Log-probabilities of the tokens that L rows sampled."""

    seq_ids: list[int]
    counts: list[int]
    """How many of the most likely tokens each row's request wants."""
    values: GatheredLogprobs


def to_host(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of `x` on the host. On CUDA it is asynchronous, into pinned memory."""
    if not x.is_cuda:
        return x.clone()
    copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return copy.copy_(x, non_blocking=True)


def gather_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, count: int, rows: torch.Tensor | None = None
) -> GatheredLogprobs:
    """Return the log-probabilities of `tokens` [L] and of the `count` most likely tokens.

    The rows are processed in pieces, so the memory does not grow with their number.

    Args:
        logits: [L, vocab_size].
        rows: [L] int64, which rows of `logits` to use instead.
    """
    size = max(_PIECE // logits.shape[-1], 1)
    pieces: Iterable[torch.Tensor]
    if rows is None:
        pieces = torch.split(logits, size)
    else:
        pieces = (logits[piece] for piece in torch.split(rows, size))
    gathered = [
        _gather_piece(piece, own, count)
        for piece, own in zip(pieces, torch.split(tokens, size), strict=True)
    ]
    return GatheredLogprobs(*map(torch.cat, zip(*gathered, strict=True)))


def _gather_piece(
    logits: torch.Tensor, tokens: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the columns of `GatheredLogprobs`."""
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, tokens[:, None])
    # Not in int64: torch converts the mask to the dtype of the sum.
    ranks = (logprobs > own).sum(-1, dtype=torch.int32).long() + 1
    values, ids = logprobs.topk(min(count, logits.shape[-1]))
    return torch.cat([tokens[:, None], ids], 1), torch.cat([own, values], 1), ranks


class SamplingRows:
    """The S samples of a batch.

    A row that samples has one for the next token, and one more for each draft. Sample j of a row is
    what the row would sample if its first j drafts were tokens.

    Args:
        masks: of the samples that may not be any token; None if there are none.
        draft_ids: [S], the drafts, if a graph has already overwritten them in the tables; they are
            written there again, because a row's rules read them.

    Attributes:
        rows: the row of each sample.
        last_tokens: [S] int64, the index of the token in the batch that the sample follows.
        errors: by sample, why the logits processor or the mask of its request failed.
        draft_ids: [S] int64, the draft at the sample's position, where the row has one; None if no
            row has any.
    """

    def __init__(
        self,
        tables: DeviceTables,
        rows: list[Row],
        *,
        masks: StepMasks | None = None,
        draft_ids: torch.Tensor | None = None,
    ) -> None:
        self.rows: list[Row] = []
        self._masks = masks
        self.errors: dict[int, str] = {}
        self._tables = tables
        self._host_positions: list[int] = []
        last_tokens: list[int] = []
        ends = itertools.accumulate(row.num_scheduled_tokens for row in rows)
        for row, end in zip(rows, ends, strict=True):
            if row.samples:
                num_samples = 1 + row.num_draft_tokens
                self.rows += [row] * num_samples
                last_tokens += range(end - num_samples, end)
                self._host_positions += range(row.num_known_tokens, row.end + 1)
        self._params = [tables.params[row.table_idx] for row in self.rows]
        table_indices = [row.table_idx for row in self.rows]
        numbers = last_tokens + table_indices + self._host_positions
        on_device = tables.upload(numbers).view(3, len(self.rows))
        self.last_tokens, self._table_indices, self._positions = on_device.unbind()
        self.draft_ids = draft_ids
        if draft_ids is not None:
            self.store(draft_ids)
        elif any(row.num_draft_tokens for row in rows):
            self.draft_ids = tables.token_ids[self._table_indices, self._positions].long()

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Return a token [S] int64 for each row of logits [S, vocab_size]; NO_TOKEN for a row whose
        logits are no distribution after its rules.
        """
        logits = self.apply_rules(logits)
        if all(params.is_greedy for params in self._params):
            return greedy_tokens(logits, native=self._tables.native)
        if draws_all_rows(logits, self._tables.native):
            return draw(logits, self._sampling(self._table_indices, self._positions))
        return self._sample_by_group(logits)

    def _sample_by_group(self, logits: torch.Tensor) -> torch.Tensor:
        """Do the same in plain torch: rows with the same kind of filters in one call each."""
        vocab_size = logits.shape[-1]
        greedy: list[int] = []
        plain: list[int] = []
        with_top_k: list[int] = []
        with_top_p: list[int] = []
        max_top_k = 0
        for index, params in enumerate(self._params):
            if params.is_greedy:
                greedy.append(index)
            elif 0 < params.top_k < vocab_size:
                with_top_k.append(index)
                max_top_k = max(max_top_k, params.top_k)
            elif params.top_p < 1.0:
                with_top_p.append(index)
            else:
                plain.append(index)
        tokens = torch.empty_like(self._table_indices)
        if greedy:
            rows = self._tables.upload(greedy)
            tokens[rows] = greedy_tokens(logits[rows], native=self._tables.native)
        for group, num_candidates in (
            (plain, 0),
            (with_top_k, max_top_k + _SPARE),
            (with_top_p, _TOP_P_CANDIDATES),
        ):
            if group:
                rows = self._tables.upload(group)
                group_logits = logits if len(group) == len(self.rows) else logits[rows]
                sampling = dataclasses.replace(
                    self._sampling(self._table_indices[rows], self._positions[rows]),
                    any_min_p=any(self._params[index].min_p > 0 for index in group),
                    any_top_p_of_all=group is with_top_p,
                )
                tokens[rows] = draw(group_logits, sampling, num_candidates)
        return tokens

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor) -> SampledLogprobs | None:
        """Return the log-probabilities of the rows whose request wants them; None if none does.

        Args:
            logits: [S, vocab_size], as the model gave them: no rules, no temperature.
            tokens: [S], the sampled tokens.
        """
        counts = {
            index: count
            for index, params in enumerate(self._params)
            if (count := params.logprobs) is not None
        }
        if not counts:
            return None
        rows = self._tables.upload(list(counts))
        own = tokens[rows].clamp(min=0)  # a row with NO_TOKEN fails, so its numbers do not count
        gathered = gather_logprobs(logits, own, max(counts.values()), rows)
        seq_ids = [self.rows[index].seq_id for index in counts]
        return SampledLogprobs(seq_ids, list(counts.values()), gathered)

    def store(self, token_ids: torch.Tensor) -> None:
        """Write the sampled tokens [S] to the device tables, where the next step reads them.

        The tables get 0 for NO_TOKEN, because the next step looks up its embedding. Behind the
        first wrong draft they get tokens that do not count; the next step overwrites them.
        """
        known = token_ids.clamp(min=0).int()
        self._tables.token_ids[self._table_indices, self._positions] = known

    def accept(self, token_ids: torch.Tensor) -> None:
        """Note in the device tables where each row ends, as `DeviceTables.accept` does."""
        inputs = token_ids if self.draft_ids is None else self.draft_ids.roll(1)
        self._tables.accept(self._table_indices, self._positions, inputs, token_ids)

    def apply_rules(self, logits: torch.Tensor) -> torch.Tensor:
        """Return `logits` with the rows' rules applied: a float32 copy if some row has rules."""
        tables = self._tables
        ruled = [
            (index, rules, tables.token_ids[row.table_idx, : self._host_positions[index]].long())
            for index, row in enumerate(self.rows)
            if (rules := tables.rules[row.table_idx]) is not None
        ]
        if not ruled and self._masks is None:
            return logits
        changed = float32_copy(logits, native=tables.native)
        for index, rules, tokens in ruled:
            try:
                rules.run_processors(changed[index], tokens)
            except Exception as error:  # the user's code may raise anything
                reason = f"{type(error).__name__}: {error!s:.200}"
                self.errors[index] = f"a logits processor failed: {reason}"
        if self._masks is not None:
            self._masks.apply(changed)
            self.errors |= self._masks.errors
        with torch_on_one_thread():  # a row takes microseconds
            for index, rules, tokens in ruled:
                rules.apply(changed[index], tokens)
        return changed

    def _sampling(self, table_indices: torch.Tensor, positions: torch.Tensor) -> Sampling:
        """Return how to sample rows; both arguments are [n] int64."""
        tables = self._tables
        columns = (column[table_indices] for column in tables.sampling_tensors.columns)
        return Sampling(*columns, positions=positions, native=tables.native)
