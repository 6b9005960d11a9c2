"""A step's outputs on the device, and their copy to the host. Knows no model and no batch."""

import dataclasses
import threading
from collections.abc import Mapping

import torch

from nanovllm.scheduler.messages import Ending, Row, RowDetails, StepResult
from nanovllm.utils.transfer import to_host
from nanovllm.worker.extensions import ForcedTokens
from nanovllm.worker.logprobs import Logprobs
from nanovllm.worker.row_details import detailed_results
from nanovllm.worker.timing import StepTimer


@dataclasses.dataclass(frozen=True, slots=True)
class StepOutput:
    """The outputs of a step, on the device or on the host."""

    token_ids: torch.Tensor
    """[S] int64, what `SamplingRows.sample` returned."""
    logprobs: list[Logprobs] = dataclasses.field(default_factory=list)
    """Of the samples and prompts whose request wants them."""
    endings: dict[int, Ending] = dataclasses.field(default_factory=dict)
    """By sample: what `SamplingRows.endings` has. The token of such a sample does not count."""
    draft_ids: torch.Tensor | None = None
    """[S] int64, the draft that the sample may confirm; None if no row has any."""
    forcing: Mapping[int, ForcedTokens] = dataclasses.field(default_factory=dict)
    """By sequence id: what may force tokens behind the sampled ones."""
    on_host: bool = False
    """Whether `token_ids` is memory of the host, to which this step writes and later ones too."""

    def to_host(self) -> "StepOutput":
        """Return a copy on the host. On CUDA the copy is asynchronous."""
        return StepOutput(
            self.token_ids if self.on_host else to_host(self.token_ids),
            [part.to_host() for part in self.logprobs],
            self.endings,
            None if self.draft_ids is None else to_host(self.draft_ids),
            self.forcing,
            self.on_host,
        )

    def row_results(self, rows: list[Row]) -> tuple[list[list[int]], dict[int, RowDetails]]:
        """Return the tokens of each row, and the details of the rows that have any.

        The copies to the host must be complete.
        """
        sampled = self.token_ids.tolist()
        has_details = self.logprobs or self.endings or self.forcing or min(sampled, default=0) < 0
        if self.draft_ids is None and not has_details:  # most steps: one token a row
            tokens_left = iter(sampled)
            return [[next(tokens_left)] if row.samples else [] for row in rows], {}
        drafts = sampled if self.draft_ids is None else self.draft_ids.tolist()
        return detailed_results(rows, sampled, drafts, self.endings, self.forcing, self.logprobs)


class PendingResult:
    """The result of a launched step, which may still be running.

    Args:
        rows: with the drafts that were proposed, which may be fewer than scheduled.
        timer: marked the ends of proposing and of the step; None: the step is not timed.
    """

    def __init__(
        self, step_id: int, rows: list[Row], output: StepOutput, timer: StepTimer | None = None
    ) -> None:
        self._step_id = step_id
        self._rows = rows
        self._timer = timer
        self._output = output.to_host()
        self._result: StepResult | None = None
        self._lock = threading.Lock()  # one thread of a rank launches steps, another reads results
        self._copied: torch.cuda.Event | None = None
        if output.on_host or output.token_ids.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def result(self) -> StepResult:
        """Wait for the step and return its result."""
        with self._lock:
            if self._result is None:
                if self._copied is not None:
                    self._copied.synchronize()
                token_ids, details = self._output.row_results(self._rows)
                drafting, seconds = (0.0, 0.0) if self._timer is None else self._timer.seconds()
                self._result = StepResult(self._step_id, token_ids, details, seconds, drafting)
            return self._result

    def keep(self) -> None:
        """Read the tokens now, if a later step may overwrite them."""
        if self._output.on_host:
            self.result()
