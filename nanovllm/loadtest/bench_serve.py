"""`nanovllm bench serve`: puts a load on a server that speaks OpenAI's API, and measures it.

One event loop sends and reads. `load_plan` says what is sent,
`load_report` what the times mean. Imports no engine.
"""

import asyncio
import contextlib
import dataclasses
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanovllm.errors import InvalidRequestError, NanoVLLMError, ServerError
from nanovllm.loadtest.load_plan import Conversation, LoadPlan, make_conversations, make_warmups
from nanovllm.loadtest.load_report import Client, Measurement, Report, percentile
from nanovllm.loadtest.sse_client import (
    HttpClient,
    Server,
    choices_of,
    find_server,
    first_model,
    parse_event,
)
from nanovllm.options.validation import shown
from nanovllm.utils.terminal import complain, write

BEAT_SECONDS = 0.05
"""How often the lag of the event loop is measured."""


def bench_serve(plan: LoadPlan) -> int:
    """Run the load, write the report, and return the exit status: 1 if a request failed.

    Raises:
        ServerError: the server does not answer before the load begins.
        InvalidRequestError: a file cannot be written, or the server refuses the first request.
    """
    path = plan.save_result
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise InvalidRequestError(f"there is no directory for {shown(path)}; make it first")
    server = find_server(plan.server_url, plan.api_key)
    plan = dataclasses.replace(plan, model=plan.model or first_model(server))
    gc.freeze()  # else the collector looks through all of it while answers come
    try:
        report = asyncio.run(measure(plan, server))
    finally:
        gc.unfreeze()
    write(report.as_text())
    if report.client.warning is not None:
        complain(f"nanovllm: {report.client.warning}")
    if path is not None:
        try:
            Path(path).write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InvalidRequestError(f"cannot write {shown(path)}: {error}") from None
    return 1 if report.errors else 0


async def measure(plan: LoadPlan, server: Server) -> Report:
    """Return what the server did with the load.

    Raises:
        ServerError: it fails before the load begins.
        InvalidRequestError: it refuses the first request.
    """
    async with HttpClient(server) as client:
        load = _Load(plan, client)
        for warmup in make_warmups(plan):
            measured: list[Measurement] = []
            await load.converse(warmup, load.first_request(warmup), time.perf_counter(), measured)
            if measured[0].error is not None:
                raise ServerError(f"the first request failed: {measured[0].error}")
        return await load.run(make_conversations(plan))


class _Load:
    """The requests on their way."""

    def __init__(self, plan: LoadPlan, client: HttpClient) -> None:
        self._plan = plan
        self._client = client
        self._places: contextlib.AbstractAsyncContextManager[Any] = contextlib.nullcontext()
        if plan.max_concurrency is not None:
            self._places = asyncio.Semaphore(plan.max_concurrency)
        self._progress: tqdm | None = None

    async def run(self, conversations: list[Conversation]) -> Report:
        """Send conversations when they arrive, and wait for all answers."""
        measured: list[Measurement] = []
        lags: list[float] = []
        watch = asyncio.create_task(_watch(lags))
        firsts = [self.first_request(conversation) for conversation in conversations]
        total = sum(len(conversation.prompts) for conversation in conversations)
        with tqdm(total=total, unit="requests", disable=None, file=sys.stderr) as self._progress:
            begin, busy = time.perf_counter(), time.process_time()
            async with asyncio.TaskGroup() as tasks:
                for conversation, first in zip(conversations, firsts, strict=True):
                    arrival = begin + conversation.arrival
                    if (wait := arrival - time.perf_counter()) > 0:
                        await asyncio.sleep(wait)
                    tasks.create_task(self.converse(conversation, first, arrival, measured))
            seconds = time.perf_counter() - begin
            busy = (time.process_time() - busy) / seconds
        self._progress = None
        watch.cancel()
        client = Client(percentile(lags, 99), busy)
        return Report(self._plan, measured, seconds, client)

    def first_request(self, conversation: Conversation) -> bytes:
        """Return the body of a conversation's first request; it is made before the load."""
        prompt, output_len = conversation.prompts[0], conversation.output_lens[0]
        if isinstance(prompt, str):
            return self._request({"messages": [_user(prompt)]}, output_len)
        return self._request({"prompt": prompt}, output_len)

    async def converse(
        self, conversation: Conversation, first: bytes, arrival: float, measured: list[Measurement]
    ) -> None:
        """Send the turns of a conversation; an answer that fails ends it."""
        messages: list[dict[str, str]] = []
        for prompt, output_len in zip(conversation.prompts, conversation.output_lens, strict=True):
            if isinstance(prompt, str):
                messages.append(_user(prompt))
            request = first or self._request({"messages": messages}, output_len)
            first = b""
            answer = _Answer(arrival)
            measured.append(answer)
            await self._send(request, answer)
            if self._progress is not None:
                self._progress.update()
            if answer.error is not None:
                return
            messages.append({"role": "assistant", "content": "".join(answer.pieces)})
            arrival = answer.end

    def _request(self, body: dict[str, Any], output_len: int) -> bytes:
        plan = self._plan
        body |= {
            "model": plan.model,
            "max_tokens": output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if plan.ignore_eos:
            body["ignore_eos"] = True
        if plan.temperature is not None:
            body["temperature"] = plan.temperature
        return json.dumps(body | (plan.extra_body or {})).encode()

    async def _send(self, request: bytes, answer: "_Answer") -> None:
        async with self._places:
            answer.start = answer.end = time.perf_counter()
            try:
                await self._client.post(self._plan.endpoint, request, answer.receive)
                answer.check()
            except NanoVLLMError as error:
                answer.error = str(error)
                answer.end = time.perf_counter()


@dataclasses.dataclass(slots=True)
class _Answer(Measurement):
    """Reads the events of one answer."""

    reason: str | None = None
    pieces: list[str] = dataclasses.field(default_factory=list)

    def receive(self, data: str) -> None:
        """Take the data of an event.

        Raises:
            ServerError: it reports an error, or has another form.
        """
        now = time.perf_counter()
        if data == "[DONE]":
            return
        event = parse_event(data)
        for text, thought, reason, delta in choices_of(event):
            self.reason = reason or self.reason
            is_head = "role" in delta and self.reason is None
            is_tail = self.reason is not None and bool(self.token_times)
            if text or thought or delta.get("tool_calls") or not (is_head or is_tail):
                self.token_times.append(now)
            self.end = now
            self.pieces.append(text)
        match event.get("usage"):
            case {"prompt_tokens": int(num_prompt), "completion_tokens": int(num_output)}:
                self.has_usage = True
                self.num_prompt_tokens = num_prompt
                self.num_output_tokens = num_output

    def check(self) -> None:
        """Finish the measurement.

        Raises:
            ServerError: the answer has no text, or did not come to its end.
        """
        if self.reason in (None, "abort", "error"):
            raise ServerError(f"the answer broke off: {self.reason or 'it has no finish_reason'}")
        if not self.token_times:
            raise ServerError("the answer has no token")
        if not self.has_usage:
            self.num_output_tokens = len(self.token_times)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def _watch(lags: list[float]) -> None:
    """Note again and again how late the event loop is, in seconds."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(BEAT_SECONDS)
        lags.append(max(0.0, time.perf_counter() - before - BEAT_SECONDS))
