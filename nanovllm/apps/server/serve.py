"""`nanovllm serve`: loads a model and serves it until a signal comes or the engine dies.

Owns the socket, the signals and the exit status.
"""

import argparse
import asyncio
import contextlib
import errno
import gc
import json
import logging
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn

from nanovllm.apps.server.admission import AdmissionControl, shutting_down
from nanovllm.apps.server.app import make_app
from nanovllm.apps.server.connection import connection_class
from nanovllm.apps.server.middleware import MAX_HEAD_BYTES
from nanovllm.apps.server.request_log import Log
from nanovllm.apps.server.server_options import (
    ServerOptions,
    check_options,
    keys_of_environment,
    model_name,
)
from nanovllm.apps.server.state import ServerState
from nanovllm.async_llm import AsyncLLM
from nanovllm.engine.engine_metrics import kv_cache_tokens
from nanovllm.errors import ConfigError
from nanovllm.options.config import Config
from nanovllm.options.flags import given_fields
from nanovllm.utils.system import UNIX_SOCKETS, allow_files, unix_socket
from nanovllm.utils.terminal import complain

logger = logging.getLogger(__name__)

_KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep an idle connection, so that none is closed under a new request."""
FLUSH_SECONDS = 2
"""For the answers of requests that were ended."""
_EXIT_SECONDS = 10
_WATCH_SECONDS = 0.5
OTHER_FILES = 256
"""Files that the process opens besides its connections."""


def serve(args: argparse.Namespace) -> int:
    """Serve a model over HTTP with OpenAI's API."""
    given = given_fields(ServerOptions, args)
    given["api_keys"] = (*given.get("api_keys", ()), *keys_of_environment())
    options = ServerOptions(**given)
    engine_options: dict[str, Any] = {"model": args.model, **given_fields(Config, args)}
    check_options(options, Config(**engine_options))
    log = Log(options.log_level, options.log_format)
    allow_files(options.max_connections + OTHER_FILES)
    with bound_socket(options) as listener:
        start = time.monotonic()
        log.tell(f"nanovllm: loading {model_name(args.model)}")
        llm = AsyncLLM(**engine_options)
        app = make_app(llm, options)
        gc.collect()
        gc.freeze()  # what is there stays: to look through it takes 0.1 s, in which nothing runs

        def show_banner() -> None:
            _show_banner(log, app.state.server, listener, time.monotonic() - start)

        try:
            EngineServer(app, listener, show_banner, log.tell).run(sockets=[listener])
        finally:
            _exit_anyway(app.state.server)
            llm.shutdown()
    return 0 if app.state.server.failure is None else 1


def http_config(app: Any, options: ServerOptions) -> uvicorn.Config:
    """Return how uvicorn runs an app: with the limits of the options, and no log of its own."""
    return uvicorn.Config(
        app,
        http=connection_class(options.read_timeout, options.max_connections),
        loop="asyncio",  # not uvloop, even where another package has brought it
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=FLUSH_SECONDS,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )


