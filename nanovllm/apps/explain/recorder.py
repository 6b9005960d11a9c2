"""`Recorder`: makes a `Step` of each step that an engine tells its observers of."""

import time
from collections.abc import Callable

from nanovllm.apps.explain.sampling import SamplingRecorder
from nanovllm.apps.explain.story import Note, RowStory, SequenceStory, Step
from nanovllm.core.messages import Row, Schedule, StepResult
from nanovllm.core.sequence import Sequence
from nanovllm.engine.llm_engine import Observer
from nanovllm.engine.request import Request
from nanovllm.scheduler.scheduler import Scheduler


class Recorder(Observer):
    """Tells what became of each step, once its tokens are known.

    Args:
        tell: is called with each step, in order.
        sampling: what watches the sampling of the same engine, which is idle at first.

    Attributes:
        sequences: those that have come, in order.
    """

    def __init__(self, tell: Callable[[Step], object], sampling: SamplingRecorder) -> None:
        self.sequences: list[SequenceStory] = []
        self._tell = tell
        self._sampling = sampling
        self._unfinished: dict[int, tuple[int, Sequence]] = {}  # by id: number and sequence
        self._prompts: dict[int, int] = {}  # by id: tokens known at the last admission
        self._fresh: set[int] = set()  # admitted, and had no row since
        self._launched: list[Step] = []  # oldest first
        self._processed: Step | None = None
        self._mark = 0.0  # time.perf_counter() at the end of the last phase

    def add_request(self, request: Request) -> None:
        for seq in request.sequences:
            number = len(self.sequences)
            self._unfinished[seq.seq_id] = number, seq
            self.sequences.append(SequenceStory(number, seq.num_prompt_tokens, list(seq.token_ids)))

    def end(self, seq: Sequence) -> None:
        number, _ = self._unfinished.pop(seq.seq_id)
        story = self.sequences[number]
        story.token_ids = list(seq.token_ids)
        story.finish_reason = seq.output.finish_reason
        if self._processed is not None:
            self._processed.ended.append(Note(number, f"{seq.output.finish_reason}"))
            self._fill(number, seq)

    def begin_step(self) -> None:
        self._mark = time.perf_counter()
        self._processed = None

    def scheduled(self, schedule: Schedule, scheduler: Scheduler) -> None:
        elapsed = self._lap()
        for admission in schedule.admissions:
            self._prompts[admission.seq_id] = len(admission.token_ids)
            self._fresh.add(admission.seq_id)
        pool = scheduler.block_manager
        step = Step(
            schedule.step_id,
            scheduler.max_num_batched_tokens,
            len(pool.blocks) - pool.num_free_blocks,
            [],
            [],
            self._preempted(scheduler),
        )
        left = step.budget
        for row in schedule.rows:
            step.rows.append(self._row(row, schedule, scheduler, left))
            left -= row.sample_position - row.num_computed_tokens
        step.waiting = self._waiting(scheduler, {row.seq_id for row in schedule.rows}, left)
        step.seconds["schedule"] = elapsed
        self._launched.append(step)
        self._mark = time.perf_counter()  # what this took is not the engine's

    def launched(self, schedule: Schedule) -> None:
        step = self._launched[-1]
        step.seconds["launch"] = self._lap()
        samples, seconds = self._sampling.take()
        for story, row in zip(step.rows, schedule.rows, strict=True):
            story.samples = samples.get(row.seq_id, [])
        step.seconds["launch"] -= seconds
        self._mark = time.perf_counter()

    def waited(self, result: StepResult) -> None:
        elapsed = self._lap()
        while self._launched[0].number < result.step_id:
            self._launched.pop(0)  # that one failed
        step = self._launched.pop(0)
        step.seconds["wait"] = elapsed
        for story, token_ids in zip(step.rows, result.token_ids, strict=True):
            story.output = list(token_ids)
            for sample in story.samples[len(story.output) :]:
                sample.counts = False  # it follows a rejected draft
        self._processed = step
        self._mark = time.perf_counter()

    def end_step(self, scheduler: Scheduler) -> None:
        if self._processed is None:
            return
        step = self._processed
        step.seconds["process"] = self._lap()
        for number, seq in self._unfinished.values():
            self._fill(number, seq)
        self._processed = None
        self._tell(step)
        self._mark = time.perf_counter()

    def _lap(self) -> float:
        """Return the seconds since the end of the last phase, which ends now."""
        before = self._mark
        self._mark = time.perf_counter()
        return self._mark - before

    def _fill(self, number: int, seq: Sequence) -> None:
        """Set the tokens that a sequence's row of the processed step computed: all are known."""
        assert self._processed is not None
        for story in self._processed.rows:
            if story.sequence == number:
                story.token_ids = seq.token_ids[story.start : story.start + story.num_tokens]

    def _row(self, row: Row, schedule: Schedule, scheduler: Scheduler, left: int) -> RowStory:
        """Return what a row does, and why it was scheduled.

        Args:
            left: tokens that the step may have from this row on.
        """
        number, seq = self._unfinished[row.seq_id]
        size = scheduler.block_manager.block_size
        start = row.num_computed_tokens
        num_tokens = row.sample_position - start
        num_missing = num_tokens if row.samples else len(seq.token_ids) - start
        is_prefill = start < self._prompts[row.seq_id]
        is_fresh = row.seq_id in self._fresh
        self._fresh.discard(row.seq_id)
        if is_fresh:
            new_blocks = seq.kv.block_table[start // size :]
        else:
            new_blocks = [
                block
                for new in schedule.new_blocks
                if new.table_idx == row.table_idx and new.start < len(seq.kv.block_table)
                for block in new.block_ids  # behind that the tables of windows and states begin
            ]
        return RowStory(
            number,
            row.table_idx,
            "prefill" if is_prefill else "decode",
            _why(num_tokens, num_missing, left, row, is_prefill=is_prefill),
            start,
            num_tokens,
            num_missing,
            start if is_fresh else None,
            list(seq.kv.block_table),
            new_blocks,
            [seq.kv.block_table[at // size] * size + at % size for at in range(start, row.end)],
        )

    def _preempted(self, scheduler: Scheduler) -> list[Note]:
        """Return the sequences that lost their KV for this step."""
        notes = []
        for stall in scheduler.stalls:
            if stall.preempted_by is not None:
                number, _ = self._unfinished[stall.seq_id]
                by, _ = self._unfinished[stall.preempted_by]
                text = f"#{by} needed a block"
                if by == number:
                    text = "it needed a block itself, and nobody behind it had one"
                notes.append(Note(number, text))
        return notes

    def _waiting(self, scheduler: Scheduler, scheduled: set[int], left: int) -> list[Note]:
        """Return why each unfinished sequence that is not `scheduled` has no row."""
        refused = {s.seq_id: s.reason for s in scheduler.stalls if s.preempted_by is None}
        first = next(iter(refused), None)
        notes = []
        for seq_id, (number, seq) in self._unfinished.items():
            if seq_id in scheduled:
                continue
            if not scheduler.is_unfinished(seq):
                text = "its request's first sequence computes the prompt for it"
            elif seq_id in refused:
                pool = scheduler.block_manager
                text = {
                    "blocks": f"too few blocks are free for its {len(seq.token_ids)} tokens: "
                    f"{pool.num_free_blocks} of {len(pool.blocks)}",
                    "table row": f"{len(scheduler.running)} run already, which is max_num_seqs",
                    "steps in flight": "the steps that it had before it was preempted still run",
                }[refused[seq_id]]
            elif left <= 0:
                text = "the step's tokens are used up (max_num_batched_tokens)"
            elif seq.is_held or not seq.is_queued:
                text = "its tokens, its adapter or its KV are still to come"
            elif first in self._unfinished:
                text = f"behind #{self._unfinished[first][0]}, which waits and goes first"
            elif scheduler.stalls:
                text = "a step that preempts admits nobody"
            else:
                text = "the step ended before its turn"
            notes.append(Note(number, text))
        return notes


def _why(num_tokens: int, num_missing: int, left: int, row: Row, *, is_prefill: bool) -> str:
    """Return why a row computes so many tokens. `left` is what the step had left for it."""
    if not is_prefill and num_tokens > 1:
        return f"{num_tokens} tokens at once: all but the first are forced by its grammar"
    if not is_prefill:
        drafts = f", and up to {row.num_draft_tokens} drafts to verify" * (row.num_draft_tokens > 0)
        return f"it goes on from its last token{drafts}"
    if num_tokens == num_missing:
        return f"all {num_missing} missing tokens fit into the {left} that the step had left"
    if num_tokens >= left:
        return f"a chunk, {num_tokens} of {num_missing} tokens: the step had {left} left"
    return f"a chunk, {num_tokens} of {num_missing} tokens: its policy or its layers end it here"
