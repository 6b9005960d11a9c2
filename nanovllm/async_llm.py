"""`AsyncLLM`: the words of `LLM` for asyncio. One thread runs the engine; requests come and go.

Knows no tensors and no text: what is streamed are the engine's outputs.
"""

import asyncio
import contextlib
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence as Seq
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.input_processor import Message, Prompt, chat_template_options
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import EngineDeadError
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams


class _Reader:
    """Where one request's outputs go: a queue in its caller's event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[RequestOutput | BaseException] = asyncio.Queue()
        self.request_id: int | None = None  # the engine thread's alone


class _EngineThread(threading.Thread):
    """Owns the engine: everything that touches it runs here, in order, between steps."""

    def __init__(self, engine: LLMEngine) -> None:
        super().__init__(name="nanovllm-engine", daemon=True)
        self.engine = engine
        self.inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.readers: dict[int, _Reader] = {}
        self.has_ended = False

    def run(self) -> None:
        while self._obey():
            try:
                outputs = self.engine.step()
            except Exception as error:
                self._fail_all(error)
            else:
                self._deliver(outputs)
        self._fail_all(EngineDeadError("the engine was shut down; make a new AsyncLLM"))
        self.engine.shutdown()
        self.has_ended = True
        self._refuse()

    def tell(self, command: Callable[[], None]) -> None:
        """Have `command` done between two steps; the engine refuses what comes after its end."""
        self.inbox.put(command)
        if self.has_ended:  # the thread may have looked into its inbox for the last time
            self._refuse()

    def start_request(self, reader: _Reader, make: Callable[[], int]) -> None:
        """Queue a request, or tell its reader why not."""
        try:
            reader.request_id = make()
        except Exception as error:
            self._put({reader.loop: [(reader, error)]})
        else:
            self.readers[reader.request_id] = reader

    def abort(self, reader: _Reader) -> None:
        """End a reader's request if it runs."""
        request_id = reader.request_id
        if request_id is not None and self.readers.pop(request_id, None) is not None:
            self.engine.abort(request_id)

    def _refuse(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                command = self.inbox.get_nowait()
                if command is not None:
                    command()

    def _obey(self) -> bool:
        """Do what came in; wait for something while there is nothing to run. False: stop."""
        while True:
            try:
                command = self.inbox.get(block=self.engine.is_finished())
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        news: dict[asyncio.AbstractEventLoop, list[tuple[_Reader, Any]]] = {}
        for output in outputs:
            reader = self.readers.get(output.request_id)
            if reader is not None:
                news.setdefault(reader.loop, []).append((reader, output))
                if output.finished:
                    del self.readers[output.request_id]
        self._put(news)

    def _fail_all(self, error: BaseException) -> None:
        news: dict[asyncio.AbstractEventLoop, list[tuple[_Reader, Any]]] = {}
        for request_id, reader in self.readers.items():
            self.engine.abort(request_id)
            news.setdefault(reader.loop, []).append((reader, error))
        self.readers.clear()
        self._put(news)

    @staticmethod
    def _put(news: dict[asyncio.AbstractEventLoop, list[tuple[_Reader, Any]]]) -> None:
        def put(items: list[tuple[_Reader, Any]]) -> None:
            for reader, item in items:
                reader.queue.put_nowait(item)

        for loop, items in news.items():
            try:
                loop.call_soon_threadsafe(put, items)
            except RuntimeError:  # that loop is closed: nobody reads
                continue


class AsyncLLM:
    """A model that serves many asyncio tasks at once; they share its batches.

    Args:
        model: a local checkpoint directory or a Hugging Face hub id.
        options: the fields of `Config`.

    Raises:
        NanoVLLMError: as `LLM`.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.engine = LLMEngine(Config(model=model, **options))
        self._thread = _EngineThread(self.engine)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._thread)

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Generate for one prompt and yield the news of each step, as `LLM.stream` does.

        Cancelling the task, or closing the iterator, aborts the request and frees its blocks.

        Raises:
            InvalidRequestError: the prompt or a parameter cannot be served.
            EngineDeadError: the engine is down.
        """
        news = self._read(prompt, sampling_params, priority, stream=True)
        async with contextlib.aclosing(news):
            async for output in news:
                yield output

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> RequestOutput:
        """Generate for one prompt and return all of it. Cancelling the task aborts the request.

        Raises:
            InvalidRequestError: the prompt or a parameter cannot be served.
            EngineDeadError: the engine is down.
        """
        whole = self._read(prompt, sampling_params, priority, stream=False)
        async with contextlib.aclosing(whole):
            return await anext(whole)

    async def chat(
        self,
        messages: Seq[Message],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> RequestOutput:
        """Answer one conversation, rendered by a chat template; arguments are as for `LLM.chat`.

        Raises:
            InvalidRequestError: there is no chat template, or it cannot render the messages; or
                as for `generate`.
            EngineDeadError: the engine is down.
        """
        options = chat_template_options(
            add_generation_prompt, tools, chat_template, chat_template_kwargs
        )
        prompt = self.render(messages, **options)
        return await self.generate(prompt, sampling_params, priority=priority)

    def render(self, messages: Seq[Message], **options: Any) -> list[int]:
        """Return the token ids of a conversation, as `LLM.render` does."""
        return self.engine.input_processor.render(messages, **options)

    def shutdown(self) -> None:
        """End the engine; requests still running raise EngineDeadError. May be called again."""
        self._finalizer()

    async def _read(
        self, prompt: Prompt, params: SamplingParams | None, priority: int, *, stream: bool
    ) -> AsyncGenerator[RequestOutput, None]:
        thread, reader = self._thread, _Reader()
        if not self._finalizer.alive:
            raise EngineDeadError("the engine was shut down; make a new AsyncLLM")

        def make() -> int:
            return thread.engine.add_request(prompt, params, priority=priority, stream=stream)

        thread.tell(lambda: thread.start_request(reader, make))
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
                thread.tell(lambda: thread.abort(reader))


def _stop(thread: _EngineThread) -> None:
    thread.inbox.put(None)
    if thread is not threading.current_thread():
        thread.join()
