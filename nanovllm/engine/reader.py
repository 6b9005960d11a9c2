"""`Reader`: where an asyncio task receives the outputs of its request; `Mailbox`: where a thread
does.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence as Seq
from itertools import chain

from nanovllm.outputs import CompletionOutput, RequestOutput

Item = RequestOutput | BaseException
"""What a request's reader receives: an output, or the error that ended the request."""

_MAX_OUTPUTS = 32  # outputs that wait for their reader before they are merged into one


class Reader:
    """Receives one request's items, in the event loop of the task that makes it.

    Outputs that arrive while the task is not reading are merged, so a reader that stops reading
    costs the memory of its text. One that keeps up gets each output.

    Args:
        on_finished: called when the request's last item has come, whether or not it is read.
        take: called with an output that comes while the task waits for it. If it returns True, it
            has used the output, and the task waits on: to wake a task for each costs more.
    """

    def __init__(
        self,
        on_finished: Callable[[], object] | None = None,
        take: Callable[[RequestOutput], bool] | None = None,
    ) -> None:
        self.on_finished = on_finished
        self._take = take
        self._is_waiting = False  # the task waits, and has read all that came before
        self.loop = asyncio.get_running_loop()
        self.is_closed = False  # set by the task; read by the engine's thread
        self.sends_all = False  # each output holds all so far; set before the first output
        self._outputs: list[RequestOutput] = []
        self._error: Exception | None = None
        self._has_item = asyncio.Event()

    async def get(self) -> RequestOutput:
        """Wait until there is something to read, and return all of it as one output.

        Raises:
            Exception: the error that ended the request, once all outputs before it are read.
        """
        self._is_waiting = not self._has_item.is_set()
        try:
            await self._has_item.wait()
        finally:
            self._is_waiting = False
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            if self._error is None:
                self._has_item.clear()
            return merge_outputs(outputs, sends_all=self.sends_all)
        assert self._error is not None
        raise self._error

    def put(self, item: Item) -> None:
        """Add an item; in the reader's event loop only. An error is the last one."""
        if self._error is not None:
            return
        if isinstance(item, Exception):
            self._error = item
        elif isinstance(item, BaseException):  # a panic of Rust, unexpected in a task
            self._error = RuntimeError(f"{type(item).__name__}: {item}")
            self._error.__cause__ = item
        elif self._is_waiting and self._has_taken(item):
            return
        elif self._error is None:  # else to take it has failed
            self._outputs.append(item)
            if len(self._outputs) >= _MAX_OUTPUTS:
                self._outputs = [merge_outputs(self._outputs, sends_all=self.sends_all)]
        self._is_waiting = False
        self._has_item.set()
        if self.on_finished is not None and (self._error or self._outputs[-1].finished):
            self.on_finished()

    def _has_taken(self, output: RequestOutput) -> bool:
        try:
            return self._take is not None and self._take(output)
        except Exception as error:
            self._error = error
            return False


class Mailbox:
    """Receives one request's items, for a thread that may wait for those of several. `put` is
    called with each item, in the engine's thread.
    """

    loop = None

    def __init__(self, put: Callable[[Item], object]) -> None:
        self.put = put


AnyReader = Reader | Mailbox


def send(deliveries: Iterable[tuple[AnyReader, Item]]) -> None:
    """Give items to their readers, from any thread; wake each event loop once."""
    by_loop: dict[asyncio.AbstractEventLoop | None, list[tuple[AnyReader, Item]]] = {}
    for reader, item in deliveries:
        by_loop.setdefault(reader.loop, []).append((reader, item))

    def put(items: list[tuple[AnyReader, Item]]) -> None:
        for reader, item in items:
            reader.put(item)

    for loop, items in by_loop.items():
        if loop is None:
            put(items)
            continue
        with contextlib.suppress(RuntimeError):  # the loop is closed, so its readers are gone
            loop.call_soon_threadsafe(put, items)


def merge_outputs(outputs: Seq[RequestOutput], *, sends_all: bool) -> RequestOutput:
    """Return one output that says the same as successive outputs of a request.

    Args:
        outputs: at least one.
        sends_all: whether each output holds all so far, not only what is new.
    """
    if len(outputs) == 1:
        return outputs[0]
    by_index: dict[int, list[CompletionOutput]] = {}
    for output in outputs:
        for completion in output.outputs:
            by_index.setdefault(completion.index, []).append(completion)
    found = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    return dataclasses.replace(
        outputs[-1],  # with the last metrics
        outputs=[
            pieces[-1] if sends_all else _join(pieces) for _, pieces in sorted(by_index.items())
        ],
        prompt_logprobs=found[-1] if found else None,
    )


def _join(pieces: Seq[CompletionOutput]) -> CompletionOutput:
    """Return one delta for successive deltas of one continuation."""
    logprobs = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    return dataclasses.replace(
        pieces[-1],  # with the end and the sum of log-probabilities
        text="".join(piece.text for piece in pieces),
        token_ids=list(chain.from_iterable(piece.token_ids for piece in pieces)),
        logprobs=list(chain.from_iterable(logprobs)) if logprobs else None,
    )
