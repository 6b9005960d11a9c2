"""`Trace`: a timeline of the engine for ui.perfetto.dev, as Chrome trace events in a JSON file.

Knows which sequence waits, computes or was preempted, and what each step took. Knows no token and
no text. It never stops the engine: if the file cannot be written any more, it warns and ends.
"""

import json
import logging
import os
import time
from collections import deque
from typing import IO

from nanovllm.engine.extensions import Observer
from nanovllm.engine.request import Request
from nanovllm.errors import ConfigError
from nanovllm.options.validation import shown
from nanovllm.scheduler.messages import Admission, Schedule, StepResult
from nanovllm.scheduler.scheduler import Scheduler
from nanovllm.scheduler.sequence import Sequence

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 0.5
_MAX_PENDING = 4096
"""Events are written to the file after so many seconds, or when so many are in memory."""

_ENGINE, _SEQUENCES = 1, 2
"""The two groups of lanes: "processes" to the format."""
_HOST, _STEPS, _COUNTERS = 1, 2, 3
"""The lanes of the first group."""


class _TraceFile:
    """A JSON array of events on disk. It is whole after each flush, which moves its end."""

    def __init__(self, path: str) -> None:
        try:
            self._file: IO[bytes] = open(path, "wb", opener=_open_private)  # noqa: SIM115
            self._file.seek(0)
        except OSError as error:
            raise ConfigError(
                f"trace must be a file that can be written, got {shown(path)}: {error.strerror}"
            ) from error
        self._size = 0  # without the closing bracket
        self._last_flush = time.monotonic()
        self.pending: list[str] = []

    def is_due(self, now: float) -> bool:
        return len(self.pending) >= _MAX_PENDING or now - self._last_flush >= _FLUSH_SECONDS

    def flush(self) -> None:
        """Write the pending events.

        Raises:
            OSError: the file cannot be written.
        """
        self._last_flush = time.monotonic()
        if self.pending:
            data = ((",\n" if self._size else "[\n") + ",\n".join(self.pending)).encode()
            self.pending.clear()
            self._file.seek(self._size)
            self._file.write(data + b"\n]\n")
            self._file.flush()
            self._size += len(data)

    def close(self) -> None:
        self._file.close()


def _open_private(path: str, flags: int) -> int:
    """Open a file; a new one is for its owner only."""
    return os.open(path, flags, 0o600)


