"""How answers leave: slow readers keep nobody out, what is unread is bounded, wake-ups are few.

The app is called without sockets, with a `send` that waits for its client as uvicorn's does.
"""

import asyncio
import json
import random
import tracemalloc
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fastapi import APIRouter
from starlette.responses import Response

from nanovllm import AsyncLLM
from nanovllm.apps.server.admission import AdmissionControl, BodyBudget
from nanovllm.apps.server.app import make_app
from nanovllm.apps.server.json_route import JSONRoute
from nanovllm.apps.server.server_options import ServerOptions
from nanovllm.apps.server.state import ServerState
from tests.every_case import EVERY_CASE
from tests.server.test_load import Ended

pytestmark = pytest.mark.usefixtures("idle_afterwards")

STREAM: dict[str, Any] = {"prompt": [1], "max_tokens": 20, "ignore_eos": True, "stream": True}
PIECE = 2**16


class Client:
    """Sends one request to an app, and reads the first `num_read` messages until `read_on`."""

    def __init__(self, app: Any, path: str, body: dict[str, Any], num_read: int = 10**9) -> None:
        self.messages: list[dict[str, Any]] = []
        self._num_read = num_read
        self.is_cut = False
        self.has_begun = asyncio.Event()
        self._reads_on, self._is_gone = asyncio.Event(), asyncio.Event()
        self._data: bytes | None = json.dumps(body).encode()
        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        scope |= {"query_string": b"", "client": None, "state": {"connection": self}}
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    can_write = False  # as uvicorn's connection

    @property
    def transport(self) -> "Client":
        return self

    def abort(self) -> None:
        self.is_cut = True
        self.leave()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def is_whole(self) -> bool:
        return "body" in self.messages[-1] and not self.messages[-1].get("more_body")

    def read_on(self) -> None:
        self._reads_on.set()

    def leave(self) -> None:
        self._is_gone.set()
        self._reads_on.set()

    async def _receive(self) -> dict[str, Any]:
        if self._data is not None:
            data, self._data = self._data, None
            return {"type": "http.request", "body": data, "more_body": False}
        await self._is_gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if len(self.messages) >= self._num_read:
            await self._reads_on.wait()
        if not self._is_gone.is_set():
            self.messages.append(message)
            self.has_begun.set()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


def make(llm: AsyncLLM, **options: Any) -> tuple[Any, ServerState]:
    app = make_app(llm, ServerOptions(**options))
    return app, app.state.server


def test_the_oldest_unread_answers_are_cut_off_if_they_are_too_many() -> None:
    for seconds, num_cut in ((-1.0, 2), (100.0, 0)):
        admission = AdmissionControl(2, lambda: 0, seconds)
        requests = [Ended() for _ in range(4)]
        places = [admission.admit(request, 1) for request in requests]
        for place, request in zip(places, requests, strict=True):
            place.__enter__()
            admission.engine_ended(request, 1)
        assert [request.is_cut for request in requests] == [i < num_cut for i in range(4)]
        assert admission._num_unread == 4 - num_cut
        for place in places:
            place.__exit__(None, None, None)
        assert (admission._num_unread, admission.num_active, admission.num_requests) == (0, 0, 0)


