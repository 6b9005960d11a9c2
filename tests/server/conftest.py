"""A server in this process, on the shipped model: real sockets, one engine for all tests."""

import json
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

pytest.importorskip("fastapi")

from fastapi import FastAPI
from openai import OpenAI

from nanovllm import AsyncLLM, demo_model
from nanovllm.apps.server.app import make_app
from nanovllm.apps.server.options import ServerOptions
from nanovllm.apps.server.serve import Server, bound_socket
from nanovllm.apps.server.state import ServerState

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
"""The schema of a tool's arguments, and of answers in JSON."""


class Reply(NamedTuple):
    """An answer of the server."""

    status: int
    body: Any
    headers: Any

    @property
    def error(self) -> dict[str, Any]:
        """The error, whose form is checked."""
        assert self.body.keys() == {"error"}
        assert self.body["error"].keys() == {"message", "type", "param", "code"}
        error: dict[str, Any] = self.body["error"]
        assert isinstance(error["message"], str)
        assert len(error["message"]) < 600
        return error


class Running(NamedTuple):
    """A server that runs in a thread of this process."""

    app: FastAPI
    host: str
    port: int
    drain: Callable[[], object]
    """Does what SIGTERM does."""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def state(self) -> ServerState:
        state: ServerState = self.app.state.server
        return state

    def client(self, api_key: str = "none") -> OpenAI:
        """Return a client of OpenAI's that does not try again."""
        return OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0)

    def send(
        self, path: str, body: Any = None, *, method: str | None = None, **headers: str
    ) -> Reply:
        """Send JSON, or bytes as they are; GET without a body."""
        given = {"Content-Type": "application/json"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, given, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status, raw, found = answer.status, answer.read(), answer.headers
        except urllib.error.HTTPError as error:
            status, raw, found = error.code, error.read(), error.headers
        is_json = found.get_content_type() == "application/json"
        return Reply(status, json.loads(raw) if is_json else raw.decode(), found)


@contextmanager
def running(llm: AsyncLLM, **options: Any) -> Iterator[Running]:
    """Run a server on a free port."""
    checked = ServerOptions(port=0, **options)
    app = make_app(llm, checked)
    with bound_socket(checked) as listener:
        server = Server(app, listener)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        host, port = listener.getsockname()
        yield Running(app, host, port, lambda: server.handle_exit(signal.SIGTERM, None))
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="session")
def async_llm() -> Iterator[AsyncLLM]:
    """The demo model; tests that use it leave nothing in it."""
    llm = AsyncLLM(demo_model.MODEL, max_model_len=1024, num_kvcache_blocks=2048)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="session")
def server(async_llm: AsyncLLM) -> Iterator[Running]:
    """A server with the default options."""
    with running(async_llm) as found:
        assert found.state.answer_format  # is kept, and tests put other templates in the state
        yield found


@pytest.fixture(scope="session")
def client(server: Running) -> OpenAI:
    """OpenAI's client of `server`."""
    return server.client()


@pytest.fixture
def idle_afterwards(async_llm: AsyncLLM) -> Iterator[None]:
    """Check after the test that nothing runs any more, and that every block is free."""
    yield
    engine = async_llm.engine
    deadline = time.monotonic() + 5
    while not engine.is_finished() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.is_finished()
    assert engine.scheduler.block_manager.num_free_blocks == engine.worker_info.num_blocks
