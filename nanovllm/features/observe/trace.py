"""`Trace`: a timeline of the engine for ui.perfetto.dev, as Chrome trace events in a JSON file.

It records which sequence waits, computes or was preempted, and what each step took, but neither
tokens nor text. It never stops the engine: if the file can no longer be written, it warns and ends.
"""

import dataclasses
import json
import logging
import os
import time
from collections import deque
from functools import partial
from typing import IO, Any

from nanovllm.core.messages import Admission, Schedule, StepResult
from nanovllm.core.sequence import Sequence
from nanovllm.engine.llm_engine import Observer
from nanovllm.engine.request import Request
from nanovllm.errors import ConfigError
from nanovllm.options.validation import shown
from nanovllm.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 0.5
_MAX_PENDING = 4096
"""Events are written to the file after so many seconds, or when so many are in memory."""

_HOST = (1, 1)
_STEPS = (1, 2)
_COUNTERS = (1, 3)
"""The lanes of the engine. Those of sequences are (2, number). The format calls the first number a
process, and the second a thread."""


class _TraceFile:
    """A JSON array of events on disk. It is whole after each flush, which moves its end."""

    def __init__(self, path: str) -> None:
        try:
            private = partial(os.open, mode=0o600)  # a new file is for its owner only
            self._file: IO[bytes] = open(path, "wb", opener=private)  # noqa: SIM115
            self._file.seek(0)
        except OSError as error:
            raise ConfigError(
                f"trace must be a file that can be written, got {shown(path)}: {error.strerror}"
            ) from error
        self._size = 0  # without the closing bracket
        self._last_flush = time.monotonic()
        self.pending: list[dict[str, Any]] = []

    def is_due(self, now: float) -> bool:
        return len(self.pending) >= _MAX_PENDING or now - self._last_flush >= _FLUSH_SECONDS

    def flush(self) -> None:
        """Write the pending events.

        Raises:
            OSError: the file cannot be written.
        """
        self._last_flush = time.monotonic()
        if self.pending:
            data = ("," if self._size else "[") + json.dumps(self.pending)[1:-1] + "\n"
            self.pending.clear()
            self._file.seek(self._size)
            self._file.write(data.encode() + b"]\n")
            self._file.flush()
            self._size += len(data)

    def close(self) -> None:
        self._file.close()


@dataclasses.dataclass(slots=True)
class _Lane:
    """One sequence's lane, which it has from its arrival to its end; then another may take it."""

    place: tuple[int, int]
    seq: Sequence
    state: str = ""  # "waiting", "prefill", "decode" or "preempted"
    num_preemptions: int = 0
    num_known: int = 0  # output tokens when the state began


