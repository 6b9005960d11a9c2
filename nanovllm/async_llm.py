"""`AsyncLLM`: the methods of `LLM` for asyncio. One thread runs the engine for all tasks.

Knows no tensors and no scheduling: it passes on the engine's outputs.
"""

import asyncio
import contextlib
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence as Seq
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NoReturn

from nanovllm.config import Config
from nanovllm.engine.chat import Message, template_options
from nanovllm.engine.input_processor import Prompt
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import EngineDeadError
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams, default_sampling_params
from nanovllm.unsupported import refuse_attribute

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = RequestOutput | BaseException
"""What a request's reader receives: an output, or the error that ended the request."""


class _Reader:
    """Receives one request's items: a queue in the event loop of the task that made the request."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[Item] = asyncio.Queue()
        self.request_id: int | str | None = None  # read and set by the engine thread only


class _EngineThread(threading.Thread):
    """Owns the engine and runs its steps.

    Other threads submit commands; only this thread calls the engine, and runs commands in order
    between steps.
    """

    def __init__(self, engine: LLMEngine) -> None:
        super().__init__(name="nanovllm-engine", daemon=True)
        self.engine = engine
        self.inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.readers: dict[int | str, _Reader] = {}  # by request id
        self.has_ended = False

    def run(self) -> None:
        while self._run_commands():
            try:
                outputs = self.engine.step()
            except Exception as error:
                self._fail_all(error)
            else:
                self._deliver(outputs)
        self._fail_all(EngineDeadError("the engine was shut down; make a new AsyncLLM"))
        self.engine.shutdown()
        self.has_ended = True
        self._drain_inbox()

    def submit(self, command: Callable[[], None]) -> None:
        """Make the thread run `command` between two steps.

        After the thread has ended, the command runs here, and the engine raises EngineDeadError.
        """
        self.inbox.put(command)
        if self.has_ended:  # the thread may not look into its inbox again
            self._drain_inbox()

    def start_request(self, reader: _Reader, add_request: Callable[[], int | str]) -> None:
        """Add a request to the engine; its reader gets the outputs, or the error if it fails."""
        try:
            reader.request_id = add_request()
        except Exception as error:
            _send([(reader, error)])
        else:
            self.readers[reader.request_id] = reader

    def abort(self, request_id: int | str) -> None:
        """End a request if it is running; its reader gets what was not sent yet."""
        output = self.engine.abort(request_id)
        if output is not None:
            self._deliver([output])

    def close(self, reader: _Reader) -> None:
        """End a reader's request if it is running."""
        request_id = reader.request_id
        if request_id is not None and self.readers.get(request_id) is reader:
            del self.readers[request_id]  # first, because nobody reads what abort() sends
            self.abort(request_id)

    def _run_commands(self) -> bool:
        """Run the submitted commands; wait for one while no request runs.

        Returns:
            False if the thread must stop.
        """
        while True:
            try:
                command = self.inbox.get(block=self.engine.is_finished())
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _drain_inbox(self) -> None:
        """Run the commands that came too late; a new request fails, as the engine is down."""
        with contextlib.suppress(queue.Empty):
            while True:
                command = self.inbox.get_nowait()
                if command is not None:
                    command()

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Send each output to its reader; an output without a reader is of an aborted request."""
        deliveries: list[tuple[_Reader, Item]] = []
        for output in outputs:
            reader = self.readers.get(output.request_id)
            if reader is not None:
                deliveries.append((reader, output))
                if output.finished:
                    del self.readers[output.request_id]
        _send(deliveries)

    def _fail_all(self, error: BaseException) -> None:
        """Abort every request and send `error` to its reader."""
        deliveries: list[tuple[_Reader, Item]] = []
        for request_id, reader in self.readers.items():
            self.engine.abort(request_id)
            deliveries.append((reader, error))
        self.readers.clear()
        _send(deliveries)


def _send(deliveries: list[tuple[_Reader, Item]]) -> None:
    """Put items into their readers' queues; wake each event loop once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Reader, Item]]] = {}
    for reader, item in deliveries:
        by_loop.setdefault(reader.loop, []).append((reader, item))

    def put(items: list[tuple[_Reader, Item]]) -> None:
        for reader, item in items:
            reader.queue.put_nowait(item)

    for loop, items in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed, so its readers are gone
            loop.call_soon_threadsafe(put, items)


