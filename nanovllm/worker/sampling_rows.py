"""Samples a step's tokens, each row with its own parameters.

Groups the rows on the host by the work that they need, so that one row's filters cost the other
rows no time. Knows no model.
"""

import dataclasses
import itertools

import torch

from nanovllm.layers.logits_rules import apply_rules, run_processors
from nanovllm.layers.sampler import Sampling, draw
from nanovllm.scheduler.messages import Row
from nanovllm.utils.transfer import upload
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.extensions import StepMasks

_SPARE = 8
"""Candidates in addition to top_k, so that logits equal to the k-th are candidates too."""
_TOP_P_CANDIDATES = 256
"""Candidates for top_p without top_k. A row that keeps more tokens than that is sorted."""


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
        params: the parameters of each sample.
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
        self.params = [tables.params[row.table_idx] for row in self.rows]
        table_indices = [row.table_idx for row in self.rows]
        numbers = last_tokens + table_indices + self._host_positions
        on_device = upload(numbers, tables.device).view(3, len(self.rows))
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
        if all(params.is_greedy for params in self.params):
            return self._tables.kernels.greedy(logits)
        if self._tables.kernels.sample is not None:
            return draw(logits, self._sampling(self._table_indices, self._positions))
        return self._sample_by_group(logits)

    def _sample_by_group(self, logits: torch.Tensor) -> torch.Tensor:
        """Do the same in plain torch: rows with the same kind of filters in one call each."""
        greedy: list[int] = []
        plain: list[int] = []
        with_top_k: list[int] = []
        with_top_p: list[int] = []
        for index, params in enumerate(self.params):
            if params.is_greedy:
                greedy.append(index)
            elif 0 < params.top_k < logits.shape[-1]:
                with_top_k.append(index)
            elif params.top_p < 1.0:
                with_top_p.append(index)
            else:
                plain.append(index)
        tokens = torch.empty_like(self._table_indices)
        if greedy:
            rows = upload(greedy, logits.device)
            tokens[rows] = self._tables.kernels.greedy(logits[rows])
        max_top_k = max((self.params[index].top_k for index in with_top_k), default=0)
        for group, num_candidates in (
            (plain, 0),
            (with_top_k, max_top_k + _SPARE),
            (with_top_p, _TOP_P_CANDIDATES),
        ):
            if group:
                rows = upload(group, logits.device)
                group_logits = logits if len(group) == len(self.rows) else logits[rows]
                sampling = dataclasses.replace(
                    self._sampling(self._table_indices[rows], self._positions[rows]),
                    any_min_p=any(self.params[index].min_p > 0 for index in group),
                    any_top_p_of_all=group is with_top_p,
                )
                tokens[rows] = draw(group_logits, sampling, num_candidates)
        return tokens

    def store(self, token_ids: torch.Tensor) -> None:
        """Write the sampled tokens [S] to the device tables, where the next step reads them.

        The tables get 0 for NO_TOKEN, because the next step looks up its embedding. Behind the
        first wrong draft they get tokens that do not count; the next step overwrites them.
        """
        known = token_ids.clamp(min=0).int()
        self._tables.token_ids[self._table_indices, self._positions] = known

    def accept(self, token_ids: torch.Tensor) -> None:
        """Note in the device tables where each row ends, as `Kernels.accept` does."""
        inputs = token_ids if self.draft_ids is None else self.draft_ids.roll(1)
        rows = self._table_indices, self._positions, inputs, token_ids
        self._tables.kernels.accept(self._tables.last_positions, *rows)

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
        changed = tables.kernels.to_float(logits)
        self.errors |= run_processors(changed, ruled)
        if self._masks is not None:
            self._masks.apply(changed)
            self.errors |= self._masks.errors
        apply_rules(changed, ruled)
        return changed

    def _sampling(self, table_indices: torch.Tensor, positions: torch.Tensor) -> Sampling:
        """Return how to sample rows; both arguments are [n] int64."""
        tables = self._tables
        columns = (column[table_indices] for column in tables.sampling_tensors.columns)
        return Sampling(*columns, positions=positions, kernels=tables.kernels)
