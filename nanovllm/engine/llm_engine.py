"""The engine loop: schedule, execute, update. Follows each request from arrival to output.

The executor hides what runs the model.
"""

import contextlib
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.core.messages import Schedule, StepResult
from nanovllm.core.sequence import Sequence
from nanovllm.core.worker_info import WorkerInfo
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.output_processor import OutputProcessor
from nanovllm.engine.prompt import PromptInput
from nanovllm.engine.request import Request
from nanovllm.errors import EngineDeadError, InvalidRequestError, PluginError, log_failure
from nanovllm.options.config import Config
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.options.validation import shown
from nanovllm.outputs import Histogram, Metric, RequestOutput, Vector
from nanovllm.parallel.executor import Executor, Future
from nanovllm.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from nanovllm.features.training.control import WeightControl

logger = logging.getLogger(__name__)


class OwnerProcess:
    """The process that makes this object: an engine's threads, ranks and GPU stay with it."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_this(self) -> bool:
        """Whether this process is it, and not one forked from it."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise EngineDeadError in a forked process."""
        if not self.is_this:
            raise EngineDeadError(
                f"the engine belongs to process {self._pid}, and this is process {os.getpid()}, "
                'forked from it: use multiprocessing\'s "spawn" and make the LLM in the new process'
            )


class Observer:
    """Is told what an engine does, in its thread. By default it does nothing.

    `LLMEngine.observers` holds those that listen; one may be added or removed between two steps.
    They change nothing that they are given. A loop of the engine may launch one step and take the
    result of an earlier one; in this process on a CPU both are the same step.
    """

    def add_request(self, request: Request) -> None:
        """Note a request that was queued."""

    def end(self, seq: Sequence) -> None:
        """Note that a sequence has finished; called once for each."""

    def begin_step(self) -> None:
        """Note that the engine's loop begins."""

    def scheduled(self, schedule: Schedule, scheduler: Scheduler) -> None:
        """Note a step that was scheduled, and is launched next. Its blocks are allocated."""

    def launched(self, schedule: Schedule) -> None:
        """Note that the step was launched; in this process on a CPU it is computed by then."""

    def waited(self, result: StepResult) -> None:
        """Note that a step's tokens have come. The sequences do not have them yet."""

    def end_step(self, scheduler: Scheduler) -> None:
        """Note that the engine's loop has ended, without an error. Sequences have their tokens."""

    def close(self) -> None:
        """Note that the engine ends. May be called again."""


