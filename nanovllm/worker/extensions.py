"""What may be added to a worker. Each part is None until somebody sets it, and the worker then does
without.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch

from nanovllm.scheduler.messages import Admission, Ending, Row, Schedule
from nanovllm.scheduler.worker_info import WorkerInfo
from nanovllm.worker.device_tables import DeviceTables

LAPS = 3
"""A step runner may overwrite the tokens of the run that is so many runs back."""


class Computed(NamedTuple):
    """What a step runner computed for a step of T tokens: hidden states, or tokens and logits.

    The next run may overwrite all of it but the tokens.
    """

    hidden: torch.Tensor | None = None
    """[T, hidden_size]."""
    tokens: torch.Tensor | None = None
    """[T] int64, what follows each token, drawn without logits rules and stored in the tables. May
    be on the host: valid when the device is done."""
    logits: torch.Tensor | None = None
    """[T, vocab_size]; None on a rank without logits."""
    draft_ids: torch.Tensor | None = None
    """[T] int64, what the tables held behind each token before; None if no row has drafts."""


class StepRunner(Protocol):
    """A faster way to run some steps than layer by layer."""

    def fits(self, rows: list[Row]) -> bool:
        """Return whether this runner can run a step of `rows`."""
        ...

    def run(self, rows: list[Row]) -> Computed:
        """Write the KV of the tokens of `rows`; return what was computed."""
        ...


class FastSteps(Protocol):
    """Makes the step runners of a network."""

    uses_graphs: bool
    """Whether CUDA graphs are among them. Then the KV pool has one more block, for the tokens that
    pad a step, and the device can count the drafts that a step confirms."""

    def measure(self, tables: DeviceTables, *, accepts: bool) -> int:
        """Return the bytes that CUDA graphs will take. Called with a small pool that does not stay.

        Args:
            accepts: whether the steps count confirmed drafts, see `Kernels.accept`.
        """
        ...

    def make(self, tables: DeviceTables, *, accepts: bool) -> list[StepRunner]:
        """Return the step runners: the first one that fits a step runs it. Called once."""
        ...


class Drafter(Protocol):
    """Proposes draft tokens, which a step then verifies."""

    block_bytes: int
    """Bytes that it needs for each KV block on this rank."""
    follows_drafts: bool
    """Whether `draft` takes rows with `num_unverified_tokens`. It may be set in `allocate`."""

    def warm_up(self, tables: DeviceTables, num_blocks: int, rows: list[Row]) -> int:
        """Reach the peak of memory with `rows`, the longest prompts of a step; return the bytes
        that CUDA graphs will take in addition. Nothing stays.
        """
        ...

    def allocate(self, tables: DeviceTables, num_blocks: int) -> None:
        """Prepare for `tables` and KV blocks 0 to num_blocks - 1. Called once."""
        ...

    def admit(self, schedule: Schedule) -> None:
        """Note which table rows and blocks have new owners. Called before each step."""
        ...

    def draft(self, rows: list[Row]) -> list[Row]:
        """Write drafts into the tables; return `rows` with as many drafts as there are."""
        ...

    def add_costs(
        self, info: WorkerInfo, tables: DeviceTables, run: Callable[[list[Row]], object]
    ) -> WorkerInfo:
        """Return `info` with the measured costs of proposing and of steps.

        Called before a sequence owns a block or a table row.

        Args:
            run: runs a step.
        """
        ...


class ForcedTokens(Protocol):
    """Knows which tokens must follow the output of one sequence."""

    def forced(self, tokens: list[int]) -> list[int]:
        """Return the tokens that must follow the output and its next `tokens`, which are new."""
        ...


class StepMasks(Protocol):
    """The masks of a step's samples."""

    endings: dict[int, Ending]
    """By sample, after `apply`: why it has no mask."""

    @property
    def forcing(self) -> Mapping[int, ForcedTokens]:
        """By sequence id: what may force tokens behind those that this step gives."""
        ...

    def apply(self, logits: torch.Tensor) -> None:
        """Set the logits [S, vocab_size] float32 of forbidden tokens to -inf."""
        ...


class LogitMasks(Protocol):
    """Says which tokens the table rows may sample."""

    def admit(self, admissions: list[Admission]) -> None:
        """Note which table rows have new owners. Called before each step."""
        ...

    def begin(self, tables: DeviceTables, rows: list[Row]) -> StepMasks | None:
        """Begin to compute the masks of a step; None if no row that samples needs one.

        The tables hold the step's drafts already.
        """
        ...
