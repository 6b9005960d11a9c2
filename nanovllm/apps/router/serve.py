"""`nanovllm serve` with several models: runs the router until a signal comes."""

import argparse
import asyncio
import os
import socket
import tempfile
import time
from types import FrameType
from typing import Any

import uvicorn

from nanovllm.apps.router.app import make_app
from nanovllm.apps.router.models import Models
from nanovllm.apps.router.options import RouterOptions, read_models
from nanovllm.apps.server.admission import shutting_down
from nanovllm.apps.server.log_setup import Log
from nanovllm.apps.server.options import ServerOptions, keys_of_environment
from nanovllm.apps.server.serve import (
    OTHER_FILES,
    allow_files,
    bound_socket,
    http_config,
    remove_socket,
    url_of,
    warn_if_open,
)
from nanovllm.options.config import Config
from nanovllm.options.flags import given_fields

_MAX_PLACE = 80
"""Characters of a directory of sockets: their paths have 107 at most."""


def serve(args: argparse.Namespace) -> int:
    """Serve several models over HTTP; each is loaded when a request first names it."""
    given = given_fields(ServerOptions, args)
    specs = read_models(args.models, given_fields(Config, args), given)
    given["api_keys"] = (*given.get("api_keys", ()), *keys_of_environment())
    options = ServerOptions(**given)
    router = RouterOptions(**given_fields(RouterOptions, args))
    log = Log(options.log_level, options.log_format, options.log_config)
    allow_files(2 * options.max_connections + OTHER_FILES)
    place = "/tmp" if len(tempfile.gettempdir()) > _MAX_PLACE else None
    with (
        tempfile.TemporaryDirectory(prefix="nanovllm-", dir=place) as directory,
        bound_socket(options) as listener,
    ):
        models = Models(specs, options, router, directory, log)
        server = RouterServer(make_app(models, options), models, options, listener)
        names = ", ".join(spec.names[0] for spec in specs)
        log.tell(
            f"nanovllm: {names} at {url_of(options, listener)}, each loaded when it is asked for"
        )
        warn_if_open(log, options)
        server.run(sockets=[listener])
    return 0


class RouterServer(uvicorn.Server):
    """uvicorn's server, which drains at the first signal and ends its engines with itself."""

    def __init__(
        self, app: Any, models: Models, options: ServerOptions, listener: socket.socket
    ) -> None:
        self._models = models
        self._options = options
        self._listener = listener
        self._was_asked = False
        super().__init__(http_config(app, options))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, close the connections, and end the engines."""
        remove_socket(self._listener)
        await super().shutdown(sockets)
        await self._models.shut_down()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain; at the second signal, end the process, and its engines with it."""
        if self._was_asked or not self.started:
            remove_socket(self._listener)
            os._exit(128 + sig)
        self._was_asked = True
        asyncio.run_coroutine_threadsafe(self._drain(), self._loop)

    async def _drain(self) -> None:
        """Refuse new requests, let the others finish for a while, then end the server."""
        models = self._models
        models.is_draining = True
        running = f"finishing {models.num_requests} requests"
        models.log.tell(f"nanovllm: {running}, for {self._options.drain_seconds:g} s at most")
        deadline = time.monotonic() + self._options.drain_seconds
        while models.num_requests and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        models.end_waiting(shutting_down())
        self.should_exit = True
