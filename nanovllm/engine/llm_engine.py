"""The engine loop: schedule, execute, update. Follows each request from arrival to output.

Knows no tensors: the executor hides what runs the model.
"""

import logging
import time
import weakref
from collections import deque

from nanovllm.config import Config
from nanovllm.engine.input_processor import InputProcessor, Prompt
from nanovllm.engine.output_processor import OutputProcessor
from nanovllm.engine.request import Request
from nanovllm.engine.tokenizer import load_tokenizer
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler.block_manager import BlockManager
from nanovllm.scheduler.messages import Schedule
from nanovllm.scheduler.scheduler import Scheduler
from nanovllm.utils.hub import configured_checkpoint
from nanovllm.worker.executor import Future, make_executor

logger = logging.getLogger(__name__)


class LLMEngine:
    """Continuous batching over one model.

    Args:
        config: the engine's options.
        queue_depth: how many more steps to launch before the oldest step's tokens are known; 0
            waits for each step. None is 1 on CUDA, where a step runs beside the host, and 0 on a
            CPU.

    Raises:
        CheckpointError, ConfigError, OutOfMemoryError: the model cannot run with these options.
    """

    def __init__(self, config: Config, *, queue_depth: int | None = None) -> None:
        self.config = config
        checkpoint = configured_checkpoint(config)
        self.executor = make_executor(config, checkpoint)
        tokenizer = load_tokenizer(checkpoint)
        self._finalizer = weakref.finalize(self, self.executor.shutdown)
        self.cache_info = self.executor.start()
        # "vllm" means no recommended parameters; the end-of-sequence tokens stay the checkpoint's.
        recommends = config.generation_config != "vllm"
        self.generation_config = checkpoint.generation_config if recommends else {}
        self.input_processor = InputProcessor(
            tokenizer,
            vocab_size=self.cache_info.vocab_size,
            max_model_len=self.cache_info.max_model_len,
            seed=config.seed,
            max_logprobs=config.max_logprobs,
            in_process=config.tensor_parallel_size == 1,
        )
        self.scheduler = Scheduler(
            BlockManager(
                self.cache_info.num_blocks,
                self.cache_info.block_size,
                enable_prefix_caching=config.enable_prefix_caching,
            ),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=self.cache_info.max_num_batched_tokens,
            max_model_len=self.cache_info.max_model_len,
            eos_token_ids=checkpoint.eos_token_ids,
        )
        self.output_processor = OutputProcessor(tokenizer)
        self.stats = self.scheduler.stats
        self._queue_depth = int(self.cache_info.runs_ahead) if queue_depth is None else queue_depth
        self._in_flight: deque[tuple[Schedule, Future]] = deque()  # oldest first
        self._outputs: list[RequestOutput] = []  # for the next step() to return

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        stream: bool = False,
    ) -> int:
        """Queue a request and return its id. Lower priority values go first, then earlier arrivals.

        Args:
            stream: make `step` return the request's delta of each step, not one output at the end.

        Raises:
            InvalidRequestError: the prompt or a parameter is invalid or unsupported.
            EngineDeadError: the engine is down.
        """
        request = self.input_processor.make_request(
            prompt, sampling_params, priority=priority, stream=stream
        )
        self.queue(request)
        return request.request_id

    def queue(self, request: Request) -> None:
        """Queue a request that `input_processor.make_request` made.

        Raises:
            EngineDeadError: the engine is down.
        """
        self.executor.check_health()
        self.output_processor.add_request(request)
        # The others follow once the first has computed the prompt: they find its blocks cached.
        self.scheduler.add(request.unqueued.pop(0))

    def step(self) -> list[RequestOutput]:
        """Launch a step, process the oldest step's tokens, and return the outputs to send.

        Raises:
            EngineDeadError: a worker died. After any error the requests of the step are queued
                again.
        """
        schedule = self.scheduler.schedule()
        if schedule is not None:
            self._launch_step(schedule)
        if self._in_flight and (schedule is None or len(self._in_flight) > self._queue_depth):
            self._process_oldest_step()
        outputs, self._outputs = self._outputs, []
        return outputs

    def abort(self, request_id: int) -> RequestOutput | None:
        """End a request and return its output that was not sent yet; None if it is not running."""
        request = self.output_processor.get_request(request_id)
        if request is None:
            return None
        self._queue_remaining(request)
        for seq in request.sequences:
            self.scheduler.abort(seq.seq_id)
        return self.output_processor.make_output(request)

    def is_running(self, request_id: int) -> bool:
        """Whether a request is queued or running."""
        return self.output_processor.get_request(request_id) is not None

    def is_finished(self) -> bool:
        """Whether no request is unfinished and no output waits; steps in flight do not count."""
        return not (self.scheduler.num_unfinished or self._outputs)

    def defer_outputs(self, outputs: list[RequestOutput]) -> None:
        """Make the next `step()` return these outputs; their requests belong to other callers."""
        self._outputs += outputs

    def discard(self, request_id: int) -> None:
        """End a request and drop its outputs, also those that `step()` has not returned yet."""
        self.abort(request_id)
        self._outputs = [output for output in self._outputs if output.request_id != request_id]

    def shutdown(self) -> None:
        """End the workers and free the model. May be called again.

        Garbage collection of the engine and the exit of Python do the same.
        """
        self.input_processor.shutdown()
        self._finalizer()

    def _launch_step(self, schedule: Schedule) -> None:
        try:
            # Before execute(), which computes the whole step if it runs in this process.
            self._set_first_scheduled_times(schedule)
            self._in_flight.append((schedule, self.executor.execute(schedule)))
        except BaseException:
            self.scheduler.abandon(schedule)
            raise

    def _set_first_scheduled_times(self, schedule: Schedule) -> None:
        for admission in schedule.admissions:
            request = self.output_processor.request_of(admission.seq_id)
            if request is not None and request.first_scheduled_time is None:
                request.first_scheduled_time = time.monotonic()

    def _process_oldest_step(self) -> None:
        """Wait for the oldest step in flight, process its tokens and collect the outputs."""
        schedule, future = self._in_flight[0]
        try:
            result = future.result()
        except BaseException:
            # The steps launched after a failed one may have read KV that it did not write.
            while self._in_flight:
                self.scheduler.abandon(self._in_flight.popleft()[0])
            raise
        self._in_flight.popleft()
        updated: dict[int, Request] = {}
        now = time.monotonic()
        for seq in self.scheduler.update(schedule, result):
            request, stop_string = self.output_processor.process_tokens(seq, now)
            if seq.finish_reason == "error":
                logger.warning("request %d ended: %s", request.request_id, seq.stop_reason)
            if stop_string is not None:
                self.scheduler.finish(seq.seq_id, "stop", stop_string)
            self._queue_remaining(request)
            if request.stream or seq.is_finished:
                updated[request.request_id] = request
        outputs = map(self.output_processor.make_output, updated.values())
        self._outputs += [output for output in outputs if output is not None]

    def _queue_remaining(self, request: Request) -> None:
        """Queue the request's sequences that the scheduler does not have yet."""
        while request.unqueued:
            self.scheduler.add(request.unqueued.pop(0))
