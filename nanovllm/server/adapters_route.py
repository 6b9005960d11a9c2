"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's form."""

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from pydantic import Field

from nanovllm.options.validation import OtherName, other_names
from nanovllm.server import generation
from nanovllm.server.error_bodies import naming_params
from nanovllm.server.json_route import JSONRoute
from nanovllm.server.protocol.common import RequestModel
from nanovllm.server.state import state_of

router = APIRouter(tags=["adapters"], route_class=JSONRoute)


class LoadAdapterRequest(RequestModel):
    """Which adapter requests may name from now on."""

    others: ClassVar[Mapping[str, OtherName]] = other_names(
        ("is_3d_lora_weight", (False,), "experts have no adapters; leave it out")
    )

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)
    """A directory in the server's lora_directory; a relative path begins there."""
    load_inplace: bool = False
    """Whether the name may be an adapter's, which the new one then replaces."""


class UnloadAdapterRequest(RequestModel):
    """Which adapter requests may not name any more."""

    ignored: ClassVar[frozenset[str]] = frozenset({"lora_int_id"})

    lora_name: str = Field(min_length=1)


@router.post("/v1/load_lora_adapter")
async def load_adapter(request: Request, body: LoadAdapterRequest) -> PlainTextResponse:
    """Read an adapter, and let requests name it as their model."""
    server = state_of(request)
    place = generation.admit(request, 1)
    with naming_params(LoadAdapterRequest.model_fields, "lora_path"):
        run = partial(place.in_pool, server.loading)
        await server.adapters.load(body.lora_name, body.lora_path, run, in_place=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter")
async def unload_adapter(request: Request, body: UnloadAdapterRequest) -> PlainTextResponse:
    """Let no request name an adapter any more; those that have it go on."""
    server = state_of(request)
    server.adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
