"""A step's outputs on the device, and their copy to the host. Knows no model and no batch."""

import dataclasses
import itertools
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from nanovllm.layers.sampler import NO_TOKEN
from nanovllm.scheduler.messages import Row, RowDetails, StepResult, TokenLogprobs
from nanovllm.worker.extensions import ForcedTokens
from nanovllm.worker.sampling_rows import GatheredLogprobs, SampledLogprobs, to_host

NO_DISTRIBUTION = (
    "no token can be chosen: the logits have NaN or inf, or all are -inf; check the model's "
    "weights and dtype, and whether the request's rules (bad_words, min_tokens, "
    "structured_outputs, ...) forbid every token"
)
"""The error of a row whose token is NO_TOKEN."""


class PromptLogprobs(NamedTuple):
    """Log-probabilities of consecutive positions in one prompt."""

    seq_id: int
    position: int
    num_top: int
    values: GatheredLogprobs


@dataclasses.dataclass(frozen=True, slots=True)
class StepOutput:
    """The outputs of a step, on the device or on the host."""

    token_ids: torch.Tensor
    """[S] int64, a token or NO_TOKEN for each sample of `SamplingRows`."""
    logprobs: SampledLogprobs | None
    """Of the samples whose request wants them; None if none does."""
    prompt_logprobs: list[PromptLogprobs]
    errors: dict[int, str] = dataclasses.field(default_factory=dict)
    """By sample: why a logits processor or a grammar failed, or "" for an output that is complete.
    Its token does not count."""
    draft_ids: torch.Tensor | None = None
    """[S] int64, the draft that the sample may confirm; None if no row has any."""
    forcing: Mapping[int, ForcedTokens] = dataclasses.field(default_factory=dict)
    """By sequence id: what may force tokens behind the sampled ones."""
    on_host: bool = False
    """Whether `token_ids` is memory of the host to which the step itself writes."""

    def to_host(self) -> "StepOutput":
        """Return a copy on the host. On CUDA the copy is asynchronous."""
        logprobs = self.logprobs
        if logprobs is not None:
            logprobs = logprobs._replace(values=logprobs.values.to_host())
        return StepOutput(
            self.token_ids if self.on_host else to_host(self.token_ids),
            logprobs,
            [part._replace(values=part.values.to_host()) for part in self.prompt_logprobs],
            self.errors,
            None if self.draft_ids is None else to_host(self.draft_ids),
            self.forcing,
        )

    def result(self, step: "Step") -> StepResult:
        """Return the outputs as Python numbers. The copies to the host must be complete."""
        token_ids, details = self._row_results(step.rows)
        draft_seconds, seconds = (0.0, 0.0) if step.timer is None else step.timer.seconds()
        return StepResult(step.step_id, token_ids, details, seconds, draft_seconds)

    def _row_results(self, rows: list[Row]) -> tuple[list[list[int]], dict[int, RowDetails]]:
        """Return the tokens of each row, and the details of the rows that have any."""
        sampled = self.token_ids.tolist()
        if not (
            self.draft_ids is not None
            or self.logprobs
            or self.prompt_logprobs
            or self.errors
            or self.forcing
            or NO_TOKEN in sampled
        ):  # most steps: one token a row
            tokens_left = iter(sampled)
            return [[next(tokens_left)] if row.samples else [] for row in rows], {}
        drafts = sampled if self.draft_ids is None else self.draft_ids.tolist()
        logprobs, prompt_logprobs = self._logprobs(), self._prompt_logprobs()
        token_ids: list[list[int]] = []
        details: dict[int, RowDetails] = {}
        first = 0
        for row in rows:
            tokens: list[int] = []
            error: str | None = None
            forced: list[int] | None = None
            if row.samples:
                last = first + row.num_draft_tokens
                tokens, error = self._accepted(sampled, drafts, first, last)
                if error is None and row.seq_id in self.forcing:
                    forced = self.forcing[row.seq_id].forced(tokens)
                first = last + 1
            token_ids.append(tokens)
            values = logprobs.get(row.seq_id), prompt_logprobs.get(row.seq_id)
            found = RowDetails(row.num_draft_tokens, error, forced, *values)
            if found != RowDetails():
                details[row.seq_id] = found
        return token_ids, details

    def _logprobs(self) -> dict[int, list[TokenLogprobs]]:
        """Return the log-probabilities of the samples, by sequence id."""
        found: dict[int, list[TokenLogprobs]] = {}
        if self.logprobs is not None:
            values = self.logprobs.values.tolist(self.logprobs.counts)
            for seq_id, value in zip(self.logprobs.seq_ids, values, strict=True):
                found.setdefault(seq_id, []).append(value)
        return found

    def _prompt_logprobs(self) -> dict[int, list[tuple[int, TokenLogprobs]]]:
        """Return (position, log-probabilities) of prompt tokens, by sequence id."""
        found: dict[int, list[tuple[int, TokenLogprobs]]] = {}
        for part in self.prompt_logprobs:
            values = part.values.tolist([part.num_top] * len(part.values.ranks))
            found.setdefault(part.seq_id, []).extend(enumerate(values, part.position))
        return found

    def _accepted(
        self, sampled: list[int], drafts: list[int], first: int, last: int
    ) -> tuple[list[int], str | None]:
        """Return the tokens of a row with samples `first` to `last`, and why it has none.

        A draft is accepted if it equals the token sampled at its position. The first token that
        differs, or the one after the last draft, ends the row. A failed sample behind accepted
        drafts ends the row too; the next step meets it again, as the first sample.
        """
        tokens: list[int] = []
        for sample in range(first, last + 1):
            token = sampled[sample]
            error = self.errors.get(sample, NO_DISTRIBUTION if token == NO_TOKEN else None)
            if error is not None:
                return tokens, None if tokens else error
            tokens.append(token)
            if sample < last and drafts[sample] != token:
                break
        return tokens, None


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A launched step, as far as its result needs it."""

    step_id: int
    rows: list[Row]
    """With the drafts that were proposed, which may be fewer than scheduled."""
    timer: "StepTimer | None" = None
    """It marked the ends of proposing and of the step; None: the step is not timed."""


class StepTimer:
    """Measures the seconds from its making to the first mark, and from each mark to the next.

    On CUDA they are the device's, because a launch returns at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        if not self._on_device:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Return the durations. On CUDA the device must have reached the last mark."""
        pairs = itertools.pairwise(self._marks)
        if self._on_device:
            return [start.elapsed_time(end) / 1000 for start, end in pairs]
        return [end - start for start, end in pairs]


class PendingResult:
    """The outputs of a launched step, which may still be running."""

    def __init__(self, step: Step, output: StepOutput) -> None:
        self._step = step
        self._output = output.to_host()
        self._lock = threading.Lock()  # one thread of a rank launches steps, another reads results
        self._overwritten = output.on_host
        self._copied: torch.cuda.Event | None = None
        if output.on_host or output.token_ids.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def result(self) -> StepResult:
        """Wait for the step and return its result."""
        with self._lock:
            self._wait()
            self._overwritten = False
            return self._output.result(self._step)

    def keep(self) -> None:
        """Copy the tokens if nobody has read them yet and a later step may overwrite them."""
        with self._lock:
            if self._overwritten:
                self._wait()
                tokens = self._output.token_ids.clone()
                self._output = dataclasses.replace(self._output, token_ids=tokens)
                self._overwritten = False

    def _wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
