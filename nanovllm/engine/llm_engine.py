"""The loop: schedule, execute, update. Owns the requests from their arrival to their output.

Knows no tensors: what runs the model is behind the executor.
"""

import dataclasses
import random
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence as Seq
from itertools import count
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.output_processor import OutputProcessor, Request, load_tokenizer
from nanovllm.errors import InvalidRequestError
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler.block_manager import BlockManager
from nanovllm.scheduler.messages import Schedule
from nanovllm.scheduler.scheduler import Scheduler
from nanovllm.scheduler.sequence import Sequence
from nanovllm.utils.hub import open_checkpoint
from nanovllm.validation import check_int
from nanovllm.worker.executor import Future, make_executor

Prompt = str | Seq[int] | Mapping[str, Any]
"""Text, token ids, or vLLM's {"prompt": text} or {"prompt_token_ids": ids}."""


class LLMEngine:
    """Continuous batching over one model.

    Args:
        config: the engine's options.
        queue_depth: steps launched before the oldest one's tokens are known; 0 waits for each.
            None is 1 on CUDA, where a step runs beside the host, and 0 on a CPU.

    Raises:
        CheckpointError, ConfigError, OutOfMemoryError: the model cannot be served with these
        options.
    """

    def __init__(self, config: Config, *, queue_depth: int | None = None) -> None:
        self.config = config
        checkpoint = open_checkpoint(config.model, config.revision)
        self.output_processor = OutputProcessor(load_tokenizer(checkpoint))
        self.executor = make_executor(config, checkpoint)
        self._finalizer = weakref.finalize(self, self.executor.shutdown)
        self.cache_info = self.executor.start()
        self.generation_config = checkpoint.generation_config
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
        self.stats = self.scheduler.stats
        self._queue_depth = int(self.cache_info.runs_ahead) if queue_depth is None else queue_depth
        self._in_flight: deque[tuple[Schedule, Future]] = deque()
        self._outputs: list[RequestOutput] = []  # not yet returned by step()
        self._ids = count()  # of sequences; a request has its first sequence's
        self._seeds = random.Random(config.seed)

    def make_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        stream: bool = False,
    ) -> Request:
        """Check a request; nothing is queued yet.

        Raises:
            InvalidRequestError: the prompt or a parameter cannot be served.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params must be SamplingParams, got {type(params).__name__} {params!r}"
            )
        priority = check_int(InvalidRequestError, "priority", priority, -(2**31), 2**31)
        text, token_ids = self._read_prompt(prompt)
        limit = self.cache_info.max_model_len
        if len(token_ids) >= limit:
            raise InvalidRequestError(
                f"the prompt has {len(token_ids)} tokens; max_model_len {limit} leaves "
                f"room for {limit - 1} at most, and one of output: shorten it, or raise the limit"
            )
        self._check_token_ids(params)
        bad_words = self.output_processor.encode_bad_words(params.bad_words)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        # One of the siblings has the prompt's log-probabilities; the others may use the cache.
        others = dataclasses.replace(params, prompt_logprobs=None)
        sequences = [
            Sequence(
                next(self._ids),
                token_ids,
                others if index else params,
                seed=(seed + index) % 2**63,
                priority=priority,
                bad_words=bad_words,
            )
            for index in range(params.n)
        ]
        return self.output_processor.make_request(
            sequences[0].seq_id, text, params, sequences, stream=stream
        )

    def queue(self, request: Request) -> None:
        """Queue what `make_request` made.

        Raises:
            EngineDeadError: the engine is down.
        """
        self.executor.check_health()
        self.output_processor.add(request)
        # The others follow when the first has computed the prompt: they find its blocks cached.
        self.scheduler.add(request.unqueued.pop(0))

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        stream: bool = False,
    ) -> int:
        """Queue a request and return its id. Lower priorities go first, equal ones by arrival.

        Args:
            stream: let `step` return the news of each step rather than everything at the end.

        Raises:
            InvalidRequestError: the prompt or a parameter cannot be served.
            EngineDeadError: the engine is down.
        """
        request = self.make_request(prompt, sampling_params, priority=priority, stream=stream)
        self.queue(request)
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """Launch a step, take the oldest one's tokens, and return what there is to send.

        Raises:
            EngineDeadError: a worker died. (After any error the step's requests are queued again.)
        """
        schedule = self.scheduler.schedule()
        if schedule is not None:
            self._launch(schedule)
        if self._in_flight and (schedule is None or len(self._in_flight) > self._queue_depth):
            self._retire()
        outputs, self._outputs = self._outputs, []
        return outputs

    def abort(self, request_id: int) -> RequestOutput | None:
        """End a request and return what was not sent of its output; None if it is not running."""
        request = self.output_processor.get(request_id)
        if request is None:
            return None
        self._queue_rest(request)
        for completion in request.completions:
            self.scheduler.abort(completion.seq.seq_id)
        return self.output_processor.output(request)

    def is_running(self, request_id: int) -> bool:
        """Whether a request is queued or running."""
        return self.output_processor.get(request_id) is not None

    def is_finished(self) -> bool:
        """Whether nothing is left to run or to return; what is still in flight is superfluous."""
        return not (self.scheduler.num_unfinished or self._outputs)

    def put_back(self, outputs: list[RequestOutput]) -> None:
        """Return `outputs` from the next `step()`: they belong to another caller."""
        self._outputs += outputs

    def discard(self, request_id: int) -> None:
        """End a request whose output nobody will read, and drop what was not yet returned of it."""
        self.abort(request_id)
        self._outputs = [output for output in self._outputs if output.request_id != request_id]

    def shutdown(self) -> None:
        """End the workers and free the model. May be called again; also called when the engine is
        collected.
        """
        self._finalizer()

    def _launch(self, schedule: Schedule) -> None:
        try:
            self._note_scheduled(schedule)  # before it runs: in process, execute() computes
            self._in_flight.append((schedule, self.executor.execute(schedule)))
        except BaseException:
            self.scheduler.abandon(schedule)
            raise

    def _note_scheduled(self, schedule: Schedule) -> None:
        for admission in schedule.admissions:
            request = self.output_processor.request_of(admission.seq_id)
            if request is not None and request.first_scheduled_time is None:
                request.first_scheduled_time = time.monotonic()

    def _retire(self) -> None:
        schedule, future = self._in_flight[0]
        try:
            result = future.result()
        except BaseException:
            while self._in_flight:  # what was launched after it has read what it did not write
                self.scheduler.abandon(self._in_flight.popleft()[0])
            raise
        self._in_flight.popleft()
        with_news: dict[int, Request] = {}
        now = time.monotonic()
        for seq in self.scheduler.update(schedule, result):
            request, stop_string = self.output_processor.read(seq, now)
            if stop_string is not None:
                self.scheduler.finish(seq.seq_id, "stop", stop_string)
            self._queue_rest(request)
            if request.stream or seq.is_finished:
                with_news[request.request_id] = request
        outputs = map(self.output_processor.output, with_news.values())
        self._outputs += [output for output in outputs if output is not None]

    def _queue_rest(self, request: Request) -> None:
        while request.unqueued:
            self.scheduler.add(request.unqueued.pop(0))

    def _check_token_ids(self, params: SamplingParams) -> None:
        """Refuse parameters that name tokens which the model does not have."""
        last = self.cache_info.vocab_size - 1
        for name, token_ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("logit_bias", [token for token, _ in params.logit_bias]),
        ):
            if max(token_ids, default=0) > last:
                raise InvalidRequestError(
                    f"{name} holds token {max(token_ids)}; this model's last is {last}"
                )

    def _read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
                raise InvalidRequestError(
                    f'a prompt dictionary has one key, "prompt" or "prompt_token_ids", '
                    f"got {list(prompt)}"
                )
            (prompt,) = prompt.values()
        if isinstance(prompt, str):
            token_ids = self.output_processor.encode(prompt)
            if not token_ids:
                raise InvalidRequestError("the prompt is empty: give at least one token")
            return prompt, token_ids
        if not isinstance(prompt, Seq) or isinstance(prompt, bytes):
            raise InvalidRequestError(
                "a prompt must be a string or a list of token ids, "
                f"got {type(prompt).__name__} {prompt!r:.80}"
            )
        if not prompt:
            raise InvalidRequestError("the prompt is empty: give at least one token")
        last = self.cache_info.vocab_size - 1
        return None, [
            token
            if type(token) is int and 0 <= token <= last
            else check_int(InvalidRequestError, f"prompt token {index}", token, 0, last)
            for index, token in enumerate(prompt)
        ]
