"""A step's outputs on the device, and their copy to the host. Knows no model and no batch."""

import dataclasses
from typing import NamedTuple

import torch

from nanovllm.layers.sampler import NO_TOKEN
from nanovllm.scheduler.messages import Schedule, StepResult, TokenLogprobs
from nanovllm.worker.sampling import GatheredLogprobs, SampledLogprobs, to_host

NO_DISTRIBUTION = (
    "no token can be chosen: the logits have NaN or inf, or all are -inf; check the model's "
    "weights and dtype, and whether the request's rules (bad_words, min_tokens, ...) forbid every "
    "token"
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
    """[S] int64, a token or NO_TOKEN for each row that samples."""
    logprobs: SampledLogprobs | None
    """Of the rows whose request wants them; None if none does."""
    prompt_logprobs: list[PromptLogprobs]
    errors: dict[int, str] = dataclasses.field(default_factory=dict)
    """By id of the sequences whose logits processor failed: the reason. Their tokens count not."""

    def to_host(self) -> "StepOutput":
        """Return a copy on the host. On CUDA the copy is asynchronous."""
        logprobs = self.logprobs
        if logprobs is not None:
            logprobs = logprobs._replace(values=logprobs.values.to_host())
        return StepOutput(
            to_host(self.token_ids),
            logprobs,
            [part._replace(values=part.values.to_host()) for part in self.prompt_logprobs],
            self.errors,
        )

    def result(self, schedule: Schedule) -> StepResult:
        """Return the outputs as Python numbers. The copies to the host must be complete."""
        logprobs: dict[int, list[TokenLogprobs]] = {}
        prompt_logprobs: dict[int, list[tuple[int, TokenLogprobs]]] = {}
        if self.logprobs is not None:
            values = self.logprobs.values.tolist(self.logprobs.counts)
            pairs = zip(self.logprobs.seq_ids, values, strict=True)
            logprobs = {seq_id: [value] for seq_id, value in pairs}
        for part in self.prompt_logprobs:
            values = part.values.tolist([part.num_top] * len(part.values.ranks))
            prompt_logprobs.setdefault(part.seq_id, []).extend(enumerate(values, part.position))
        token_ids: list[list[int]] = []
        errors = dict(self.errors)
        sampling = (row for row in schedule.rows if row.samples)
        for row, token in zip(sampling, self.token_ids.tolist(), strict=True):
            token_ids.append([] if token == NO_TOKEN else [token])
            if token == NO_TOKEN:
                errors.setdefault(row.seq_id, NO_DISTRIBUTION)
        return StepResult(
            schedule.step_id,
            token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            errors=errors,
        )


class PendingResult:
    """The outputs of a launched step, which may still be running."""

    def __init__(self, schedule: Schedule, output: StepOutput) -> None:
        self._schedule = schedule
        self._output = output.to_host()
        self._copied: torch.cuda.Event | None = None
        if output.token_ids.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def result(self) -> StepResult:
        """Wait for the step and return its result."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._output.result(self._schedule)
