"""What proposers have in common: each guesses the next tokens of a row.

A proposer reads the device tables and writes its guesses there. The model draws its own tokens, and
a guess is accepted if it equals the one drawn.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

from nanovllm.core.messages import Row, Schedule
from nanovllm.core.worker_info import WorkerInfo
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.network import Network
from nanovllm.worker.timing import measure_seconds

_STEP_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Tokens of the steps that are measured."""
_DRAFT_SIZES = (1, 4, 16, 64)
"""Rows for which proposing is measured."""
_PASSES = 4
"""Drafts that are proposed to measure what a further one costs."""


class Proposer(ABC):
    """Proposes draft tokens, which a step then verifies. Every rank has one, and all write the same
    drafts.
    """

    block_bytes = 0
    """Bytes that it needs for each KV block on this rank."""
    follows_drafts = False
    """Whether `propose` takes rows with `num_unverified_tokens`, whose first position is
    `DeviceTables.last_positions`. It may be set in `allocate`."""

    @property
    def networks(self) -> list[Network]:
        """The networks that draft; none of them is the target."""
        return []

    def warm_up(self, tables: DeviceTables, num_blocks: int, rows: list[Row]) -> int:
        """Reach the peak of memory with `rows`, the longest prompts of a step; return the bytes
        that CUDA graphs will take in addition. Nothing stays.

        Called before `allocate`, and only where the KV pool takes what memory is left.
        """
        return 0

    @abstractmethod
    def allocate(self, tables: DeviceTables, num_blocks: int) -> None:
        """Prepare for the target's `tables`, and its KV blocks 0 to num_blocks - 1. Called once."""

    def admit(self, schedule: Schedule) -> None:  # noqa: B027
        """Note which table rows and blocks have new owners.

        Called before each step, after `DeviceTables.apply`.
        """

    @abstractmethod
    def propose(self, rows: list[Row]) -> list[int]:
        """Write drafts for `rows`, and return how many each row got.

        Row r gets up to `r.num_draft_tokens` tokens, at its positions from `r.sample_position` on;
        that is at least 1. The tokens before them are in the tables, and their KV is written,
        except for the last one's.
        """

    def draft(self, rows: list[Row]) -> list[Row]:
        """Write drafts into the tables; return `rows` with as many drafts as there are."""
        drafting = [row for row in rows if row.num_draft_tokens]
        if not drafting:
            return rows
        counts = iter(self.propose(drafting))
        return [
            row._replace(num_scheduled_tokens=1 + count, num_draft_tokens=count)
            if row.num_draft_tokens and (count := next(counts)) < row.num_draft_tokens
            else row
            for row in rows
        ]

    def add_costs(
        self, info: WorkerInfo, tables: DeviceTables, run: Callable[[list[Row]], object]
    ) -> WorkerInfo:
        """Return `info` with the measured costs of proposing and of steps.

        Called before a sequence owns a block or a table row. The steps are greedy: what sampling
        adds is learned from the steps of requests.

        Args:
            run: runs a step.
        """
        tables.params[0] = SamplingParams(temperature=0.0)  # until a request owns the table row

        def step(num_tokens: int) -> None:
            run([Row(0, 0, 0, num_tokens, True, num_tokens - 1)])

        def draft(num_rows: int, num_drafts: int = 1) -> None:
            self.propose([Row(i, i, 1, 1 + num_drafts, True, num_drafts) for i in range(num_rows)])

        measure = partial(measure_seconds, platform=tables.platform)
        most = min(info.max_num_batched_tokens, info.max_model_len)
        step_sizes = [size for size in _STEP_SIZES if size <= most]
        draft_sizes = [size for size in _DRAFT_SIZES if size <= len(tables.params)]
        draft_seconds: tuple[tuple[int, float, float], ...] = ()
        if self.block_bytes and most > _PASSES:  # a network; other proposers cost nothing
            once = measure(draft, draft_sizes)
            often = measure(partial(draft, num_drafts=_PASSES), draft_sizes)
            draft_seconds = tuple(
                (size, first, max(total - first, 0.0) / (_PASSES - 1))
                for (size, first), (_, total) in zip(once, often, strict=True)
            )
        step_seconds = measure(step, step_sizes)
        drafts = info.drafts._replace(step_seconds=step_seconds, draft_seconds=draft_seconds)
        return dataclasses.replace(info, drafts=drafts)
