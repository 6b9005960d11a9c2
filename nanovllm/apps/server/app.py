"""The app: routes, error handlers and middleware put together."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from nanovllm import __version__
from nanovllm.apps.server import (
    chat_route as chat,
    completions_route as completions,
    control_route as control,
    generate_route as generate,
    info_route as info,
    messages_route as messages,
    pages,
    pooling_route as pooling,
    responses_route as responses,
    tokens,
)
from nanovllm.apps.server.error_bodies import Error, add_error_handlers
from nanovllm.apps.server.middleware import guard
from nanovllm.apps.server.request_log import RequestLog
from nanovllm.apps.server.server_options import ServerOptions
from nanovllm.apps.server.state import ServerState
from nanovllm.async_llm import AsyncLLM

_ERROR: dict[str, Any] = {"model": Error, "description": "Error"}

ROUTERS = (
    *(chat.router, completions.router, generate.router, responses.router, messages.router),
    *(pooling.router, tokens.router, control.adapter_router, info.router, pages.router),
    *(info.models_router, responses.stored_router),
)


class _App(FastAPI):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, whose path may begin with the proxy's."""
        scope["root_path"] = self.state.root_path
        await super().__call__(scope, receive, send)


def app_of(routers: Iterable[APIRouter], options: ServerOptions) -> FastAPI:
    """Return an app with these routes and their schema."""
    # The pages at /docs load scripts from elsewhere, so there are none.
    app = _App(
        title="nanovllm",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses={"4XX": _ERROR, "5XX": _ERROR},
    )
    app.state.root_path = options.root_path or ""
    for router in routers:
        app.include_router(router)
    return app


def routes_of(routers: Iterable[APIRouter]) -> list[Route]:
    return [route for router in routers for route in router.routes if isinstance(route, Route)]


def stand_guard(
    app: FastAPI,
    options: ServerOptions,
    paths: Collection[str],
    answers: Counter[tuple[str, int]],
    switched_off: Mapping[str, str] | None = None,
) -> None:
    """Add what every request passes, for one model or several: checks, error bodies, the log.

    Args:
        paths: those of its routes.
        answers: as for `RequestLog`.
        switched_off: as for `add_error_handlers`.
    """
    add_error_handlers(app, paths, switched_off)
    guard(app, options)
    app.add_middleware(RequestLog, answers=answers)


def make_app(llm: AsyncLLM, options: ServerOptions) -> FastAPI:
    """Return an app that answers with `llm`; `app.state.server` is its `ServerState`."""
    server = ServerState(llm, options)
    routers = [*ROUTERS]
    switched_off: dict[str, str] = {}
    may_sleep = options.dev_mode or options.enable_sleep_mode
    for router, flag, is_on in (
        (control.profile_router, "--profile-dir", llm.engine.config.profile_dir is not None),
        (control.sleep_router, "--enable-sleep-mode", may_sleep),
        (control.training_router, "--dev-mode", options.dev_mode),
    ):
        if is_on:
            routers.append(router)
        else:
            switched_off |= dict.fromkeys((route.path for route in routes_of([router])), flag)
    app = app_of(routers, options)
    app.state.server = server
    paths = [route.path for route in routes_of(routers)]
    stand_guard(app, options, paths, server.metrics.answers, switched_off)
    return app
