"""POST /sleep and /wake_up, GET /is_sleeping, in vLLM's form.

The app has them with enable_sleep_mode or dev_mode.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from nanovllm.apps.server.error_bodies import APIError, naming_params
from nanovllm.apps.server.generation import while_connected
from nanovllm.apps.server.state import ServerState, state_of

router = APIRouter(tags=["development"])


def controlled(request: Request) -> ServerState:
    """Return the state of a server that a client wants to control.

    Raises:
        APIError: status 403, a web page sends it: to this machine any page may, and no key stops
            it.
    """
    server = state_of(request)
    if "origin" in request.headers and not server.options.api_keys:
        raise APIError(403, "web pages do not control this server: give it an --api-key")
    return server


@router.post("/sleep")
async def sleep(request: Request, level: int = 1, mode: str = "abort") -> dict[str, Any]:
    """Give back the memory of weights and KV; requests in flight end, or are awaited."""
    with naming_params(("level", "mode"), "level"), while_connected(request):
        await controlled(request).llm.sleep(level, mode)
    return {"status": "sleeping", "level": level}


@router.post("/wake_up")
async def wake_up(
    request: Request, tags: Annotated[list[str] | None, Query()] = None
) -> dict[str, Any]:
    """Take back the memory of "weights", "kv_cache" or both."""
    with naming_params(("tags",), "tags"):
        is_awake = await controlled(request).llm.wake_up(tags)
    return {"status": "awake" if is_awake else "sleeping", "tags": tags}


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> dict[str, bool]:
    """Say whether the engine sleeps."""
    return {"is_sleeping": await state_of(request).llm.is_sleeping()}
