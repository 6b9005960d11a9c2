"""`nanovllm serve` with several models: runs the router until a signal comes."""

import argparse
import asyncio
import dataclasses
import socket
import tempfile
import time
from collections.abc import Callable
from typing import Any

from nanovllm.apps.router.app import make_app
from nanovllm.apps.router.models import Models
from nanovllm.apps.router.router_options import RouterOptions, read_models
from nanovllm.apps.server.request_log import Log
from nanovllm.apps.server.serve import (
    FLUSH_SECONDS,
    OTHER_FILES,
    DrainingServer,
    allow_files,
    bound_socket,
    url_of,
    warn_if_open,
)
from nanovllm.apps.server.server_options import ServerOptions, keys_of_environment
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
    log = Log(options.log_level, options.log_format)
    largest = max(spec.server.get("max_body_bytes", options.max_body_bytes) for spec in specs)
    options = dataclasses.replace(options, max_body_bytes=largest)  # an engine checks its own
    allow_files(2 * options.max_connections + OTHER_FILES)
    place = "/tmp" if len(tempfile.gettempdir()) > _MAX_PLACE else None
    with (
        tempfile.TemporaryDirectory(prefix="nanovllm-", dir=place) as directory,
        bound_socket(options) as listener,
    ):
        models = Models(specs, options, router, directory, log)
        names = ", ".join(spec.names[0] for spec in specs)

        def show_banner() -> None:
            url = url_of(options, listener)
            log.tell(f"nanovllm: {names} at {url}, each loaded when it is asked for")
            warn_if_open(log, options)

        app = make_app(models, options)
        RouterServer(app, models, options, listener, show_banner).run(sockets=[listener])
    return 0


class RouterServer(DrainingServer):
    """The server of several models, which ends their engines with itself."""

    def __init__(
        self,
        app: Any,
        models: Models,
        options: ServerOptions,
        listener: socket.socket,
        on_start: Callable[[], object] = lambda: None,
    ) -> None:
        self._models = models
        super().__init__(app, listener, options, models.admission, on_start, models.log.tell)

    async def _end_requests(self) -> None:
        """Let the engines end those that are left, and end what one does not in time."""
        self._models.terminate()
        deadline = time.monotonic() + FLUSH_SECONDS
        while self._models.admission.num_requests and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        await super()._end_requests()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, close the connections, and end the engines."""
        await super().shutdown(sockets)
        await self._models.shut_down()
