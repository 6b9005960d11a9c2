"""The app of a server of several models: the engines' routes, and what belongs to all of them."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
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

from nanovllm import __version__
from nanovllm.apps.router.models import Model, Models
from nanovllm.apps.router.proxy import Proxy, for_engine
from nanovllm.apps.server import control_route, pages
from nanovllm.apps.server.admission import AnswerBudget, BodyBudget, shutting_down
from nanovllm.apps.server.app import ROUTERS, app_of, routes_of, stand_guard
from nanovllm.apps.server.error_bodies import APIError
from nanovllm.apps.server.json_route import JSONRoute
from nanovllm.apps.server.prometheus import merge
from nanovllm.apps.server.request_log import record_of
from nanovllm.apps.server.server_options import ServerOptions

_ASK_SECONDS = 5.0
"""An engine that does not answer in time is left out where all are asked."""
_BACKLOG_BYTES = 256 * 2**20
"""Of all answers that wait for clients who read slowly."""
_NOT_PASSED = (
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),  # which the router would not know
)


def make_app(models: Models, options: ServerOptions) -> FastAPI:
    """Return an app that answers with `models`."""
    routers = [*ROUTERS]
    if any(model.spec.engine.get("profile_dir") for model in models.all):
        routers.append(control_route.profile_router)
    app = app_of([pages.router], options)
    schema = app_of(routers, options)
    app.openapi = schema.openapi  # type: ignore[method-assign]  # what the engines answer
    answered: Counter[tuple[str, int]] = Counter()
    _add_own_routes(app, models, answered)
    own = {route.path for route in routes_of([app.router, pages.router])}
    bodies, backlog = BodyBudget(options.max_body_bytes), AnswerBudget(_BACKLOG_BYTES)
    passed = [r for r in routes_of(routers) if r.path not in (*own, *_NOT_PASSED)]
    for route in passed:
        if "{" in route.path:  # of something that one engine keeps
            app.add_api_route(route.path, _asking_all(models), methods=list(route.methods or ()))
        else:
            has_json = isinstance(route, JSONRoute) and "POST" in (route.methods or ())
            proxy = Proxy(models, bodies, backlog, has_json=has_json)
            app.router.routes.append(Route(route.path, proxy, methods=route.methods))
    paths = [*own, *(route.path for route in passed)]
    stand_guard(app, options, paths, lambda path, status: answered.update([(path, status)]))
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

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        cards = [card for model in models.all for card in _cards(model, start_time)]
        return {"object": "list", "data": cards}

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        model = models.find(name)
        found = _cards(model, start_time)
        return next((card for card in found if card["id"] == name), found[0])

    @app.get("/status.json")
    async def status(model: str | None = None) -> Response:
        """Return the load of a model, by default of the first that is loaded; load none."""
        running = models.answering(model)
        for text in await asyncio.gather(*(_asked(each, "/status.json") for each in running)):
            if text:
                return Response(text, media_type="application/json")
        raise APIError(503, "no model that is in memory answers now", code="no_model_loaded")

    @app.get("/metrics")
    async def metrics() -> Response:
        text = await _metrics(models, answered)
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


def _asking_all(models: Models) -> Callable[[Request], Awaitable[Response]]:
    """Return a route that asks each engine that runs for what an id in the path names."""

    async def ask(request: Request) -> Response:
        asked = [
            asyncio.create_task(_sent(model, for_engine(request.scope, b"")))
            for model in models.answering()
        ]
        found = None
        try:
            for answer in asyncio.as_completed(asked):
                found = await answer or found
                if found is not None and found.status_code != 404:
                    break
        finally:
            for task in asked:
                task.cancel()
        if found is None:
            raise APIError(404, "no model that runs has what the path names", code="not_found")
        if (record := record_of(request.scope)) is not None:
            record.is_passed_on = True
        kind = found.headers.get("content-type")
        return Response(found.content, found.status_code, media_type=kind)

    return ask


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


async def _metrics(models: Models, answered: Counter[tuple[str, int]]) -> bytes:
    """Return the metrics of all engines with a label `model`, and the router's own."""
    running = models.answering()
    texts = await asyncio.gather(*(_asked(model, "/metrics") for model in running))
    names = (model.name for model in running)
    return merge(dict(zip(names, texts, strict=True)), "model", _own(models, answered))


async def _asked(model: Model, path: str) -> str:
    """Return what a running engine answers; "" if it does not in time."""
    assert model.engine is not None
    found = await _sent(model, model.engine.client.build_request("GET", path))
    return "" if found is None else found.text


async def _sent(model: Model, request: httpx.Request) -> httpx.Response | None:
    """Return what a running engine answers; None if it does not in time."""
    assert model.engine is not None
    with contextlib.suppress(httpx.HTTPError, TimeoutError):
        async with asyncio.timeout(_ASK_SECONDS):
            return await model.engine.client.send(request)
    return None


def _own(models: Models, answered: Counter[tuple[str, int]]) -> Iterator[Family]:
    """Yield the router's metrics: its models' states, loads and deaths, and what no engine saw."""
    state = GaugeMetricFamily(
        "nanovllm:model_state", "1 for the state of each model.", labels=["model", "state"]
    )
    waiting = GaugeMetricFamily(
        "nanovllm:model_requests_waiting", "Requests that wait for a model.", labels=["model"]
    )
    loads = CounterMetricFamily("nanovllm:model_loads", "Times loaded.", labels=["model"])
    deaths = CounterMetricFamily("nanovllm:model_deaths", "Engines that died.", labels=["model"])
    seconds = GaugeMetricFamily(
        "nanovllm:model_load_seconds", "Seconds of the last load.", labels=["model"]
    )
    for model in models.all:
        state.add_metric([model.name, model.state], 1)
        waiting.add_metric([model.name], len(model.waiters))
        loads.add_metric([model.name], model.num_loads)
        deaths.add_metric([model.name], model.num_deaths)
        seconds.add_metric([model.name], model.load_seconds)
    answers = CounterMetricFamily(
        "nanovllm:http_requests", "HTTP requests.", labels=["model", "path", "status"]
    )
    for (path, status), count in answered.items():
        answers.add_metric(["", path, str(status)], count)
    yield from (state, waiting, loads, deaths, seconds, answers)