class DrainingServer(uvicorn.Server):
    """uvicorn's server, which drains at the first signal and ends at once at the second.

    `on_start` is called when clients can connect, and `tell` with what the user should know.
    """

    def __init__(
        self,
        app: Any,
        listener: socket.socket,
        options: ServerOptions,
        requests: AdmissionControl,
        on_start: Callable[[], object],
        tell: Callable[[str, int], object],
    ) -> None:
        self._listener = listener
        self._drain_seconds = options.drain_seconds
        self._requests = requests
        self._on_start = on_start
        self._tell = tell
        self._was_asked = False
        super().__init__(http_config(app, options))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        remove_socket(
            self._listener
        )  # while it is open: its path may be another server's afterwards
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain; at the second signal, end the process."""
        if self._was_asked or not self.started:
            remove_socket(self._listener)
            os._exit(128 + sig)
        self._was_asked = True
        asyncio.run_coroutine_threadsafe(self._drain(), self._loop)

    async def _drain(self) -> None:
        """Refuse new requests, let the others finish for a while, then end the server."""
        requests = self._requests
        requests.is_draining = True
        seconds = self._drain_seconds
        running = f"finishing {requests.num_requests} requests, for {seconds:g} s at most"
        self._tell(f"nanovllm: {running}", logging.INFO)
        deadline = time.monotonic() + seconds
        while requests.num_requests and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        await self._end_requests()
        self.should_exit = True

    async def _end_requests(self) -> None:
        """End those that are left, each with an error."""
        self._requests.end_all(shutting_down())


class EngineServer(DrainingServer):
    """The server of one engine, which ends when that is dead."""

    def __init__(
        self,
        app: Any,
        listener: socket.socket,
        on_start: Callable[[], object] = lambda: None,
        tell: Callable[[str, int], object] = lambda message, level: complain(message),
    ) -> None:
        self._server: ServerState = app.state.server
        self._tasks: list[asyncio.Task[None]] = []
        options, requests = self._server.options, self._server.admission
        super().__init__(app, listener, options, requests, on_start, tell)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._tasks.append(asyncio.create_task(self._watch_engine()))
        self._tasks.append(asyncio.create_task(self._server.metrics.watch_event_loop()))

    async def _watch_engine(self) -> None:
        """End the server when the engine is dead."""
        try:
            while True:
                await asyncio.sleep(_WATCH_SECONDS)
                await self._server.llm.check_health()
        except Exception as error:  # a watch that ended unnoticed would be none
            self._server.failure = str(error)
            dead = f"nanovllm: the engine is dead, so the server ends: {error}"
            self._tell(dead, logging.CRITICAL)
            self.should_exit = True


@contextlib.contextmanager
def bound_socket(options: ServerOptions) -> Iterator[socket.socket]:
    """Bind the socket to listen on; clients cannot connect yet.

    Raises:
        ConfigError: the address is taken, or cannot be used.
    """
    with contextlib.ExitStack() as stack:
        try:
            if options.uds:
                listener = stack.enter_context(unix_socket())
                _bind_unix(listener, options.uds)
            else:
                family, kind, proto, _, address = socket.getaddrinfo(
                    options.host, options.port, type=socket.SOCK_STREAM
                )[0]
                # asyncio sends small packets at once only on a socket that says it is TCP's.
                listener = stack.enter_context(socket.socket(family, kind, proto))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
        except OSError as error:
            where = options.uds or f"{options.host}:{options.port}"
            if options.uds:
                advice = "name another --uds"
                if UNIX_SOCKETS is None:
                    advice = "leave --uds out: clients then use --host and --port"
            elif isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                advice = "name another --host"
            else:
                advice = "choose another --port, or 0 for any"
            reason = error.strerror or error
            raise ConfigError(f"cannot listen on {where}: {reason}; {advice}") from None
        stack.callback(remove_socket, listener)
        yield listener


def _bind_unix(listener: socket.socket, path: str) -> None:
    """Bind to `path`; a socket that a dead server left there is replaced."""
    if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
        with unix_socket() as probe, contextlib.suppress(ConnectionRefusedError):
            probe.connect(path)
            raise OSError(0, "another server listens there")
        os.unlink(path)
    listener.bind(path)
    os.chmod(path, 0o600)


def remove_socket(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        if listener.family == UNIX_SOCKETS and listener.fileno() >= 0:
            os.unlink(listener.getsockname())


def _show_banner(log: Log, server: ServerState, listener: socket.socket, seconds: float) -> None:
    """Tell at the start what is served, how much it holds and how to try it."""
    options = server.options
    info = server.llm.engine.worker_info
    tokens = kv_cache_tokens(info)
    url = url_of(options, listener)
    curl = f"curl {url}"
    if options.uds:
        curl = f"curl --unix-socket {options.uds} http://localhost"
    log.tell(f"nanovllm: {server.model_name} is ready after {seconds:.1f} s at {url}")
    log.tell(f"  dtype {server.llm.engine.config.dtype}, max_model_len {server.max_model_len}")
    log.tell(
        f"  KV cache of {tokens:,} tokens: {tokens / server.max_model_len:.1f} requests of "
        "max_model_len at once"
    )
    if info.kv.state_pages:
        state_tokens = info.kv.state_pages * info.block_size
        log.tell(f"  the state of a request takes as much of it as {state_tokens:,} tokens")
    if log.is_plain:
        key = " -H 'Authorization: Bearer KEY'" if options.api_keys else ""
        json_type = "-H 'Content-Type: application/json'"
        path = "completions"
        body: dict[str, Any] = {"prompt": "Paged attention is"}
        if not server.llm.engine.input_processor.limit.generates:
            path = "embeddings"
            body = {"input": ["What is paged attention?"]}
        elif server.has_chat_template:
            path = "chat/completions"
            body = {"messages": [{"role": "user", "content": "What is paged attention?"}]}
        log.tell(f"  try: {curl}/v1/{path} {json_type}{key} \\")
        log.tell(f"       -d '{json.dumps(body)}'")
    warn_if_open(log, options)


def url_of(options: ServerOptions, listener: socket.socket) -> str:
    if options.uds:
        return f"unix:{options.uds}"
    host, port, *_ = listener.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def warn_if_open(log: Log, options: ServerOptions) -> None:
    """Warn of a server that others can reach without a key."""
    if not (options.is_local or options.api_keys):
        log.tell(
            f"  WARNING: anyone who can reach {options.host} can use it: give --api-key, or leave "
            "--host out",
            logging.WARNING,
        )


def _exit_anyway(server: ServerState) -> None:
    """End the process after a while, if the engine hangs."""

    def end() -> None:
        time.sleep(_EXIT_SECONDS)
        sys.stderr.flush()
        os._exit(1 if server.failure else 0)

    threading.Thread(target=end, daemon=True).start()
