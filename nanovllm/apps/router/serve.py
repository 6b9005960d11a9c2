"""`nanovllm serve` with several models: runs the router until a signal comes."""

import argparse
import socket
import tempfile
from typing import Any

from nanovllm.apps.router.app import make_app
from nanovllm.apps.router.models import Models
from nanovllm.apps.router.options import RouterOptions, read_models
from nanovllm.apps.server.log_setup import Log
from nanovllm.apps.server.options import ServerOptions, keys_of_environment
from nanovllm.apps.server.serve import (
    OTHER_FILES,
    DrainingServer,
    allow_files,
    bound_socket,
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


class RouterServer(DrainingServer):
    """The server of several models, which ends their engines with itself."""

    def __init__(
        self, app: Any, models: Models, options: ServerOptions, listener: socket.socket
    ) -> None:
        self._models = models
        super().__init__(app, listener, options, models, models.log.tell)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, close the connections, and end the engines."""
        await super().shutdown(sockets)
        await self._models.shut_down()
