"""POST /start_profile and /stop_profile, in vLLM's form. The app has them if profile_dir is set."""

from fastapi import APIRouter, Request

from nanovllm.apps.server.sleep_route import controlled

router = APIRouter(tags=["profile"])


@router.post("/start_profile")
async def start_profile(request: Request) -> dict[str, str]:
    """Begin a profile in the directory `profile_dir`."""
    llm = controlled(request).llm
    await llm.start_profile()
    return {"profile_dir": llm.engine.config.profile_dir or ""}


@router.post("/stop_profile")
async def stop_profile(request: Request) -> dict[str, list[str]]:
    """End the profile and return the paths of its files, on the server's machine."""
    return {"files": await controlled(request).llm.stop_profile()}