class Trace(Observer):
    """Writes what the engine reports into a file.

    The lanes of sequences hold one span from arrival to end, named after the request, and in it the
    states without a gap: waiting, prefill (one for each chunk), decode, preempted. A state lasts
    until the next one begins. A lane is used again when its sequence has ended.

    Args:
        path: the file, which is overwritten.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: str) -> None:
        self._file: _TraceFile | None = _TraceFile(path)  # None: it cannot be written any more
        self._start = self._mark = time.monotonic()  # the mark is the end of the host's last phase
        self._steps_end = self._start  # of the last span in the lane of steps
        self._is_in_step = False
        self._lanes: dict[int, _Lane] = {}  # by sequence id
        self._num_lanes = 0
        self._free_lanes: deque[tuple[tuple[int, int], float]] = deque()  # (place, since)
        self._prefilling: dict[int, int] = {}  # tokens to compute first, by sequence id
        self._num_preemptions = 0  # of the scheduler, when they were looked for
        self._launched: deque[tuple[float, dict[str, int]]] = deque()  # steps: start, arguments
        self._processed: dict[str, int] | None = None  # the arguments of a step
        self._rate_start: float | None = None  # when the last rate was written; None: idle since
        self._counts: dict[str, dict[str, float]] = {}  # the last values of each counter
        for place, what, name in (
            ((1, 0), "process_name", "engine"),
            ((2, 0), "process_name", "sequences"),
            (_HOST, "thread_name", "host"),
            (_STEPS, "thread_name", "steps"),
        ):
            self._add("M", place, self._start, name=what, args={"name": name})

    def add_request(self, request: Request) -> None:
        arrival = max(request.arrival_time, self._start)
        for index, seq in enumerate(request.sequences):
            if seq.is_finished:
                continue
            if self._free_lanes and self._free_lanes[0][1] <= arrival:
                place, _ = self._free_lanes.popleft()
            else:
                self._num_lanes += 1
                place = (2, self._num_lanes)
                label = {"name": f"slot {self._num_lanes}"}
                self._add("M", place, arrival, name="thread_name", args=label)
            lane = self._lanes[seq.seq_id] = _Lane(place, seq)
            args = {"prompt_tokens": seq.num_prompt_tokens, "priority": seq.priority}
            name = f"{request.request_id}" + (f" #{index}" if request.params.n > 1 else "")
            self._add("B", place, arrival, name=name, args=args)
            self._change(lane, arrival, "waiting")
            if seq.table_idx is not None:  # its next row says whether its prompt is computed
                self._prefilling[seq.seq_id] = seq.num_prompt_tokens

    def end(self, seq: Sequence) -> None:
        if seq.seq_id in self._lanes:
            now = time.monotonic()
            self._end_lane(seq.seq_id, now)
            if not self._is_in_step:  # it was aborted, perhaps the last one
                self._flush(now)

    def begin_step(self) -> None:
        self._mark = time.monotonic()
        if self._is_in_step:  # the last one raised an error
            self._add("i", _HOST, self._mark, s="g", name="step failed")
            self._processed = None
            self._find_preempted(())
        self._is_in_step = True

    def scheduled(self, schedule: Schedule, scheduler: Scheduler) -> None:
        self._phase("schedule", schedule.step_id)
        if self._num_preemptions != scheduler.stats.num_preemptions:
            self._num_preemptions = scheduler.stats.num_preemptions
            self._find_preempted(schedule.admissions)
        for admission in schedule.admissions:
            self._prefilling[admission.seq_id] = len(admission.token_ids)
        num_prefill_rows = num_prefill_tokens = 0
        for row in schedule.rows if self._prefilling else ():
            if row.seq_id not in self._prefilling:
                continue
            if row.num_computed_tokens >= self._prefilling[row.seq_id]:
                del self._prefilling[row.seq_id]
                self._change(self._lanes[row.seq_id], self._mark, "decode")
                continue
            num_tokens = row.sample_position - row.num_computed_tokens
            num_prefill_rows += 1
            num_prefill_tokens += num_tokens
            args = {"tokens": num_tokens, "step": schedule.step_id}
            self._change(self._lanes[row.seq_id], self._mark, "prefill", args)
        args = {
            "step": schedule.step_id,
            "rows": len(schedule.rows),
            "prefill_rows": num_prefill_rows,
            "prefill_tokens": num_prefill_tokens,
            "decode_rows": len(schedule.rows) - num_prefill_rows,
        }
        self._launched.append((self._mark, args))

    def launched(self, schedule: Schedule) -> None:
        self._phase("launch", schedule.step_id)

    def waited(self, result: StepResult) -> None:
        self._phase("wait", result.step_id)
        if not self._launched or self._launched[0][1]["step"] > result.step_id:
            return  # it was launched before the trace began
        start, args = self._launched.popleft()
        while args["step"] != result.step_id:  # that one failed
            start, args = self._launched.popleft()
        args["output_tokens"] = sum(map(len, result.token_ids))
        if result.seconds:  # only a step that may have drafts is timed
            details = result.details.values()
            args["drafts_proposed"] = sum(found.num_draft_tokens for found in details)
            args["drafts_accepted"] = args["output_tokens"] - sum(map(bool, result.token_ids))
        start = max(start, self._steps_end)  # it was computed after the one before it
        self._steps_end = self._mark
        self._span(_STEPS, "step", start, args)
        self._processed = args

    def end_step(self, scheduler: Scheduler) -> None:
        self._is_in_step = False
        if (args := self._processed) is not None:
            self._processed = None
            start = self._mark if self._rate_start is None else self._rate_start
            self._phase("process", args["step"])
            self._rate_start = self._mark
            seconds = max(self._mark - start, 1e-6)
            rates = {
                "prompt": args["prefill_tokens"] / seconds,
                "output": args["output_tokens"] / seconds,
            }
            self._count("tokens/s", rates)
        pool = scheduler.block_manager
        used = 100 * (1 - pool.num_free_blocks / len(pool.blocks))
        self._count("KV cache", {"percent used": used})
        running = len(scheduler.running)
        self._count("sequences", {"running": running, "waiting": scheduler.num_waiting})
        if not self._lanes:
            self._count("tokens/s", {"prompt": 0, "output": 0})
            self._rate_start = None
        self._flush(self._mark)

    def close(self) -> None:
        now = time.monotonic()
        for seq_id in list(self._lanes):
            self._end_lane(seq_id, now)
        self._flush(now)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _find_preempted(self, admissions: "list[Admission] | tuple[()]") -> None:
        """Change the state of sequences that lost their table row; `admissions` got a new one."""
        admitted = {admission.seq_id for admission in admissions}
        for seq_id, lane in self._lanes.items():
            lost = lane.seq.table_idx is None or seq_id in admitted
            if lost and lane.state in ("prefill", "decode"):
                lane.num_preemptions += 1
                self._change(lane, self._mark, "preempted")

    def _end_lane(self, seq_id: int, now: float) -> None:
        lane = self._lanes.pop(seq_id)
        self._prefilling.pop(seq_id, None)
        self._free_lanes.append((lane.place, now))
        self._end_state(lane, now)
        args = {
            "finish_reason": lane.seq.output.finish_reason,
            "output_tokens": lane.seq.num_output_tokens,
            "cached_tokens": lane.seq.num_cached_tokens or 0,
            "preemptions": lane.num_preemptions,
        }
        self._add("E", lane.place, now, args=args)

    def _change(
        self, lane: _Lane, now: float, state: str, args: dict[str, int] | None = None
    ) -> None:
        """End a sequence's state, if it has one, and begin the next."""
        if lane.state:
            self._end_state(lane, now)
        lane.state = state
        lane.num_known = lane.seq.num_output_tokens
        self._add("B", lane.place, now, name=state, args=args or {})

    def _end_state(self, lane: _Lane, now: float) -> None:
        args = {"output_tokens": lane.seq.num_output_tokens - lane.num_known}
        self._add("E", lane.place, now, args=args)

    def _phase(self, name: str, step_id: int) -> None:
        """Add a span of the host from the last mark to now, the next mark."""
        start = self._mark
        self._mark = time.monotonic()
        self._span(_HOST, name, start, {"step": step_id})

    def _span(self, place: tuple[int, int], name: str, start: float, args: dict[str, int]) -> None:
        """Add a span that ends at the mark."""
        self._add("X", place, start, name=name, dur=_micros(self._mark - start), args=args)

    def _count(self, name: str, values: dict[str, float]) -> None:
        """Add the values of a counter, at the mark, if they have changed."""
        if self._counts.get(name) != values:
            self._counts[name] = values
            args = {key: round(value, 2) for key, value in values.items()}
            self._add("C", _COUNTERS, self._mark, name=name, args=args)

    def _add(self, kind: str, place: tuple[int, int], now: float, **fields: Any) -> None:
        if self._file is not None:
            pid, tid = place
            time_since = _micros(now - self._start)
            event = {"ph": kind, "pid": pid, "tid": tid, "ts": time_since, **fields}
            self._file.pending.append(event)

    def _flush(self, now: float) -> None:
        """Write what is pending if it is time, or if nothing runs: the next step may be far."""
        try:
            if self._file is not None and (not self._lanes or self._file.is_due(now)):
                self._file.flush()
        except OSError as error:
            logger.warning("the trace ends here, its file cannot be written: %s", error)
            self._file = None


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)
