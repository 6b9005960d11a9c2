"""`nanovllm serve` with several models: the app, with the routes of the engines and what belongs to
all of them, and the server, which runs until a signal comes.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric as Family,
)
from starlette.routing import Route

from nanovllm.apps.router.models import Model, Models
from nanovllm.apps.router.proxy import Proxy
from nanovllm.apps.router.router_options import RouterOptions, read_models
from nanovllm.apps.server import control_route, pages, responses_route
from nanovllm.apps.server.admission import AnswerBudget, BodyBudget, shutting_down
from nanovllm.apps.server.app import ROUTERS, app_of, routes_of, stand_guard
from nanovllm.apps.server.error_bodies import APIError
from nanovllm.apps.server.info_route import version
from nanovllm.apps.server.json_route import JSONRoute
from nanovllm.apps.server.prometheus import filled, http_requests, merge
from nanovllm.apps.server.request_log import Log
from nanovllm.apps.server.serve import (
    FLUSH_SECONDS,
    OTHER_FILES,
    DrainingServer,
    bound_socket,
    url_of,
    warn_if_open,
)
from nanovllm.apps.server.server_options import ServerOptions, keys_of_environment
from nanovllm.errors import ConfigError
from nanovllm.options.config import Config
from nanovllm.options.flags import given_fields
from nanovllm.utils.system import UNIX_SOCKETS, allow_files

_ASK_SECONDS = 5.0
"""An engine that does not answer in time is left out where all are asked."""
_WAITING = "Requests that wait for a model."
_LOAD = "Seconds of the last load."
_BACKLOG_BYTES = 256 * 2**20
_MAX_PLACE = 80
"""Characters of a directory of sockets: their paths have 107 at most."""


def serve(args: argparse.Namespace) -> int:
    """Serve several models over HTTP; each is loaded when a request first names it."""
    if UNIX_SOCKETS is None:
        raise ConfigError(
            "several models in one server need Unix sockets, which Python lacks on Windows: start "
            "a server for each model, with a --port of its own, or use WSL"
        )
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


def make_app(models: Models, options: ServerOptions) -> FastAPI:
    routers = [*ROUTERS]
    if any(model.spec.engine.get("profile_dir") for model in models.all):
        routers.append(control_route.profile_router)
    own_routers = [pages.router, responses_route.stored_router]
    app = app_of(own_routers, options)
    schema = app_of(routers, options)
    app.openapi = schema.openapi  # type: ignore[method-assign]  # what the engines answer
    answered: Counter[tuple[str, int]] = Counter()
    _add_own_routes(app, models, answered)
    own = {route.path for route in routes_of([app.router, *own_routers])}
    bodies, backlog = BodyBudget(options.max_body_bytes), AnswerBudget(_BACKLOG_BYTES)
    passed = [r for r in routes_of(routers) if r.path not in own]
    for route in passed:
        has_json = isinstance(route, JSONRoute) and "POST" in (route.methods or ())
        proxy = Proxy(models, bodies, backlog, has_json=has_json)
        app.router.routes.append(Route(route.path, proxy, methods=route.methods))
    paths = [*own, *(route.path for route in passed)]
    stand_guard(app, options, paths, answered)
    return app


def _add_own_routes(app: FastAPI, models: Models, answered: Counter[tuple[str, int]]) -> None:
    start_time = int(time.time())

    @app.head("/health")
    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.head("/ready")
    @app.get("/ready")
    async def ready() -> dict[str, str]:
        if models.admission.is_draining:
            raise shutting_down()
        return {"status": "ready"}

    app.get("/version")(version)

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        cards = [card for model in models.all for card in _cards(model, start_time)]
        return {"object": "list", "data": cards}

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        model = models.find(name)
        found = _cards(model, start_time)
        return next((card for card in found if card["id"] == name), found[0])

    @app.get("/metrics")
    async def metrics() -> Response:
        running = models.answering()
        texts = await asyncio.gather(*(_asked(model, "/metrics") for model in running))
        of_engines = dict(zip((model.name for model in running), texts, strict=True))
        text = merge(of_engines, "model", _own(models, answered))
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):

        @app.post(path)
        async def refuse(request: Request) -> None:
            raise APIError(
                501,
                "a server of several models has the adapters that it starts with: give them as "
                "lora_modules in the model's table",
                code="not_supported",
            )


def _cards(model: Model, start_time: int) -> list[dict[str, Any]]:
    """Return what /v1/models says of a model: a card for each of its names."""
    known = {card["id"]: card for card in model.cards}
    state: dict[str, Any] = {
        "state": model.state,
        "requests": model.num_requests + len(model.waiters),
        "memory_share": round(model.spec.share, 4),
    }
    if model.state == "unloaded" and model.failure is not None:
        state["error"] = model.failure
    adapters = model.spec.adapters
    return [
        {
            "id": name,
            "object": "model",
            "created": start_time,
            "owned_by": "nanovllm",
            "root": model.spec.model,
            "parent": model.name if name in adapters else None,
            "max_model_len": None,
            "chats": model.chats,
            **known.get(name, {}),
            **state,
        }
        for name in (*model.spec.names, *adapters)
    ]


async def _asked(model: Model, path: str) -> str:
    """Return what a running engine answers; "" if it does not in time."""
    assert model.engine is not None
    with contextlib.suppress(httpx.HTTPError, TimeoutError):
        async with asyncio.timeout(_ASK_SECONDS):
            return (await model.engine.client.get(path)).text
    return ""


def _own(models: Models, answered: Counter[tuple[str, int]]) -> Iterator[Family]:
    """Yield the router's metrics: its models' states, loads and deaths, and what no engine saw."""
    families: tuple[tuple[type, str, str, Callable[[Model], float]], ...] = (
        (GaugeMetricFamily, "model_requests_waiting", _WAITING, lambda model: len(model.waiters)),
        (CounterMetricFamily, "model_loads", "Times loaded.", lambda model: model.num_loads),
        (CounterMetricFamily, "model_deaths", "Engines that died.", lambda model: model.num_deaths),
        (GaugeMetricFamily, "model_load_seconds", _LOAD, lambda model: model.load_seconds),
    )
    for kind, name, text, value in families:
        counts = {(model.name,): value(model) for model in models.all}
        yield filled(kind, f"nanovllm:{name}", text, counts, {}, "model")
    states = {(model.name, model.state): 1.0 for model in models.all}
    text = "1 for the state of each model."
    yield filled(GaugeMetricFamily, "nanovllm:model_state", text, states, {}, "model", "state")
    yield http_requests(answered, {"model": ""})
