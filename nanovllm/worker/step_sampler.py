"""Chooses a step's tokens, each row's with its own parameters: what follows the logits."""

import itertools
from typing import TYPE_CHECKING

import torch
from torch import nn

from nanovllm.core.messages import FinishInfo, Row
from nanovllm.layers.sampler import Sampling, draw_by_group, mark_ruled_out
from nanovllm.utils.distributed import broadcast_from_first
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.step_output import StepOutput

if TYPE_CHECKING:
    from nanovllm.features.structured.grammar_masks import GrammarStep
    from nanovllm.worker.hooks import SamplingWatch, StepTensors
    from nanovllm.worker.logprobs import Logprobs


class StepSampler:
    """The S samples of a batch.

    A row that samples has one for the next token, and one more for each draft. Sample j of a row is
    what follows if its first j drafts are accepted.

    Args:
        masks: limits which tokens some of the samples may be; None: nothing limits them.
        draft_ids: [S], the drafts, if a graph has already overwritten them in the tables; they are
            written there again, because a row's rules read them.
        watch: None: nobody is told of the rules.

    Attributes:
        rows: the row of each sample.
        params: the parameters of each sample.
        output_indices: [S] int64, the index in the batch of the token that the sample follows: its
            hidden state gives the sample's logits.
        indices: the same on the host.
        finish_infos: by sample, set by `sample`: why a request ends here. Its logits processor
            failed, or its grammar did, or its output is complete and the model has no token that
            says so.
        draft_ids: [S] int64, the draft at the sample's position, where the row has one; None if no
            row has any.
        ruled: [S, vocab_size], set by `sample`: the logits after the rules.
    """

    def __init__(
        self,
        tables: DeviceTables,
        rows: list[Row],
        *,
        masks: "GrammarStep | None" = None,
        draft_ids: torch.Tensor | None = None,
        watch: "SamplingWatch | None" = None,
    ) -> None:
        self.rows: list[Row] = []
        self._masks = masks
        self._watch = watch
        self.finish_infos: dict[int, FinishInfo] = {}
        self._tables = tables
        self._host_positions: list[int] = []
        self.indices: list[int] = []
        ends = itertools.accumulate(row.num_scheduled_tokens for row in rows)
        for row, end in zip(rows, ends, strict=True):
            if row.samples:
                num_samples = 1 + row.num_draft_tokens
                self.rows += [row] * num_samples
                self.indices += range(end - num_samples, end)
                self._host_positions += range(row.sample_position, row.end + 1)
        self.params = [tables.params[row.table_idx] for row in self.rows]
        table_indices = [row.table_idx for row in self.rows]
        numbers = self.indices + table_indices + self._host_positions
        on_device = tables.platform.upload(numbers).view(3, len(self.rows))
        self.output_indices, self._table_indices, self._positions = on_device.unbind()
        self.draft_ids = draft_ids
        if draft_ids is not None:
            self.store(draft_ids)
        elif any(row.num_draft_tokens for row in rows):
            self.draft_ids = tables.token_ids[self._table_indices, self._positions].long()

    def __len__(self) -> int:
        return len(self.rows)

    def finish(
        self,
        tensors: "StepTensors",
        rows: list[Row],
        model: nn.Module,
        *,
        mode: str,
        accepts: bool,
    ) -> StepOutput:
        """Choose the tokens of a step's samples, and write them to the tables on all ranks: a rank
        without logits takes the first one's. The `model` makes the logits of prompts. The device
        counts accepted drafts if it `accepts` them.
        """
        tables = self._tables
        logits = tensors.logits
        logprobs: list[Logprobs] = []
        if tensors.hidden is not None and tables.want_prompt_logprobs(rows):
            from nanovllm.worker.logprobs import prompt_logprobs

            logprobs += prompt_logprobs(tables, rows, tensors.hidden, model, mode)
        if logits is None:  # no row samples, or this is not rank 0
            tokens = torch.empty_like(self.output_indices)
        else:
            tokens = self.sample(logits)
            if any(params.logprobs is not None for params in self.params):
                from nanovllm.worker.logprobs import sampled_logprobs

                logprobs += sampled_logprobs(tables, self, logits, tokens, mode)
        if self.rows:
            broadcast_from_first(tokens)
            self.store(tokens)
            if accepts:
                self.accept(tokens)
        forcing = {} if self._masks is None else self._masks.forcing
        return StepOutput(tokens, logprobs, self.finish_infos, self.draft_ids, forcing)

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Return [S] int64: a token, NO_TOKEN or RULED_OUT; `logits` are [S, vocab_size]."""
        if self._watch is not None:
            self._watch.begin(logits)
        ruled = self.ruled = self.apply_rules(logits)
        greedy = self._tables.kernels.greedy
        draws = not all(params.is_greedy for params in self.params)
        tokens = draw_by_group(ruled, self.parameters(), self.params) if draws else greedy(ruled)
        if self._watch is not None:
            self._watch.sampled(self, tokens)
        return tokens if ruled is logits else mark_ruled_out(tokens, greedy(logits))

    def store(self, token_ids: torch.Tensor) -> None:
        """Write the sampled tokens [S] to the device tables, where the next step reads them.

        The tables get 0 for no token, because the next step looks up its embedding. Behind the
        first wrong draft they get tokens that do not count; the next step overwrites them.
        """
        self._tables.token_ids[self._table_indices, self._positions] = token_ids.clamp(min=0).int()

    def accept(self, token_ids: torch.Tensor) -> None:
        """Note in the device tables where each row ends, as `Kernels.accept` does."""
        # The token before a row's second sample is the draft at the place of its first sample.
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
        from nanovllm.layers.logits_rules import apply_rules, run_processors

        tell = None if self._watch is None else self._watch.ruled
        changed = tables.kernels.to_float(logits)
        for sample, reason in run_processors(changed, ruled, tell).items():
            self.finish_infos[sample] = FinishInfo("error", reason)
        if self._masks is not None:
            self._masks.apply(changed)
            self.finish_infos |= self._masks.finish_infos
            if tell is not None:
                for sample in self._masks.samples:
                    tell(sample, "structured_outputs", changed[sample])
        apply_rules(changed, ruled, tell)
        return changed

    def parameters(self) -> Sampling:
        """Return the samples' parameters, on the device."""
        tables = self._tables
        columns = (column[self._table_indices] for column in tables.sampling_tensors.columns)
        return Sampling(*columns, positions=self._positions, kernels=tables.kernels)
