"""A proposer that knows each sequence's output and is right with a given probability.

Benchmarks and tests use it in place of a real proposer. It works only in this process.
"""

import random
from collections.abc import Iterable

from nanovllm.core.messages import Row, Schedule
from nanovllm.core.sequence import Sequence
from nanovllm.features.speculation.proposers.proposer import Proposer
from nanovllm.worker.device_tables import DeviceTables


class Scripted(Proposer):
    """Proposes each next token rightly with probability `acceptance`."""

    follows_drafts = True

    def __init__(self, acceptance: float = 1.0) -> None:
        self.acceptance = acceptance
        self._known: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        self._expected: dict[int, list[int]] = {}  # by table row
        self._random = random.Random(0)

    def learn(self, sequences: Iterable[Sequence]) -> None:
        """Note the tokens of finished sequences, by their seeds and prompts."""
        for seq in sequences:
            prompt = tuple(seq.token_ids[: seq.num_prompt_tokens])
            self._known[seq.seed, prompt] = list(seq.token_ids)

    def allocate(self, tables: DeviceTables, num_blocks: int) -> None:
        self._tables = tables.token_ids.numpy()
        self._last_positions = tables.last_positions.numpy()

    def admit(self, schedule: Schedule) -> None:
        for new in schedule.admissions:
            prompt = tuple(new.token_ids[: new.num_prompt_tokens])
            self._expected[new.table_idx] = self._known.get((new.seed, prompt), [])

    def propose(self, rows: list[Row]) -> list[int]:
        for row in rows:
            table_row, expected = self._tables[row.table_idx], self._expected.get(row.table_idx, [])
            first = row.sample_position
            if row.num_unverified_tokens:
                first = int(self._last_positions[row.table_idx]) + 1
            for position in range(first, first + row.num_draft_tokens):
                token = expected[position] if position < len(expected) else 0
                right = self._random.random() < self.acceptance
                table_row[position] = token if right else token ^ 1
        return [row.num_draft_tokens for row in rows]
