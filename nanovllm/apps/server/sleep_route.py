"""POST /sleep and /wake_up, GET /is_sleeping, in vLLM's form: only with enable_sleep_mode."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from nanovllm.apps.server.error_bodies import APIError, naming_params
from nanovllm.apps.server.state import ServerState, state_of

router = APIRouter(tags=["server"])


@router.post("/sleep")
async def sleep(request: Request, level: int = 1, mode: str = "abort") -> Response:
    """Give back the memory of weights and KV; requests in flight end, or are awaited."""
    server = _state(request)
    with naming_params(("level", "mode"), "level"):
        await server.llm.sleep(level, mode)
    return Response()


@router.post("/wake_up")
async def wake_up(request: Request) -> Response:
    """Take the memory back."""
    await _state(request).llm.wake_up()
    return Response()


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> dict[str, bool]:
    """Say whether the engine sleeps."""
    return {"is_sleeping": await _state(request).llm.is_sleeping()}


def _state(request: Request) -> ServerState:
    server = state_of(request)
    if not server.options.enable_sleep_mode:
        raise APIError(403, "this server does not sleep: start it with --enable-sleep-mode")
    return server