class AsyncLLM:
    """A model that many asyncio tasks use at once; their requests share the engine's batches.

    Args:
        model: a local checkpoint directory, a GGUF file, or a Hugging Face hub id.
        options: the fields of `Config`.

    Raises:
        NanoVLLMError: as `LLM`.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.engine = LLMEngine(Config(model=model, **options))
        self._thread = _EngineThread(self.engine)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._thread)

    def __getattr__(self, name: str) -> NoReturn:
        refuse_attribute(self, name)

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Generate for one prompt and yield the delta of each step, as `LLM.stream` does.

        Arguments are as for `generate`.
        Cancelling the task, or closing the iterator, aborts the request and frees its blocks.

        Raises:
            InvalidRequestError: the prompt or a parameter is invalid or unsupported.
            EngineDeadError: the engine is down.
        """
        deltas = self._run_request(prompt, sampling_params, request_id, priority, stream=True)
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                yield delta

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> RequestOutput:
        """Generate for one prompt and return the whole output.

        Args:
            request_id: the caller's own id, for `abort` and the output; None gives it a number.
            priority: lower values go first.

        Cancelling the task aborts the request and frees its blocks.

        Raises:
            InvalidRequestError: the prompt or a parameter is invalid or unsupported.
            EngineDeadError: the engine is down.
        """
        outputs = self._run_request(prompt, sampling_params, request_id, priority, stream=False)
        async with contextlib.aclosing(outputs):
            return await anext(outputs)

    async def chat(
        self,
        messages: Seq[Message],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
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
        options = template_options(
            add_generation_prompt,
            continue_final_message,
            tools,
            chat_template,
            chat_template_kwargs,
        )
        prompt = self.engine.input_processor.render(messages, options)
        return await self.generate(prompt, sampling_params, request_id, priority=priority)

    def render(self, messages: Seq[Message], **options: Any) -> list[int]:
        """Return the token ids of a conversation, as `LLM.render` does."""
        processor = self.engine.input_processor
        return processor.encode(processor.render(messages, options))

    async def abort(self, request_id: int | str) -> None:
        """End a request: its `generate` or `stream` returns what it has, with finish reason abort.

        If no request with this id is running, this does nothing.
        """
        await self._between_steps(lambda: self._thread.abort(request_id))

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine is down."""
        await self._between_steps(self.engine.executor.check_health)

    def get_tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """Return the checkpoint's transformers tokenizer, None if it has none."""
        return self.engine.input_processor.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters recommended in the checkpoint's generation_config.json."""
        return default_sampling_params(self.engine.generation_config)

    def shutdown(self) -> None:
        """End the engine; running requests raise EngineDeadError. May be called again."""
        self._finalizer()

    async def _between_steps(self, command: Callable[[], None]) -> None:
        """Run a command on the engine's thread and wait for its end."""
        self.engine.check_process()
        done: Future[None] = Future()

        def run() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    command()
                except Exception as error:
                    done.set_exception(error)
                else:
                    done.set_result(None)

        self._thread.submit(run)
        await asyncio.wrap_future(done)

    async def _run_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        *,
        stream: bool,
    ) -> AsyncGenerator[RequestOutput, None]:
        self.engine.check_process()
        thread, reader = self._thread, _Reader()
        if not self._finalizer.alive:
            raise EngineDeadError("the engine was shut down; make a new AsyncLLM")

        def add_request() -> int | str:
            return thread.engine.add_request(
                prompt, params, priority=priority, stream=stream, request_id=request_id
            )

        thread.submit(lambda: thread.start_request(reader, add_request))
        finished = False
        try:
            while not finished:
                item = await reader.queue.get()
                if isinstance(item, BaseException):
                    finished = True
                    raise item
                finished = item.finished
                yield item
        finally:
            if not finished:
                thread.submit(lambda: thread.close(reader))


def _stop(thread: _EngineThread) -> None:
    thread.inbox.put(None)
    if thread is not threading.current_thread():
        thread.join()
