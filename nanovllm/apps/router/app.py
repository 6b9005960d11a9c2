"""The app of a server of several models: the engines' routes, and what belongs to all of them."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence as Seq
from typing import Any

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric as Family,
)
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from nanovllm import __version__
from nanovllm.apps.router.models import Model, Models
from nanovllm.apps.router.proxy import Proxy, for_engine
from nanovllm.apps.server import pages
from nanovllm.apps.server.admission import BodyBudget, shutting_down
from nanovllm.apps.server.app import ROUTERS
from nanovllm.apps.server.error_bodies import APIError, add_error_handlers
from nanovllm.apps.server.middleware import guard
from nanovllm.apps.server.options import ServerOptions

_MANY_BODIES = 64
"""At most this many bodies of max_body_bytes are in memory."""
_ASK_SECONDS = 5.0
"""An engine that does not answer in time is left out of /metrics."""
_ANSWERING = ("loaded", "sleeping")
"""The states in which an engine tells its numbers."""
_NOT_PASSED = (
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),  # which the router would not know
)


def make_app(models: Models, options: ServerOptions) -> FastAPI:
    """Return an app that answers with `models`."""
    app = FastAPI(
        title="nanovllm",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        root_path=options.root_path or "",
    )
    app.include_router(pages.router)
    _add_own_routes(app, models)
    routes = (*app.routes, *pages.router.routes)
    own = {route.path for route in routes if isinstance(route, Route)}
    proxy = Proxy(models, BodyBudget(_MANY_BODIES * options.max_body_bytes))
    engines = [r for router in ROUTERS for r in router.routes if isinstance(r, Route)]
    for route in engines:
        if route.path in (*own, *_NOT_PASSED):
            continue
        if "{" in route.path:  # of something that one engine keeps
            app.add_api_route(route.path, _asking_all(models), methods=list(route.methods or ()))
        else:
            app.router.routes.append(Route(route.path, proxy, methods=route.methods))
    app.router.routes.append(Route("/openapi.json", proxy, methods=["GET"]))
    add_error_handlers(app, [r.path for r in app.routes if isinstance(r, Route)])
    guard(app, options)
    return app


def _add_own_routes(app: FastAPI, models: Models) -> None:
    start_time = int(time.time())

    @app.head("/health")
    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.head("/ready")
    @app.get("/ready")
    async def ready() -> dict[str, str]:
        if models.is_draining:
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
        named = [models.find(model)] if model else models.all
        for each in named:
            if each.is_alive and each.state in _ANSWERING:
                text = await _asked(each, "/status.json")
                return Response(text, media_type="application/json")
        raise APIError(503, "no model is loaded now", code="no_model_loaded")

    @app.get("/metrics")
    async def metrics() -> Response:
        text = await _metrics(models)
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
        for model in models.all:
            if model.engine is None or model.state not in _ANSWERING:
                continue
            with contextlib.suppress(httpx.HTTPError):
                found = await model.engine.client.send(for_engine(request.scope, b""))
                if found.status_code != 404:
                    kind = found.headers.get("content-type")
                    return Response(found.content, found.status_code, media_type=kind)
        raise APIError(404, "no model that runs has what the path names", code="not_found")

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
            **known.get(name, {}),
            **state,
        }
        for name in (*model.spec.names, *adapters)
    ]


async def _metrics(models: Models) -> bytes:
    """Return the metrics of all engines with a label `model`, and the router's own."""
    running = [model for model in models.all if model.is_alive and model.state in _ANSWERING]
    texts = await asyncio.gather(*(_asked(model, "/metrics") for model in running))
    registry = CollectorRegistry()
    registry.register(_Merged([(m.name, text) for m, text in zip(running, texts, strict=True)]))
    registry.register(_Own(models))
    return generate_latest(registry)


async def _asked(model: Model, path: str) -> str:
    """Return what a running engine answers; "" if it does not in time."""
    assert model.engine is not None
    with contextlib.suppress(httpx.HTTPError, TimeoutError):
        async with asyncio.timeout(_ASK_SECONDS):
            return (await model.engine.client.get(path)).text
    return ""


class _Merged:
    """The families of several engines' metrics; each sample says whose it is."""

    def __init__(self, texts: Seq[tuple[str, str]]) -> None:
        self._texts = texts

    def collect(self) -> Iterable[Family]:
        merged: dict[str, Family] = {}
        for name, text in self._texts:
            for family in text_string_to_metric_families(text):
                whole = merged.setdefault(
                    family.name, Family(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {**sample.labels, "model": name}
                    whole.samples.append(sample._replace(labels=labels))
        return merged.values()


class _Own:
    """The router's metrics: the states of its models, their loads and their deaths."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def collect(self) -> Iterator[Family]:
        state = GaugeMetricFamily(
            "nanovllm:model_state", "1 for the state of each model.", labels=["model", "state"]
        )
        waiting = GaugeMetricFamily(
            "nanovllm:model_requests_waiting", "Requests that wait for a model.", labels=["model"]
        )
        loads = CounterMetricFamily("nanovllm:model_loads", "Times loaded.", labels=["model"])
        deaths = CounterMetricFamily(
            "nanovllm:model_deaths", "Engines that died.", labels=["model"]
        )
        seconds = GaugeMetricFamily(
            "nanovllm:model_load_seconds", "Seconds of the last load.", labels=["model"]
        )
        for model in self._models.all:
            state.add_metric([model.name, model.state], 1)
            waiting.add_metric([model.name], len(model.waiters))
            loads.add_metric([model.name], model.num_loads)
            deaths.add_metric([model.name], model.num_deaths)
            seconds.add_metric([model.name], model.load_seconds)
        yield from (state, waiting, loads, deaths, seconds)
