"""Adds draft tokens to the rows of a step, decides which rows may follow drafts in flight, and
tells the controller what the step showed.

Knows no draft's value: the workers propose, verify and keep them.
"""

import time
from collections.abc import Mapping

from nanovllm.scheduler.block_manager import BlockManager
from nanovllm.scheduler.messages import MAX_SAMPLES, NewBlocks, Row, Schedule, StepResult
from nanovllm.scheduler.sequence import Sequence
from nanovllm.speculation.draft_controller import DraftController


def add_drafts(
    rows: list[Row],
    budget: int,
    sequences: Mapping[int, Sequence],
    block_manager: BlockManager,
    controller: DraftController,
) -> list[NewBlocks]:
    """Extend `rows` of one token by drafts, as many as `controller` expects to pay.

    Drafts take what the other rows left: `budget` tokens, and blocks that are free. They preempt no
    sequence. Requests with logits processors get none: their code may count its calls.

    Args:
        sequences: by id.

    Returns:
        The blocks added to block tables.
    """
    budget = min(budget, MAX_SAMPLES - sum(row.samples for row in rows))
    if budget <= 0:
        return []
    indices = [i for i, row in enumerate(rows) if row.samples and row.num_scheduled_tokens == 1]
    seqs = [sequences[rows[index].seq_id] for index in indices]
    candidates = []
    for seq in seqs:
        limit = min(seq.room - seq.num_pending_tokens - seq.num_draft_tokens, budget)
        # Logits processors are the user's code: no draft may show them tokens that do not count.
        candidates.append((seq.acceptance, 0 if seq.params.logits_processors else limit))
    num_tokens = sum(row.num_scheduled_tokens for row in rows)
    start_choice = time.perf_counter()
    counts = controller.choose(candidates, num_tokens)
    controller.add_host_seconds(time.perf_counter() - start_choice)
    new_blocks = []
    for index, seq, count in zip(indices, seqs, counts, strict=True):
        row, start = rows[index], len(seq.block_table)
        count = min(count, budget)
        appended = block_manager.allocate_blocks(seq, row.end + count)
        if appended is None:  # as many drafts as the sequence's blocks hold
            count = start * block_manager.block_size - row.end
        elif appended:
            new_blocks.append(NewBlocks(row.table_idx, start, appended))
        rows[index] = row._replace(num_scheduled_tokens=1 + count, num_draft_tokens=count)
        seq.num_draft_tokens += count
        seq.num_computed_tokens += count
        budget -= count
    return new_blocks


def take_back_followers(
    rows: list[Row],
    new_blocks: list[NewBlocks],
    sequences: Mapping[int, Sequence],
    block_manager: BlockManager,
) -> tuple[list[Row], list[NewBlocks]]:
    """Return `rows` and `new_blocks` without those of rows whose positions only the device knows,
    unless such rows can run in this step: see `WorkerInfo.follows_drafts`.

    Args:
        sequences: by id.
    """
    if not any(row.num_unverified_tokens for row in rows) or all(
        row.samples and row.num_scheduled_tokens == 1 and sequences[row.seq_id].params.is_plain
        for row in rows
    ):
        return rows, new_blocks
    taken = {row.table_idx: row for row in rows if row.num_unverified_tokens}
    for row in taken.values():
        seq = sequences[row.seq_id]
        seq.num_computed_tokens -= row.num_scheduled_tokens
        seq.num_in_flight_steps -= 1
        seq.num_pending_tokens -= 1
        block_manager.trim(seq, seq.num_computed_tokens)
    return (
        [row for row in rows if row.table_idx not in taken],
        [new for new in new_blocks if new.table_idx not in taken],
    )


def record_step(
    controller: DraftController, schedule: Schedule, result: StepResult, host_seconds: float
) -> None:
    """Tell `controller` what a step cost, by the tokens that were really computed.

    Args:
        host_seconds: what the host adds to `result.seconds`.
    """
    start = time.perf_counter()
    num_allowed = sum(row.num_draft_tokens for row in schedule.rows)
    proposed = [found.num_draft_tokens for found in result.details.values()]
    num_proposed = sum(proposed)
    controller.record_step(
        schedule.num_tokens - num_allowed + num_proposed,
        result.seconds + host_seconds,
        sum(count > 0 for count in proposed),
        num_proposed,
        result.draft_seconds,
    )
    # A proposer that looked and found nothing took its time for the choice alone.
    in_vain = 0.0 if num_proposed else result.draft_seconds
    controller.add_host_seconds(time.perf_counter() - start + in_vain)
