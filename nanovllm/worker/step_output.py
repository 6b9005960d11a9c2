"""A step's outputs on the device, their copy to the host, and what they say of each row."""

import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.core.messages import Extras, FinishInfo, Loaded, Row, RowDetails, StepResult
from nanovllm.layers.sampler import NO_TOKEN, RULED_OUT
from nanovllm.options.sampling_params import REQUESTS_FAULT
from nanovllm.platform import Platform

if TYPE_CHECKING:
    from nanovllm.features.structured.grammar_masks import GrammarRow
    from nanovllm.worker.logprobs import Logprobs
    from nanovllm.worker.timing import StepTimer

NO_DISTRIBUTION = FinishInfo(
    "error",
    "no token can be chosen: the logits have NaN or inf, or all are -inf; check the model's "
    "weights and dtype",
    kv_invalid=True,
)
"""Of a row whose token is NO_TOKEN."""
NO_CHOICE = FinishInfo(
    "error",
    f"{REQUESTS_FAULT} (bad_words, min_tokens, structured_outputs, ...) "
    "forbid every token, or make logits NaN or inf; change them",
)
"""Of a row whose token is RULED_OUT."""
_FINISH_INFOS = {NO_TOKEN: NO_DISTRIBUTION, RULED_OUT: NO_CHOICE}


@dataclasses.dataclass(frozen=True, slots=True)
class StepOutput:
    """The outputs of a step, on the device or on the host."""

    token_ids: torch.Tensor  # [S] int64, what `StepSampler.sample` returned
    logprobs: "list[Logprobs]" = dataclasses.field(default_factory=list)  # for those who want them
    # By sample: see `StepSampler.finish_infos`. The token of such a sample does not count.
    finish_infos: dict[int, FinishInfo] = dataclasses.field(default_factory=dict)
    draft_ids: torch.Tensor | None = None  # [S] int64, the draft that the sample may confirm
    # By sequence id: what may force tokens after the sampled ones.
    forcing: "Mapping[int, GrammarRow]" = dataclasses.field(default_factory=dict)
    on_host: bool = False  # `token_ids` is memory of the host, to which later steps write, too

    def to_host(self, platform: Platform) -> "StepOutput":
        """Return a copy on the host: see `Platform.to_host`."""
        to_host = platform.to_host
        return StepOutput(
            self.token_ids if self.on_host else to_host(self.token_ids),
            [part.to_host(platform) for part in self.logprobs],
            self.finish_infos,
            None if self.draft_ids is None else to_host(self.draft_ids),
            self.forcing,
            self.on_host,
        )

    def row_results(self, rows: list[Row]) -> tuple[list[list[int]], dict[int, RowDetails]]:
        """Return the tokens of each row and the details of rows with any, once all is here."""
        sampled = self.token_ids.tolist()
        has_details = (
            self.logprobs or self.finish_infos or self.forcing or min(sampled, default=0) < 0
        )
        if self.draft_ids is None and not has_details:  # most steps: one token a row
            tokens_left = iter(sampled)
            return [[next(tokens_left)] if row.samples else [] for row in rows], {}
        return self._detailed_results(rows, sampled)

    def _detailed_results(
        self, rows: list[Row], sampled: list[int]
    ) -> tuple[list[list[int]], dict[int, RowDetails]]:
        """Return what `row_results` does. `sampled` [S] has a token, NO_TOKEN or RULED_OUT for each
        sample.
        """
        from nanovllm.worker.logprobs import by_sequence

        drafts = sampled if self.draft_ids is None else self.draft_ids.tolist()
        of_samples, of_prompts = by_sequence(self.logprobs)
        token_ids: list[list[int]] = []
        details: dict[int, RowDetails] = {}
        first = 0
        for row in rows:
            tokens: list[int] = []
            finish_info: FinishInfo | None = None
            forced: list[int] | None = None
            if row.samples:
                last = first + row.num_draft_tokens
                tokens, finish_info = self._accepted(sampled, drafts, first, last)
                if finish_info is None and row.seq_id in self.forcing:
                    forced = self.forcing[row.seq_id].jump_forward(tokens)
                first = last + 1
            token_ids.append(tokens)
            values = of_samples.get(row.seq_id), of_prompts.get(row.seq_id)
            found = RowDetails(row.num_draft_tokens, finish_info, forced, *values)
            if found != RowDetails():
                details[row.seq_id] = found
        return token_ids, details

    def _accepted(
        self, sampled: list[int], drafts: list[int], first: int, last: int
    ) -> tuple[list[int], FinishInfo | None]:
        """Return the tokens of a row with samples `first` to `last`, and why it has none.

        A draft is accepted if it equals the token sampled at its position. The first token that
        differs, or the one after the last draft, ends the row. A failed sample after accepted
        drafts ends the row too; the next step meets it again, as the first sample.
        """
        tokens: list[int] = []
        for sample in range(first, last + 1):
            token = sampled[sample]
            finish_info = self.finish_infos.get(sample, _FINISH_INFOS.get(token))
            if finish_info is not None:
                invalid = token == NO_TOKEN
                return tokens, None if tokens else finish_info._replace(kv_invalid=invalid)
            tokens.append(token)
            if sample < last and drafts[sample] != token:
                break
        return tokens, None