class _Lane:
    """One sequence's lane, which it has from its arrival to its end; then another may take it."""

    __slots__ = ("has_sampled", "num_known", "num_preemptions", "number", "seq", "state")

    def __init__(self, number: int, seq: Sequence) -> None:
        self.number = number
        self.seq = seq
        self.state = ""  # "waiting", "prefill", "decode" or "preempted"
        self.has_sampled = False  # since its admission
        self.num_preemptions = 0
        self.num_known = 0  # output tokens when the state began


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
        self._start = time.monotonic()
        self._mark = self._start  # end of the last phase of the host
        self._is_in_step = False
        self._lanes: dict[int, _Lane] = {}  # by sequence id
        self._running: dict[int, _Lane] = {}  # those that have a table row
        self._decoding: set[int] = set()  # ids of those whose state is decode
        self._num_lanes = 0
        self._free_lanes: deque[tuple[int, float]] = deque()  # (number, since), oldest first
        self._launched: dict[int, tuple[float, str, int]] = {}  # by step: start, args, prompt toks
        self._steps_end = self._start  # of the last span in the lane of steps
        self._processed: tuple[int, int, int] | None = None  # step, prompt and output tokens
        self._rate_start: float | None = None  # when the last rate was written; None: idle since
        self._counters: dict[str, str] = {}  # what each was last
        for pid, name in ((_ENGINE, "engine"), (_SEQUENCES, "sequences")):
            self._name("process_name", pid, 0, name)
        self._name("thread_name", _ENGINE, _HOST, "host")
        self._name("thread_name", _ENGINE, _STEPS, "steps")

    def add_request(self, request: Request) -> None:
        """Begin the lanes of a request's sequences, at its arrival."""
        if self._file is None:
            return
        arrival = request.arrival_time
        for index, seq in enumerate(request.sequences):
            if self._free_lanes and self._free_lanes[0][1] <= arrival:
                number, _ = self._free_lanes.popleft()
            else:
                self._num_lanes += 1
                number = self._num_lanes
                self._name("thread_name", _SEQUENCES, number, f"slot {number}")
            lane = self._lanes[seq.seq_id] = _Lane(number, seq)
            name = f"{request.request_id}" + (f" #{index}" if request.params.n > 1 else "")
            args = f'"prompt_tokens":{seq.num_prompt_tokens},"priority":{seq.priority}'
            self._begin(lane, arrival, name, args)
            self._change(lane, arrival, "waiting")

    def end(self, seq: Sequence) -> None:
        """End the lane of a sequence that has finished."""
        if self._file is not None and seq.seq_id in self._lanes:
            now = time.monotonic()
            self._end_lane(self._lanes[seq.seq_id], now)
            if not self._is_in_step:  # it was aborted, perhaps the last one
                self._flush(now)

    def begin_step(self) -> None:
        """Note that the engine's loop begins."""
        if self._file is None:
            return
        self._mark = time.monotonic()
        if self._is_in_step:  # the last one raised an error
            self._add(f'"ph":"i","s":"g","name":"step failed",{self._at(_ENGINE, _HOST)}')
            self._processed = None
            self._find_preempted(())
        self._is_in_step = True

    def scheduled(self, schedule: Schedule, scheduler: Scheduler) -> None:
        """Note the step that was scheduled, and who was preempted or admitted by it."""
        if self._file is None:
            return
        self._phase("schedule", schedule.step_id)
        if len(self._running) + len(schedule.admissions) != len(scheduler.running):
            self._find_preempted(schedule.admissions)
        for admission in schedule.admissions:
            lane = self._running[admission.seq_id] = self._lanes[admission.seq_id]
            lane.has_sampled = False
        num_prefill_rows = num_prefill_tokens = 0
        for row in schedule.rows:
            if row.seq_id in self._decoding:
                continue
            lane = self._lanes[row.seq_id]
            if lane.has_sampled:
                self._decoding.add(row.seq_id)
                self._change(lane, self._mark, "decode")
            else:
                lane.has_sampled = row.samples
                num_prefill_rows += 1
                num_tokens = row.num_known_tokens - row.num_computed_tokens
                num_prefill_tokens += num_tokens
                args = f'"tokens":{num_tokens},"step":{schedule.step_id}'
                self._change(lane, self._mark, "prefill", args)
        num_rows = len(schedule.rows)
        args = (
            f'"step":{schedule.step_id},"rows":{num_rows},"prefill_rows":{num_prefill_rows},'
            f'"prefill_tokens":{num_prefill_tokens},"decode_rows":{num_rows - num_prefill_rows}'
        )
        self._launched[schedule.step_id] = (self._mark, args, num_prefill_tokens)

    def launched(self, schedule: Schedule) -> None:
        """Note that the step was launched; in this process on a CPU it is computed by then."""
        if self._file is not None:
            self._phase("launch", schedule.step_id)

    def waited(self, result: StepResult) -> None:
        """Note that a step's tokens have come."""
        if self._file is None:
            return
        self._phase("wait", result.step_id)
        start, args, num_prompt_tokens = self._launched.pop(result.step_id)
        self._launched = {k: v for k, v in self._launched.items() if k > result.step_id}
        num_tokens = sum(map(len, result.token_ids))
        args += f',"output_tokens":{num_tokens}'
        if result.seconds:  # only a step that may have drafts is timed
            num_accepted = num_tokens - sum(map(bool, result.token_ids))
            num_proposed = sum(found.num_draft_tokens for found in result.details.values())
            args += f',"drafts_proposed":{num_proposed},"drafts_accepted":{num_accepted}'
        start = max(start, self._steps_end)  # it was computed after the one before it
        self._steps_end = self._mark
        self._span(_STEPS, "step", start, self._mark, args)
        self._processed = (result.step_id, num_prompt_tokens, num_tokens)

    def end_step(self, scheduler: Scheduler) -> None:
        """Note that the engine's loop has ended, and the load that it left."""
        if self._file is None:
            return
        self._is_in_step = False
        if self._processed is not None:
            step_id, num_prompt_tokens, num_tokens = self._processed
            self._processed = None
            start = self._mark if self._rate_start is None else self._rate_start
            self._phase("process", step_id)
            seconds = max(self._mark - start, 1e-6)
            self._count_rates(num_prompt_tokens / seconds, num_tokens / seconds)
            self._rate_start = self._mark
        pool = scheduler.block_manager
        used = 100 * (1 - pool.num_free_blocks / len(pool.blocks))
        self._count("KV cache", f'"percent used":{used:.2f}')
        num_running = len(scheduler.running)
        self._count("sequences", f'"running":{num_running},"waiting":{scheduler.num_waiting}')
        if not self._lanes:
            self._count_rates(0, 0)
            self._rate_start = None
        self._flush(self._mark)

    def close(self) -> None:
        """End all lanes and close the file. May be called again."""
        if self._file is None:
            return
        now = time.monotonic()
        for lane in list(self._lanes.values()):
            self._end_lane(lane, now)
        self._flush(now)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _find_preempted(self, admissions: "list[Admission] | tuple[()]") -> None:
        """Change the state of sequences that lost their table row; `admissions` got a new one."""
        admitted = {admission.seq_id for admission in admissions}
        for seq_id, lane in list(self._running.items()):
            if lane.seq.table_idx is None or seq_id in admitted:
                del self._running[seq_id]
                self._decoding.discard(seq_id)
                lane.num_preemptions += 1
                self._change(lane, self._mark, "preempted")

    def _end_lane(self, lane: _Lane, now: float) -> None:
        seq = lane.seq
        for known in (self._lanes, self._running):
            known.pop(seq.seq_id, None)
        self._decoding.discard(seq.seq_id)
        self._free_lanes.append((lane.number, now))
        args = (
            f'"finish_reason":{json.dumps(seq.finish_reason)},'
            f'"output_tokens":{seq.num_output_tokens},"cached_tokens":{seq.num_cached_tokens or 0},'
            f'"preemptions":{lane.num_preemptions}'
        )
        self._end_state(lane, now)
        self._add(f'"ph":"E",{self._at(_SEQUENCES, lane.number, now)},"args":{{{args}}}')

    def _change(self, lane: _Lane, now: float, state: str, args: str = "") -> None:
        """End a sequence's state, if it has one, and begin the next."""
        if lane.state:
            self._end_state(lane, now)
        lane.state, lane.num_known = state, lane.seq.num_output_tokens
        self._begin(lane, now, state, args)

    def _end_state(self, lane: _Lane, now: float) -> None:
        tokens = f'"output_tokens":{lane.seq.num_output_tokens - lane.num_known}'
        self._add(f'"ph":"E",{self._at(_SEQUENCES, lane.number, now)},"args":{{{tokens}}}')

    def _begin(self, lane: _Lane, now: float, name: str, args: str) -> None:
        where = self._at(_SEQUENCES, lane.number, now)
        self._add(f'"ph":"B","name":{json.dumps(name)},{where},"args":{{{args}}}')

    def _phase(self, name: str, step_id: int) -> None:
        """Add a span of the host from the last mark to now, the next mark."""
        start, self._mark = self._mark, time.monotonic()
        self._span(_HOST, name, start, self._mark, f'"step":{step_id}')

    def _span(self, tid: int, name: str, start: float, end: float, args: str) -> None:
        where, duration = self._at(_ENGINE, tid, start), (end - start) * 1e6
        self._add(f'"ph":"X","name":"{name}",{where},"dur":{duration:.3f},"args":{{{args}}}')

    def _count_rates(self, prompt: float, output: float) -> None:
        self._count("tokens/s", f'"prompt":{prompt:.1f},"output":{output:.1f}')

    def _count(self, name: str, values: str) -> None:
        """Add the values of a counter if they have changed."""
        if self._counters.get(name) != values:
            self._counters[name] = values
            where = self._at(_ENGINE, _COUNTERS, self._mark)
            self._add(f'"ph":"C","name":"{name}",{where},"args":{{{values}}}')

    def _name(self, what: str, pid: int, tid: int, name: str) -> None:
        self._add(f'"ph":"M","name":"{what}","pid":{pid},"tid":{tid},"args":{{"name":"{name}"}}')

    def _at(self, pid: int, tid: int, now: float | None = None) -> str:
        """Return the fields of a lane and a time, in microseconds since the trace's start."""
        since = (self._mark if now is None else now) - self._start
        return f'"pid":{pid},"tid":{tid},"ts":{since * 1e6:.3f}'

    def _add(self, fields: str) -> None:
        if self._file is not None:
            self._file.pending.append(f"{{{fields}}}")

    def _flush(self, now: float) -> None:
        """Write what is pending if it is time, or if nothing runs: the next step may be far."""
        if self._file is None:
            return
        try:
            if not self._lanes or self._file.is_due(now):
                self._file.flush()
        except OSError as error:
            logger.warning("the trace ends here, its file cannot be written: %s", error)
            self._file = None
