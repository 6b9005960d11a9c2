"""What features add to a worker: faster ways to run steps, and parts of a runner."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence as Seq
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import torch

from nanovllm.attention.batch import Replaced
from nanovllm.core.messages import Row, Schedule
from nanovllm.core.worker_info import WorkerInfo
from nanovllm.options.plugins import load_class
from nanovllm.worker.step_output import PendingResult

if TYPE_CHECKING:
    from nanovllm.worker.step_sampler import StepSampler

LAPS = 3  # a step runner may overwrite the tokens of the run that is so many runs back


class StepTensors(NamedTuple):
    """What a step runner computed for a step of T tokens: hidden states, or tokens and logits.

    The next run may overwrite all of it but the tokens.
    """

    hidden: torch.Tensor | None = None  # [T, hidden_size]
    # [T] int64, what follows each token, drawn without logits rules and stored in the tables. May
    # be on the host: valid when the device is done.
    tokens: torch.Tensor | None = None
    logits: torch.Tensor | None = None  # [T, vocab_size]; None on a rank without logits
    # [T] int64, what the tables held after each token before; None if no row has drafts
    draft_ids: torch.Tensor | None = None


class StepRunner(ABC):
    """A faster way to run some steps than layer by layer."""

    # Whether it takes rows with `num_unverified_tokens`, whose position only the device knows.
    follows_drafts: ClassVar[bool] = False

    @abstractmethod
    def fits(self, rows: list[Row]) -> bool:
        """Return whether this runner can run a step of `rows`."""

    @abstractmethod
    def run(self, rows: list[Row]) -> StepTensors:
        """Write the KV of the tokens of `rows`; return what was computed."""


def step_runner_class(value: str) -> type[StepRunner]:
    """Return the class that the option step_runner names, "module:Class".

    Raises:
        ConfigError: there is no such class.
    """
    return load_class("step_runner", value, StepRunner, ("network", "tables"))  # type: ignore[type-abstract]


class RowNeeds(NamedTuple):
    """What a part needs of the forward pass of some rows."""

    indices: Seq[int] | None = ()  # in the batch, of tokens whose states are needed; None: all
    read: Callable[[torch.Tensor], None] | None = None  # takes them, in this order
    # Whether no step runner may compute the rows. None can if one of the next two is given.
    by_layer: bool = False
    embeds: Replaced | None = None  # for `Batch.embeds`
    rope: Replaced | None = None  # for `Batch.rope_positions`: [N]
    ends: Replaced | None = None  # for `Batch.ends`, of tokens that `embeds` has: [N]


class WorkerHook:
    """What a feature adds to a `ModelRunner`, which calls it as below. By default it does nothing.

    A part must not hold the runner, which holds the part.
    """

    def open(self, info: WorkerInfo, run: Callable[[list[Row]], object]) -> WorkerInfo:
        """Prepare for the KV pool and the tables, which now exist; called once. `run` runs a step
        to measure it, of which nothing may stay in the pool. Return `info` with what the scheduler
        is told.
        """
        return info

    def begin(self, schedule: Schedule) -> None:
        """Prepare for a step. Called first of all, before the tables change."""

    def begin_rows(self, rows: list[Row]) -> RowNeeds | None:
        """Prepare for the forward pass of `rows`, which belong to a step or to a measurement;
        return what the part needs of it.
        """
        return None

    def end(self, schedule: Schedule, pending: PendingResult) -> None:
        """Add to the result of the step, which was just launched."""

    def give_back(self) -> None:
        """Give memory that later requests fill again to the system, while no step runs."""

    def free(self) -> None:
        """Let go of the KV pool and the tables, which are about to be freed."""


class SamplingWatch(Protocol):
    """Is told what becomes of the logits of a step's S samples. It must not change them."""

    def begin(self, logits: torch.Tensor) -> None:
        """Note the logits [S, vocab_size] of the model."""
        ...

    def ruled(self, sample: int, rule: str, logits: torch.Tensor) -> None:
        """Note the logits [vocab_size] float32 of one sample after a rule, by the name of its
        parameter. The next rule changes the same tensor.
        """
        ...

    def sampled(self, sampling: "StepSampler", tokens: torch.Tensor) -> None:
        """Note the tokens [S] that were drawn of `sampling.ruled`."""
        ...