class PendingResult:
    """The result of a launched step, which may still be running.

    Args:
        rows: with the drafts that were proposed, which may be fewer than scheduled.
        timer: marked the ends of proposing and of the step; None: the step is not timed.

    Attributes:
        loaded: the loads from tiers that have ended.
        finish_infos: by sequence id, why sequences of the step's rows end although the step ran.
        on_host: called before these two are read, when what was copied to the host is there.
    """

    def __init__(
        self,
        step_id: int,
        rows: list[Row],
        output: StepOutput,
        platform: Platform,
        timer: "StepTimer | None" = None,
    ) -> None:
        self._step_id = step_id
        self._rows = rows
        self._timer = timer
        self._output = output.to_host(platform)
        self.loaded: list[Loaded] = []
        self.finish_infos: dict[int, FinishInfo] = {}
        self.on_host: list[Callable[[PendingResult], None]] = []
        self._extras: dict[int, Extras] = {}  # by sequence id
        self._result: StepResult | None = None
        self._lock = threading.Lock()  # one thread of a rank launches steps, another reads results
        self._copied = platform.record()

    def add_extra(self, seq_id: int, name: str, value: Any) -> None:
        """Add to the `RowDetails.extras` of a sequence's row."""
        self._extras.setdefault(seq_id, {})[name] = value

    def result(self) -> StepResult:
        """Wait for the step and return its result."""
        with self._lock:
            if self._result is None:
                self._copied.synchronize()
                for read in self.on_host:
                    read(self)
                token_ids, details = self._output.row_results(self._rows)
                drafting, seconds = (0.0, 0.0) if self._timer is None else self._timer.seconds()
                if self.finish_infos:
                    self._end_rows(token_ids, details)
                for seq_id, extras in self._extras.items():
                    details[seq_id] = details.get(seq_id, RowDetails())._replace(extras=extras)
                self._result = StepResult(
                    self._step_id, token_ids, details, seconds, drafting, self.loaded
                )
            return self._result

    def _end_rows(self, token_ids: list[list[int]], details: dict[int, RowDetails]) -> None:
        """Change the results of the rows that have one of `finish_infos`: they have no tokens."""
        for index, row in enumerate(self._rows):
            finish_info = self.finish_infos.get(row.seq_id)
            if finish_info is not None:
                num_drafts = details.get(row.seq_id, RowDetails()).num_draft_tokens
                token_ids[index] = []
                details[row.seq_id] = RowDetails(num_drafts, finish_info)

    def keep(self) -> None:
        """Read the tokens now, if a later step may overwrite them."""
        if self._output.on_host:
            self.result()
