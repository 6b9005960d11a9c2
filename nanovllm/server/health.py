"""GET /health, /ready and /version: for load balancers and people. Waits for no engine step."""

from fastapi import APIRouter, Request

from nanovllm import __version__
from nanovllm.errors import EngineDeadError
from nanovllm.server.admission import shutting_down
from nanovllm.server.state import ServerState, state_of

router = APIRouter(tags=["server"])


@router.get("/health")
async def health(request: Request) -> dict[str, str]:
    """Say that the server is alive; status 500 if its engine is dead."""
    _check_engine(state_of(request))
    return {"status": "ok"}


@router.get("/ready")
async def ready(request: Request) -> dict[str, str]:
    """Say that the server takes requests; status 503 while it shuts down."""
    server = state_of(request)
    if server.admission.is_draining:
        raise shutting_down()
    _check_engine(server)
    return {"status": "ready"}


@router.get("/version")
async def version() -> dict[str, str]:
    """Name the version of nanovllm."""
    return {"version": __version__}


def _check_engine(server: ServerState) -> None:
    if server.failure is not None:
        raise EngineDeadError(server.failure)