def test_the_bytes_of_unread_answers_are_bounded(async_llm: AsyncLLM) -> None:
    """Symptom: 2,048 answers of megabytes waited a minute each for clients that read nothing."""
    app, state = make(async_llm, max_body_bytes=PIECE)
    router = APIRouter(route_class=JSONRoute)

    @router.post("/large")
    async def large(body: dict[str, str]) -> Response:
        return Response("a" * 16 * PIECE)

    app.include_router(router)

    async def check() -> None:
        clients = [Client(app, "/large", {}, num_read=2) for _ in range(6)]
        await until(lambda: sum(client.is_cut for client in clients) == 2)
        assert [client.is_cut for client in clients] == [True] * 2 + [False] * 4
        assert state.answers._held.total() == 64 * PIECE
        for client in clients:
            client.read_on()
            await client.task
            assert client.is_cut or len(client.body) == 16 * PIECE
        assert not state.answers._held

    run(check())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_answers_that_are_read_slowly_keep_nobody_out(
    async_llm: AsyncLLM, path: str, stream: bool
) -> None:
    """Symptom: finished answers filled the queue of an idle engine, and everybody got 503."""
    body: dict[str, Any] = {"stream": stream, "ignore_eos": True}
    if path == "/v1/completions":
        body |= {"prompt": [1], "max_tokens": 20}
    elif path == "/v1/responses":
        body |= {"input": "Hi", "max_output_tokens": 20}
    else:
        body |= {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}

    async def main() -> None:
        app, state = make(async_llm, max_waiting=1)
        slow = [Client(app, path, body, num_read=1) for _ in range(1)]
        for _ in range(3):
            await until(lambda: len(slow[-1].messages) == 1 and not state.admission.num_active)
            slow.append(Client(app, path, body, num_read=1))
        await until(lambda: len(slow[-1].messages) == 1 and not state.admission.num_active)
        assert state.admission.num_requests == 4
        assert {client.messages[0]["status"] for client in slow} == {200}
        for client in slow:
            client.read_on()
            await client.task
            assert client.is_whole
        assert state.admission.num_requests == 0

    run(main())


def test_bodies_are_counted_until_the_answer_is_sent_and_not_kept(async_llm: AsyncLLM) -> None:
    """Symptom: 30 streams with bodies of 4 MB kept 268 MiB, of which none was counted."""
    size = 2 * 2**20
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "chat_template_kwargs": {"unused": "a" * size},
        "max_tokens": 20,
        "stream": True,
    }

    async def main() -> None:
        app, state = make(async_llm, max_waiting=4)
        for measured in (False, True):  # the first time, things are made that stay
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            clients = [Client(app, "/v1/chat/completions", body, num_read=2) for _ in range(3)]
            for client in clients:
                await client.has_begun.wait()
            await until(lambda: not state.admission.num_active)
            kept = tracemalloc.get_traced_memory()[0] - before
            tracemalloc.stop()
            assert state.bodies._num_bytes > 3 * (size - 2**16)
            assert not measured or kept < size
            for client in clients:
                client.read_on()
                await client.task
            assert state.bodies._num_bytes == 0

    run(main())


def test_a_body_of_exactly_the_limit_is_read() -> None:
    async def main() -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": bytes(2**16 + 64)}

        with BodyBudget(1).reading(receive) as counted:
            assert len((await counted())["body"]) == 2**16 + 64

    run(main())


