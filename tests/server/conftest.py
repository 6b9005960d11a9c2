"""A server in this process, on the shipped model: real sockets, one engine for all tests.

What is asked of a server is asked of a router in front of it too: see `pytest_generate_tests`.
"""

import asyncio
import json
import signal
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest

pytest.importorskip("fastapi")

from fastapi import FastAPI
from openai import OpenAI

from nanovllm import AsyncLLM, demo_model
from nanovllm.apps.cli.arguments import parse
from nanovllm.apps.cli.main import chat, generate, run, serve
from nanovllm.apps.router import models as router_models, serve as router_serve
from nanovllm.apps.router.engine import EngineProcess
from nanovllm.apps.router.router_options import RouterOptions, read_models
from nanovllm.apps.router.serve import RouterServer
from nanovllm.apps.server.app import make_app
from nanovllm.apps.server.request_log import Log
from nanovllm.apps.server.serve import EngineServer, bound_socket
from nanovllm.apps.server.server_options import ServerOptions
from nanovllm.apps.server.state import ServerState
from nanovllm.options.flags import given_fields
from tests.every_case import EVERY_CASE

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


FRONTS = ("engine", "router")
_front = FRONTS[0]
_NOT_OF_ROUTERS = ("dev_mode", "enable_sleep_mode", "lora_directory")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Let each test that asks a server ask a router, too, which has one engine behind it."""
    asks = {"server", "running"} & {*metafunc.fixturenames, *metafunc.function.__code__.co_names}
    fronts = FRONTS[: 1 if metafunc.definition.get_closest_marker("of_engines") else None]
    if asks or "front" in metafunc.fixturenames:
        metafunc.fixturenames.insert(0, "front")
        metafunc.parametrize("front", fronts, indirect=True, scope="session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without EVERY_CASE=1, ask routers one question of thirty."""
    if EVERY_CASE:
        return
    kept, seen = [], 0
    for item in items:
        if hasattr(item, "callspec") and item.callspec.params.get("front") == "router":
            seen += 1
            if seen % 30:
                continue
        kept.append(item)
    items[:] = kept


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Set what `running` runs: a fixture of the session would only do so when it is set up."""
    global _front
    params = item.callspec.params if hasattr(item, "callspec") else {}
    _front = params.get("front", FRONTS[0])


@pytest.fixture(scope="session")
def front(request: pytest.FixtureRequest) -> str:
    """What `running` runs. Fixtures that call it have this one."""
    return str(request.param)


@contextmanager
def running(llm: AsyncLLM, **options: Any) -> Iterator[Running]:
    """Run a server on a free port; where `front` says so, a router in front of its engine."""
    if _front == "router":
        with routed(llm, options) as behind_router:
            yield behind_router
        return
    checked = ServerOptions(port=0, **options)
    app = make_app(llm, checked)
    with bound_socket(checked) as listener:
        server = EngineServer(app, listener)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        host, port = listener.getsockname()
        yield Running(app, host, port, lambda: server.handle_exit(signal.SIGTERM, None))
        server.should_exit = True
        thread.join()


@contextmanager
def routed(llm: AsyncLLM, given: dict[str, Any]) -> Iterator[Running]:
    """Run a router with one engine, which is `llm` in this process; its `state` is the engine's."""
    for name in _NOT_OF_ROUTERS:
        if name in given:
            pytest.skip(f"a router has no {name}")
    config = llm.engine.config
    engine = {"profile_dir": config.profile_dir} if config.profile_dir else {}
    engine |= {"enable_lora": True} if config.enable_lora else {}
    specs = read_models([config.model], engine, given)
    options = ServerOptions(port=0, **given)
    log = Log(options.log_level, options.log_format)
    with (
        tempfile.TemporaryDirectory() as directory,
        bound_socket(options) as listener,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(router_models, "EngineProcess", partial(EngineHere, llm))
        models = router_models.Models(
            specs, options, RouterOptions(keep_alive="-1"), directory, log
        )
        server = RouterServer(router_serve.make_app(models, options), models, options, listener)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)

        async def load() -> Any:
            async with models.use(models.all[0]) as engine:
                return engine

        here = asyncio.run_coroutine_threadsafe(load(), server._loop).result()
        host, port = listener.getsockname()
        yield Running(here.app, host, port, lambda: server.handle_exit(signal.SIGTERM, None))
        server.should_exit = True
        thread.join()


class EngineHere(EngineProcess):
    """An engine's server as a thread of this process, with the words of a process of its own."""

    def __init__(self, llm: AsyncLLM, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._llm = llm

    async def start(self) -> None:
        """Start the thread."""
        args = parse(self._words, (generate, chat, run, serve))
        options = ServerOptions(**given_fields(ServerOptions, args), api_keys=self._api_keys)
        self.app = make_app(self._llm, options)
        self._process: Any = ServingThread(self.app, options)
        self._reading = asyncio.create_task(asyncio.sleep(0))


class ServingThread(threading.Thread):
    """A server in a thread, with what an `EngineProcess` asks of a process."""

    def __init__(self, app: FastAPI, options: ServerOptions) -> None:
        super().__init__()
        self._app = app
        self._options = options
        self._server: EngineServer | None = None
        self.start()

    def run(self) -> None:
        with bound_socket(self._options) as listener:
            self._server = EngineServer(self._app, listener)
            self._server.run(sockets=[listener])

    @property
    def returncode(self) -> int | None:
        return None if self.is_alive() else 0

    async def wait(self) -> int:
        while self.is_alive():
            await asyncio.sleep(0.01)
        return 0

    def terminate(self) -> None:
        self._server.handle_exit(signal.SIGTERM, None)


@pytest.fixture(scope="session")
def async_llm() -> Iterator[AsyncLLM]:
    """The demo model; tests that use it leave nothing in it."""
    llm = AsyncLLM(demo_model.MODEL, max_model_len=1024, num_kvcache_blocks=2048)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="session")
def server(front: str, async_llm: AsyncLLM) -> Iterator[Running]:
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
