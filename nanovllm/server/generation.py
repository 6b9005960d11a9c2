"""The one way from a checked request to the engine: admission, deadline, disconnect.

Knows no JSON and no route: it takes prompts and yields the engine's outputs.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence as Seq
from contextlib import ExitStack, aclosing, contextmanager, suppress
from types import TracebackType
from typing import Any, TypeVar

from fastapi import Request

from nanovllm.engine.input_processor import Prompt
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.errors import APIError
from nanovllm.server.request_log import record_of
from nanovllm.server.state import state_of

T = TypeVar("T")


class _Guard:
    """Ends an HTTP request when its client goes away or its time is over.

    The tasks of the request wait for the engine within `with guard`. There, and only there, they
    are interrupted; they raise the error that says why.
    """

    def __init__(self) -> None:
        self._waiting: set[asyncio.Task[object]] = set()
        self._error: APIError | None = None

    def end(self, error: APIError) -> None:
        """Make every task of the request raise `error`; the first error counts."""
        if self._error is None:
            self._error = error
            for task in self._waiting:
                task.cancel()

    async def watch(self, request: Request) -> None:
        """Wait until the client is gone, then end the request."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.end(APIError(499, "the client has closed the connection"))

    def __enter__(self) -> None:
        if self._error is not None:
            raise self._error
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._waiting.discard(task)
        if self._error is not None and kind is asyncio.CancelledError:
            task.uncancel()
            raise self._error from None


@contextmanager
def _admitted(request: Request, num_sequences: int, user: str | None) -> Iterator[_Guard]:
    """Admit a request and guard it."""
    server, guard = state_of(request), _Guard()
    with ExitStack() as stack:
        try:
            stack.enter_context(server.admission.admit(guard, num_sequences, user or None))
        except APIError as error:
            server.metrics.refused(error.body["error"]["code"] or "too_many_sequences")
            raise
        watch = asyncio.create_task(guard.watch(request))
        timer = None
        if server.options.request_timeout is not None:
            late = _timeout(server.options.request_timeout)
            timer = watch.get_loop().call_later(server.options.request_timeout, guard.end, late)
        try:
            yield guard
        finally:
            watch.cancel()
            if timer is not None:
                timer.cancel()


async def run(
    request: Request,
    prompt: Prompt,
    params: SamplingParams,
    *,
    stream: bool,
    priority: int = 0,
    user: str | None = None,
) -> AsyncGenerator[RequestOutput, None]:
    """Generate for one prompt and yield deltas, or one whole output if `stream` is False.

    The request is aborted when the client goes away, and when the iterator is closed.

    Args:
        user: the key of fairness; with several API keys it is the request's key.

    Raises:
        APIError: the queue is full, the time is over, or the client is gone.
        InvalidRequestError: the prompt or a parameter is invalid or unsupported.
        EngineDeadError: the engine is down.
    """
    fair: dict[str, Any] = {"priority": priority, "user": _fair_user(request, user)}
    with _admitted(request, params.n, fair["user"]) as guard:
        outputs = _outputs(request, guard, prompt, params, stream, **fair)
        async with aclosing(outputs):
            async for output in outputs:
                yield output


async def run_all(
    request: Request,
    prompts: Seq[Prompt],
    params: SamplingParams,
    *,
    stream: bool,
    priority: int = 0,
    user: str | None = None,
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Generate for many prompts as `run` does; yield (index of the prompt, output) as they come."""
    fair: dict[str, Any] = {"priority": priority, "user": _fair_user(request, user)}
    with _admitted(request, params.n * len(prompts), fair["user"]) as guard:
        # One output a prompt at most waits here, so the engine merges those of a slow reader.
        ready: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(1)

        async def pump(index: int) -> None:
            outputs = _outputs(request, guard, prompts[index], params, stream, **fair)
            end: BaseException | None = None
            try:
                async with aclosing(outputs):
                    async for output in outputs:
                        await ready.put((index, output))
            except Exception as error:
                end = error
            await ready.put((index, end))

        tasks = [asyncio.create_task(pump(index)) for index in range(len(prompts))]
        num_running = len(tasks)
        try:
            while num_running:
                index, item = await ready.get()
                if isinstance(item, RequestOutput):
                    yield index, item
                elif item is not None:
                    raise item
                else:
                    num_running -= 1
        finally:
            for task in tasks:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)


async def _outputs(
    request: Request,
    guard: _Guard,
    prompt: Prompt,
    params: SamplingParams,
    stream: bool,
    **fair: Any,
) -> AsyncGenerator[RequestOutput, None]:
    server = state_of(request)
    with server.metrics.meter(params, record_of(request.scope)) as meter:
        if not stream:
            with guard:
                output = await server.llm.generate(prompt, params, **fair)
            meter.observe(output)
            yield _checked(output)
            return
        deltas = server.llm.stream(prompt, params, **fair)
        assert isinstance(deltas, AsyncGenerator)
        async with aclosing(deltas):
            finished = False
            while not finished:
                with guard:
                    delta = await anext(deltas)
                meter.observe(delta)
                yield _checked(delta)
                finished = delta.finished


def _fair_user(request: Request, given: str | None) -> str | None:
    """Return whose request it is: a client with a key of its own cannot pass for many users."""
    if len(state_of(request).options.api_keys) > 1:
        return str(request.state.key_digest)
    return given


def _checked(output: RequestOutput) -> RequestOutput:
    """Return an output; raise APIError if a continuation failed."""
    for completion in output.outputs:
        if completion.finish_reason == "error":
            raise APIError(500, f"the answer failed: {completion.stop_reason}", type="server_error")
    return output


async def started(outputs: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """Wait for the first of `outputs` and return an iterator of all of them.

    An error before the first output is raised here, while the status can still be set.
    """
    first = await anext(outputs)

    async def all_outputs() -> AsyncGenerator[T, None]:
        assert isinstance(outputs, AsyncGenerator)
        async with aclosing(outputs):
            yield first
            async for output in outputs:
                yield output

    return all_outputs()


def _timeout(seconds: float) -> APIError:
    return APIError(
        504,
        f"the request took longer than request_timeout, {seconds:g} s: ask for fewer tokens, or "
        "try again when the server is less busy",
        type="timeout_error",
        code="request_timeout",
        headers={"x-should-retry": "false"},
    )
