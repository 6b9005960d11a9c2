"""`AsyncLLM`: the methods of `LLM` for asyncio, for many tasks at once.

One thread runs the engine. Another makes requests, so that neither the engine nor an event loop
waits while a long prompt is tokenized.
"""

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence as Seq
from concurrent.futures import Future
from functools import partial
from typing import Any

from nanovllm.chat.templates import Message, template_options
from nanovllm.control_api import AsyncWeightMethods
from nanovllm.engine.engine_thread import EngineThread, FairExecutor, Result, fulfil
from nanovllm.engine.prompt import PromptInput
from nanovllm.engine.reader import Reader, send
from nanovllm.engine.request import Request
from nanovllm.errors import EngineDeadError
from nanovllm.factory import make_engine
from nanovllm.options.config import Config
from nanovllm.options.lora_request import LoRARequest
from nanovllm.options.pooling_params import PoolingParams
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.options.validation import takes_other_keywords
from nanovllm.outputs import (
    EmbeddingRequestOutput,
    Histogram,
    Metric,
    RequestOutput,
    ScoringRequestOutput,
    Vector,
)


class AsyncLLM(AsyncWeightMethods):
    """A model that many asyncio tasks use at once; their requests share the engine's batches.

    Args:
        model: a local checkpoint directory, a GGUF file, or a Hugging Face hub id.
        options: the fields of `Config`.

    Raises:
        NanoVLLMError: as `LLM`.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.engine = make_engine(Config(model=model, **options))
        self._thread = EngineThread(self.engine, "AsyncLLM")
        self._input = FairExecutor(1, "nanovllm-input")  # makes requests
        self._making: dict[str | None, str] = {}  # users, by id of a request being made
        self._finalizer = weakref.finalize(self, _stop, self._thread, self._input)

    def stream(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        user: str | None = None,
        lora_request: LoRARequest | None = None,
        on_finished: Callable[[], object] | None = None,
        take: Callable[[RequestOutput], bool] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for one prompt and yield the delta of each step, as `LLM.stream` does.

        Deltas that arrive while the task is not reading are joined into one.

        Arguments are as for `generate`.

        Args:
            on_finished: called in the event loop when the engine has ended the request, though its
                last deltas may still be unread.
            take: as for `Reader`; it is called in the event loop.

        Cancelling the task, or closing the iterator, aborts the request and frees its blocks.

        Raises:
            InvalidRequestError: the prompt or a parameter is invalid or unsupported.
            EngineDeadError: the engine is down.
        """
        return self._run_request(
            lambda: prompt,
            sampling_params,
            request_id,
            user,
            on_finished,
            take,
            stream=True,
            priority=priority,
            lora_request=lora_request,
        )

    @takes_other_keywords
    async def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        user: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> RequestOutput:
        """Generate for one prompt and return the whole output; `stream` gives deltas.

        Args:
            sampling_params: with PoolingParams, the output has `pooled` in place of tokens.
            request_id: the caller's id, for `abort` and the output; None assigns a number.
            priority: lower values go first.
            user: whose request it is. Waiting requests of one priority are admitted so that all
                users get equally many tokens; those without a user count as one user's.
            lora_request: the LoRA adapter to use; None means the base model.

        Cancelling the task aborts the request and frees its blocks.

        Raises:
            InvalidRequestError: the prompt or a parameter is invalid or unsupported.
            EngineDeadError: the engine is down.
        """
        given = sampling_params, request_id, user
        return await self._whole(
            lambda: prompt, *given, priority=priority, lora_request=lora_request
        )

    @takes_other_keywords
    async def chat(
        self,
        messages: Seq[Message],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        user: str | None = None,
        lora_request: LoRARequest | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> RequestOutput:
        """Answer one conversation, rendered by a chat template.

        Arguments are as for `LLM.chat` and `generate`.

        Raises:
            InvalidRequestError: there is no chat template, or it cannot render the messages; or
                as for `generate`.
            EngineDeadError: the engine is down.
        """
        shape = add_generation_prompt, continue_final_message, tools, chat_template
        options = template_options(*shape, chat_template_kwargs)
        given = sampling_params, request_id, user
        render = partial(self._processor.render, messages, options)
        return await self._whole(render, *given, priority=priority, lora_request=lora_request)

    @takes_other_keywords
    async def embed(
        self,
        prompt: PromptInput,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        user: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> EmbeddingRequestOutput:
        """Return the vector of one prompt; arguments are as for `LLM.embed` and `generate`.

        Raises:
            InvalidRequestError, CheckpointError, EngineDeadError: as for `LLM.embed`.
        """
        params = PoolingParams() if pooling_params is None else pooling_params
        fair: dict[str, Any] = {"priority": priority, "user": user, "lora_request": lora_request}
        output = await self.generate(prompt, params, request_id, **fair)
        return self._processor.pooling.embedding(output)

    @takes_other_keywords
    async def score(
        self,
        data_1: str | Seq[str],
        data_2: str | Seq[str],
        /,
        *,
        pooling_params: PoolingParams | None = None,
        instruction: str | None = None,
        priority: int = 0,
        user: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return how well pairs of texts fit; arguments are as for `LLM.score` and `generate`.

        Raises:
            InvalidRequestError, CheckpointError, EngineDeadError: as for `LLM.embed`.
        """
        pooling = self._processor.pooling
        scoring = await asyncio.to_thread(
            pooling.scoring, data_1, data_2, pooling_params, instruction
        )
        fair: dict[str, Any] = {"priority": priority, "user": user, "lora_request": lora_request}
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self.generate(prompt, params, **fair))
                    for prompt, params in zip(scoring.prompts, scoring.params, strict=True)
                ]
        except ExceptionGroup as errors:  # the first ends the others
            raise errors.exceptions[0] from None
        return scoring.results([task.result() for task in tasks])

    @takes_other_keywords
    async def abort(self, request_id: int | str | Iterable[int | str]) -> None:
        """End a request: its `generate` or `stream` returns what it has, with finish reason abort.

        Args:
            request_id: of one request or of several. An id that no running request has is ignored.
        """
        if not isinstance(request_id, int | str):
            for each in request_id:
                await self.abort(each)
            return
        user = self._making.get(request_id, "") if isinstance(request_id, str) else ""
        await self._between_steps(lambda: self.engine.abort(request_id), after_input_of=user)

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine is down."""
        await self._between_steps(self._thread.check_health)

    async def get_metrics(self) -> list[Metric | Vector | Histogram]:
        """Return the engine's counts and its load now, as `LLM.get_metrics` does."""
        return await self._between_steps(self.engine.get_metrics)

    def shutdown(self) -> None:
        """End the engine; running requests raise EngineDeadError. May be called more than once."""
        self._finalizer()

    async def _between_steps(
        self, command: Callable[[], Result], *, after_input_of: str | None = None
    ) -> Result:
        """Run a command on the engine's thread and return its result, once its outputs are sent.

        Args:
            after_input_of: a user; the command waits for this user's requests being made.
        """
        submit = partial(self._thread.submit, command)
        if after_input_of is None:
            return await asyncio.wrap_future(submit())
        done = await asyncio.wrap_future(self._submit_input(after_input_of, submit))
        return await asyncio.wrap_future(done)

    def _submit_input(self, user: str, command: Callable[[], Result]) -> Future[Result]:
        """Run a command on the thread that makes requests, or here if that thread has ended.

        Raises:
            EngineDeadError: the engine was made before this process was forked: the thread is not
                here.
        """
        self.engine.owner.check()
        try:
            return self._input.submit(user, command)
        except RuntimeError:
            done = Future[Result]()
            fulfil(done, command)
            return done

    async def _whole(self, *request: Any, **options: Any) -> RequestOutput:
        """Return the one output of what `_run_request` runs."""
        outputs = self._run_request(*request, **options)
        async with contextlib.aclosing(outputs):
            return await anext(outputs)

    async def _run_request(
        self,
        make_prompt: Callable[[], PromptInput],
        params: SamplingParams | PoolingParams | None,
        request_id: str | None,
        user: str | None,
        on_finished: Callable[[], object] | None = None,
        take: Callable[[RequestOutput], bool] | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a request; `options` are further ones of `make_request`."""
        self.engine.owner.check()
        if not self._finalizer.alive:
            raise EngineDeadError("the engine was shut down; make a new AsyncLLM")
        thread = self._thread
        processor = self._processor
        reader = Reader(on_finished, take)
        turns_of = user if isinstance(user, str) else ""  # make_request() refuses other types
        making = self._making
        own_id = request_id if isinstance(request_id, str) else None
        making[own_id] = turns_of

        def make_request() -> None:
            try:
                if reader.is_closed:
                    return
                request = processor.make_request(
                    make_prompt(), params, request_id=request_id, user=user, **options
                )
            except BaseException as error:  # a panic in tokenizers is not an Exception
                send([(reader, error)])
            else:
                thread.submit(lambda: _start(thread, reader, request))
            finally:
                making.pop(own_id, None)

        self._submit_input(turns_of, make_request)
        finished = False
        try:
            while not finished:
                output = await reader.get()
                finished = output.finished
                yield output
        finally:
            if not finished:  # also after an error, when the request is not running
                reader.is_closed = True
                thread.post(lambda: thread.close(reader))


def _start(thread: EngineThread, reader: Reader, request: Request) -> None:
    """Queue a request, or give its reader the error."""
    if not reader.is_closed:
        reader.sends_all = request.sends_all
        try:
            thread.start_request(reader, request)
        except BaseException as error:
            send([(reader, error)])


def _stop(thread: EngineThread, input_thread: FairExecutor) -> None:
    """End both threads. Requests that are still being made fail, as the engine is down."""
    input_thread.shutdown()
    thread.stop()