@dataclass(eq=False, repr=False)
class LLMEngine:
    """Continuous batching over one model, for one thread: `EngineThread` sees to that.

    `factory.make_engine` makes it of its parts.
    """

    config: Config
    worker_info: WorkerInfo
    executor: Executor  # started; the engine shuts it down, and closes the observers
    scheduler: Scheduler
    input_processor: InputProcessor
    output_processor: OutputProcessor
    _: KW_ONLY
    generation_config: Mapping[str, Any]  # the sampling parameters recommended for the model
    load_tokenizer: Callable[[], Any]  # returns the checkpoint's transformers tokenizer, or None
    observers: list[Observer]
    queue_depth: int  # how many more steps to launch before the oldest one's tokens are known

    def __post_init__(self) -> None:
        self.stats = self.scheduler.stats
        self.owner = OwnerProcess()
        self._finalizer = weakref.finalize(
            self, _shut_down, self.executor, self.observers, self.owner
        )
        self._in_flight: deque[tuple[Schedule, Future]] = deque()  # oldest first
        self._outputs: deque[RequestOutput] = deque()  # of requests without `deliver`
        self._has_failed = False  # by a PluginError
        self.is_paused = False  # requests are queued, and no step is launched
        self._held: list[Request] | None = None  # not queued yet; None: new requests are
        self.weights: WeightControl | None = None  # made when weights first change, or sleep
        self.profile: tuple[str, Observer] | None = None  # the begin of its files' names, its trace

    def add_request(
        self, prompt: PromptInput, params: SamplingParams | None = None, **options: Any
    ) -> int | str:
        """Queue a request whose outputs `step` returns; return its id. See `make_request`."""
        request = self.input_processor.make_request(prompt, params, **options)
        self.queue(request)
        return request.request_id

    def queue(
        self, request: Request, deliver: Callable[[RequestOutput], object] | None = None
    ) -> None:
        """Queue a request, whose outputs `deliver` gets; None lets `step` return them.

        Raises:
            InvalidRequestError: its id is that of a running request, or no request can run now.
            EngineDeadError: the engine is down.
        """
        self.check_health()
        if self.weights is not None:
            self.weights.require_ready()
        if request.request_id in self.output_processor.requests:
            raise InvalidRequestError(
                f"request_id {shown(request.request_id)} is that of a running request: give each "
                "its own"
            )
        request.deliver = deliver
        self.output_processor.add_request(request)
        for observer in self.observers:
            observer.add_request(request)
        if self._held is not None:
            self._held.append(request)
        else:
            self._queue_first(request)

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine is down, or this process was forked from its own."""
        self.owner.check()
        self.executor.check_health()

    def hold_new_requests(self) -> None:
        """Queue requests that come from now on only after `queue_held_requests`."""
        self._held = [] if self._held is None else self._held

    def queue_held_requests(self) -> None:
        """Queue what `hold_new_requests` has held, unless a PluginError came; hold no more."""
        while self._held and not self._has_failed:
            request = self._held.pop(0)
            if request.unqueued:  # else it was aborted
                self._queue_first(request)
        self._held = None

    def step(self) -> list[RequestOutput]:
        """Run a step and return the outputs of requests without `deliver`."""
        self.run_step()
        return self.take_outputs()

    def take_outputs(self) -> list[RequestOutput]:
        """Return the outputs of requests without `deliver` not returned yet, to any thread."""
        return [self._outputs.popleft() for _ in range(len(self._outputs))]

    def run_step(self) -> None:
        """Launch a step, process the oldest step's tokens, and deliver the outputs.

        On a CPU both are the same step. If the device runs ahead, the oldest is processed once more
        than `queue_depth` steps are in flight, or nothing was launched.

        Raises:
            EngineDeadError: the engine is down, or ends in this step. After another error the
                requests of the failed step and of later ones in flight are queued again. After an
                error in making one request's output, the others have got theirs.
        """
        self.owner.check()
        if self.is_shut_down:
            self.executor.check_health()
        with self._ended_by_plugins():
            for observer in self.observers:
                observer.begin_step()
            start = time.perf_counter()
            launched = not self.is_paused and self._launch_step()
            if self._in_flight and (not launched or len(self._in_flight) > self.queue_depth):
                self._process_oldest_step(start)
            for observer in self.observers:
                observer.end_step(self.scheduler)

    def abort(self, request_id: int | str) -> RequestOutput | None:
        """End a request; deliver and return its output not sent yet, None if it is not running."""
        request = self.output_processor.requests.get(request_id)
        if request is None or self._has_failed:
            return None
        with self._ended_by_plugins():
            self._queue_remaining(request)
            for seq in request.sequences:
                if not seq.is_finished:
                    self.scheduler.finish(seq, "abort")
                    self.output_processor.process_tokens(seq, time.monotonic())  # its last text
                    for observer in self.observers:
                        observer.end(seq)
        output = self.output_processor.make_output(request)
        if output is not None and request.deliver is not None:
            request.deliver(output)
        return output

    def run_last_steps(self) -> None:
        """Run remaining steps after the last sequence finishes, unless the engine is paused. With a
        byte store below the pool, one of them begins to write what the last request left.

        An error is logged: the callers have their outputs.
        """
        try:
            # If steps are in flight, the first calls end them.
            scheduler = self.scheduler
            while scheduler.num_unfinished and not (
                scheduler.running or scheduler.num_waiting or self.is_paused
            ):
                self.run_step()
        except EngineDeadError:  # those who need the engine are told
            logger.debug("the engine ended before the step after the last request")
        except Exception as error:
            log_failure(logger, error, "the step after the last request failed")

    def finish_steps(self) -> None:
        """Process the steps in flight of a paused engine."""
        assert self.is_paused
        while self._in_flight:
            self.run_step()

    def is_finished(self) -> bool:
        """Whether no request is unfinished and no output waits; steps in flight do not count."""
        return not (self.scheduler.num_unfinished or self._outputs)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes; return False, and forget none, while requests hold blocks.

        Args:
            reset_running_requests: take their blocks away: they keep their tokens, wait again, and
                compute their KV anew.

        Raises:
            EngineDeadError: the engine is down.
        """
        self.check_health()
        with self._ended_by_plugins():
            if reset_running_requests:
                for seq in list(self.scheduler.running):
                    self.scheduler.preempt(seq)
            return self.scheduler.reset_prefix_cache()

    def get_metrics(self) -> list[Metric | Vector | Histogram]:
        """Return the engine's counts and its load by vLLM's names, which count continuations."""
        from nanovllm.engine.engine_metrics import read_metrics

        num_held = sum(bool(request.unqueued) for request in self._held or ())
        return read_metrics(self.scheduler, num_held)

    def shutdown(self) -> None:
        """End the workers and free the model, as garbage collection and Python's exit do. May be
        called again.
        """
        self.input_processor.shutdown()
        self._finalizer()

    @property
    def is_shut_down(self) -> bool:
        """Whether `shutdown` was called, or Python is at its exit."""
        return not self._finalizer.alive

    @contextlib.contextmanager
    def _ended_by_plugins(self) -> Iterator[None]:
        """End the engine if a class of the user's fails: its pages and queue are unknown then."""
        try:
            yield
        except PluginError as error:
            self._has_failed = True
            self._in_flight.clear()
            self.executor.shutdown(str(error))
            self.shutdown()
            raise

    def _launch_step(self) -> bool:
        """Launch the next step; return False if there is nothing to compute now."""
        schedule = self.scheduler.schedule()
        if schedule is None:
            return False
        try:
            # Before execute(), which computes the whole step if it runs in this process.
            for admission in schedule.admissions:
                request = self.output_processor.request_of(admission.seq_id)
                if request is not None and request.first_scheduled_time is None:
                    request.first_scheduled_time = time.monotonic()
            for observer in self.observers:
                observer.scheduled(schedule, self.scheduler)
            future = self.executor.execute(schedule)
        except BaseException:
            self.scheduler.abandon(schedule)
            raise
        self._in_flight.append((schedule, future))
        self.stats.step_sizes[schedule.num_tokens] += 1
        for observer in self.observers:
            observer.launched(schedule)
        return True

    def _process_oldest_step(self, start: float) -> None:
        """Wait for the oldest step in flight, process its tokens and deliver the outputs. `start`
        is when `run_step` began.
        """
        schedule, future = self._in_flight[0]
        try:
            result = future.result()
            for observer in self.observers:
                observer.waited(result)
            self._in_flight.popleft()
            self._process_result(schedule, result)
            if self.scheduler.drafting is not None:
                elapsed = None if self.queue_depth else time.perf_counter() - start
                self.scheduler.drafting.settle(schedule, result, elapsed)
        except PluginError:
            raise
        except BaseException:
            # The steps launched after a failed one may have read KV that it did not write. If only
            # a result's processing failed, their sequences wait again and lose nothing.
            while self._in_flight:
                self.scheduler.abandon(self._in_flight.popleft()[0])
            raise

    def _process_result(self, schedule: Schedule, result: StepResult) -> None:
        updated: dict[int | str, Request] = {}
        now = time.monotonic()
        for seq in self.scheduler.update(schedule, result):
            request, finish_info = self.output_processor.process_tokens(seq, now)
            if finish_info is not None:
                self.scheduler.finish(seq, *finish_info[:2])
            if seq.is_finished:
                for observer in self.observers:
                    observer.end(seq)
                if seq.output.finish_reason == "error":
                    reason = seq.output.stop_reason
                    logger.warning("request %s ended: %s", request.request_id, reason)
            self._queue_remaining(request)
            if request.stream or seq.is_finished:
                updated[request.request_id] = request
        failure: BaseException | None = None
        for request in updated.values():
            try:
                output = self.output_processor.make_output(request)
                if output is not None:
                    (request.deliver or self._outputs.append)(output)
            except BaseException as error:  # the other requests get their outputs first
                failure = failure or error
        if failure is not None:
            raise failure

    def _queue_first(self, request: Request) -> None:
        """Queue a request's first sequence. The others follow once it has computed the prompt: they
        find its blocks cached.
        """
        with self._ended_by_plugins():
            self.scheduler.add(request.unqueued.pop(0))

    def _queue_remaining(self, request: Request) -> None:
        """Queue the request's sequences that the scheduler does not have yet."""
        while request.unqueued:
            self.scheduler.add(request.unqueued.pop(0))


def _shut_down(executor: Executor, observers: list[Observer], owner: OwnerProcess) -> None:
    """End the workers and the observers, unless this process was forked: they are its parent's."""
    if owner.is_this:
        executor.shutdown()
        for observer in observers:
            observer.close()


def run_logged(command: Callable[[], object]) -> None:
    """Run a command; log what it raises, so that neither the thread nor the next command fails."""
    try:
        command()
    except BaseException as error:
        log_failure(logger, error, "a command to the engine failed")
