"""GET /health, /ready and /version, which wait for no engine step; and GET /status.json.

The latter has the numbers that the page /status shows.
"""

import time
from typing import Any

from fastapi import APIRouter, Request

from nanovllm import __version__
from nanovllm.apps.server.admission import shutting_down
from nanovllm.apps.server.state import ServerState, state_of
from nanovllm.engine.engine_metrics import kv_cache_tokens
from nanovllm.errors import EngineDeadError
from nanovllm.outputs import Metric

router = APIRouter(tags=["server"])

_COUNTS = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_cache_usage": "vllm:kv_cache_usage_perc",
    "prompt_tokens": "vllm:prompt_tokens",
    "output_tokens": "vllm:generation_tokens",
    "prefix_cache_queries": "vllm:prefix_cache_queries",
    "prefix_cache_hits": "vllm:prefix_cache_hits",
    "preemptions": "vllm:num_preemptions",
    "mean_acceptance_length": "nanovllm:mean_acceptance_length",
}


@router.head("/health", include_in_schema=False)  # monitors and load balancers ask so
@router.get("/health")
async def health(request: Request) -> dict[str, str]:
    """Say that the server is alive; status 500 if its engine is dead."""
    _check_engine(state_of(request))
    return {"status": "ok"}


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(request: Request) -> dict[str, str]:
    """Say that the server takes requests; status 503 while it shuts down, sleeps, refuses them in a
    pause or has no whole weights.
    """
    server = state_of(request)
    if server.admission.is_draining:
        raise shutting_down()
    _check_engine(server)
    server.check_awake()
    return {"status": "ready"}


@router.get("/version")
async def version() -> dict[str, str]:
    """Name the version of nanovllm."""
    return {"version": __version__}


def _check_engine(server: ServerState) -> None:
    if server.failure is not None:
        raise EngineDeadError(server.failure)


@router.get("/status.json", include_in_schema=False)
async def status(request: Request) -> dict[str, Any]:
    """Return counts since the start and the load now; the page makes rates of them."""
    server = state_of(request)
    metrics = server.metrics
    llm = server.llm
    values = {m.name: m.value for m in await llm.get_metrics() if isinstance(m, Metric)}
    info = llm.engine.worker_info
    first_tokens = metrics.histograms["vllm:time_to_first_token_seconds"]
    return {
        "model": server.model_name,
        "version": __version__,
        "uptime": time.monotonic() - metrics.start_time,
        "max_model_len": info.max_model_len,
        "kv_cache_tokens": kv_cache_tokens(info),
        **{key: values.get(name) for key, name in _COUNTS.items()},
        "requests": dict(metrics.finished),
        "refused": dict(metrics.refusals),
        "first_tokens": {"count": first_tokens.count, "seconds": first_tokens.sum},
    }
