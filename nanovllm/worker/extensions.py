"""What may be added to a worker. Each part is None until somebody sets it, and the worker then does
without.
"""

from collections.abc import Mapping
from typing import Protocol

import torch

from nanovllm.scheduler.messages import Admission, Row
from nanovllm.worker.device_tables import DeviceTables


class ForcedTokens(Protocol):
    """Knows which tokens must follow the output of one sequence."""

    def forced(self, tokens: list[int]) -> list[int]:
        """Return the tokens that must follow the output and its next `tokens`, which are new."""
        ...


class StepMasks(Protocol):
    """The masks of a step's samples."""

    errors: dict[int, str]
    """By sample, after `apply`: why it has no mask; "" if its output is complete."""

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
