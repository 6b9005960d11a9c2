"""What a step leaves on the device, and its way to the host. Knows no model and no batch."""

import dataclasses
from typing import NamedTuple

import torch

from nanovllm.scheduler.messages import StepResult, TokenLogprobs
from nanovllm.worker.sampling import GatheredLogprobs, to_host


class PromptLogprobs(NamedTuple):
    """Log-probabilities of consecutive positions in one prompt."""

    seq_id: int
    position: int
    num_top: int
    values: GatheredLogprobs


@dataclasses.dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step leaves on the device."""

    token_ids: torch.Tensor
    """[S] int64, a token for each row that samples."""
    logprobs: tuple[list[int], list[int], GatheredLogprobs] | None
    """Sequence ids, counts and values, for the rows that ask."""
    prompt_logprobs: list[PromptLogprobs]

    def to_host(self) -> "StepOutput":
        """Start the copies to the host."""
        return StepOutput(
            to_host(self.token_ids),
            self.logprobs and (*self.logprobs[:2], self.logprobs[2].to_host()),
            [part._replace(values=part.values.to_host()) for part in self.prompt_logprobs],
        )

    def result(self, step_id: int) -> StepResult:
        """Return the numbers; the copies must be done."""
        logprobs: dict[int, list[TokenLogprobs]] = {}
        prompt_logprobs: dict[int, list[tuple[int, TokenLogprobs]]] = {}
        if self.logprobs is not None:
            seq_ids, counts, gathered = self.logprobs
            values = gathered.tolist(counts)
            logprobs = {seq_id: [value] for seq_id, value in zip(seq_ids, values, strict=True)}
        for part in self.prompt_logprobs:
            values = part.values.tolist([part.num_top] * len(part.values.ranks))
            prompt_logprobs.setdefault(part.seq_id, []).extend(enumerate(values, part.position))
        token_ids = [[token] for token in self.token_ids.tolist()]
        return StepResult(step_id, token_ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


class PendingResult:
    """A launched step's tokens, perhaps still being computed."""

    def __init__(self, step_id: int, output: StepOutput) -> None:
        self._step_id = step_id
        self._output = output.to_host()
        self._copied: torch.cuda.Event | None = None
        if output.token_ids.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def result(self) -> StepResult:
        """Wait for the step and return its tokens."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._output.result(self._step_id)