@pytest.mark.parametrize("extra", [0, 1, 3 * PIECE + 5])
def test_a_large_answer_is_sent_in_pieces(async_llm: AsyncLLM, extra: int) -> None:
    """So that it waits in the app, which counts it, and not in the connection's buffer."""

    async def main() -> None:
        app, _ = make(async_llm)
        text = "x" * (PIECE + extra)

        router = APIRouter(route_class=JSONRoute)

        @router.post("/long")
        async def long(body: dict[str, str]) -> Response:
            return Response(text)

        app.include_router(router)
        client = Client(app, "/long", {})
        await client.task
        assert client.body == text.encode()
        start, *pieces = client.messages
        assert dict(start["headers"])[b"content-length"] == str(len(text)).encode()
        assert all(len(piece["body"]) <= PIECE for piece in pieces)
        assert len(pieces) == -(-len(text) // PIECE)
        assert all(piece["more_body"] for piece in pieces[:-1])
        assert not pieces[-1].get("more_body")

    run(main())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_step_wakes_the_event_loop_once_for_all_streams(
    async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """And each stream has one task, with its watch, and writes once for all that a step brings."""
    num_streams, n, num_tokens = 8, 4, 20
    body = {**STREAM, "n": n, "max_tokens": num_tokens, "seed": 1}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": "a"}]
        del body["prompt"]
    thread, num_steps, num_deltas = async_llm._thread, 0, 0
    send = thread._deliver_all

    def counting_send() -> None:
        nonlocal num_steps, num_deltas
        num_steps += bool(thread._deliveries)
        num_deltas += len(thread._deliveries)
        send()

    monkeypatch.setattr(thread, "_deliver_all", counting_send)

    async def main() -> None:
        app, _ = make(async_llm)
        loop, num_wakes, most_tasks = asyncio.get_running_loop(), 0, 0
        call_soon = loop.call_soon_threadsafe

        def counting_call(callback: Any, *args: Any, **options: Any) -> Any:
            nonlocal num_wakes, most_tasks
            num_wakes += callback.__qualname__.startswith("send.")
            most_tasks = max(most_tasks, len(asyncio.all_tasks(loop)))
            return call_soon(callback, *args, **options)

        loop.call_soon_threadsafe = counting_call
        clients = [Client(app, path, body) for _ in range(num_streams)]
        await asyncio.gather(*(client.task for client in clients))
        assert num_wakes <= num_steps < num_streams * num_tokens
        assert most_tasks <= 2 + 2 * num_streams
        num_written = sum(len(client.messages) for client in clients)
        assert num_written <= num_deltas + 3 * num_streams  # the start, [DONE], and the end

    run(main())


@pytest.mark.parametrize("seed", range(4 if EVERY_CASE else 1))
def test_whoever_leaves_or_dawdles_the_others_get_theirs_and_nothing_stays(
    async_llm: AsyncLLM, seed: int
) -> None:
    """Clients of three users stop, go on, or leave at random; some are cut off by time."""
    rng = random.Random(seed)

    def random_body(path: str) -> dict[str, Any]:
        body: dict[str, Any] = {"stream": rng.random() < 0.6, "temperature": 0, "ignore_eos": True}
        text, size = rng.choice(["a", "What is a block?"]), rng.choice([1, 5, 30])
        if path == "/v1/responses":
            return {**body, "input": text, "max_output_tokens": size}
        body |= {"max_tokens": size, "n": rng.choice([1, 1, 3]), "user": rng.choice([None, *"abc"])}
        if path == "/v1/completions":
            return {**body, "prompt": rng.choice([text, [text, "b"]]), "logprobs": 2}
        return {**body, "messages": [{"role": "user", "content": text}]}

    async def main() -> None:
        app, state = make(async_llm, max_waiting=40)
        state.admission._read_seconds = 0.05
        found: list[tuple[Client, str, dict[str, Any]]] = []

        async def be_a_client() -> None:
            path = rng.choice(["/v1/completions", "/v1/chat/completions", "/v1/responses"])
            body, what = random_body(path), rng.choice(["reads", "reads", "dawdles", "leaves"])
            num_read = 10**9 if what == "reads" else rng.randint(0, 4)
            client = Client(app, path, body, num_read)
            await asyncio.sleep(rng.random() * 0.1)
            if what == "leaves":
                client.leave()
            client.read_on()
            await client.task
            if what == "reads":
                found.append((client, path, body))

        await asyncio.gather(*(be_a_client() for _ in range(40)))
        for client, path, body in found:
            assert client.is_whole
            status = client.messages[0]["status"]
            assert status in (200, 429, 503)
            if status == 200 and not body["stream"]:
                again = Client(app, path, body)
                await again.task
                assert texts(again) == texts(client)
        admission = state.admission
        counts = (admission.num_requests, admission.num_active, admission._num_unread)
        assert (*counts, state.bodies._num_bytes) == (0, 0, 0, 0)
        leftovers = (admission._held, admission._unread, async_llm._making)
        assert not any((*leftovers, async_llm._input._jobs, state.preparing._jobs))

    def texts(client: Client) -> list[Any]:
        answer = json.loads(client.body)
        if "choices" not in answer:
            return [item["content"] for item in answer["output"]]
        return [choice.get("text") or choice["message"]["content"] for choice in answer["choices"]]

    run(main())
