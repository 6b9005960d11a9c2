"""GET /v1/models; POST /v1/embeddings and its like, which a generating model refuses by name."""

from typing import Literal, NoReturn

from fastapi import APIRouter, Request
from pydantic import BaseModel

from nanovllm.options.lora_request import LoRARequest
from nanovllm.server.error_bodies import APIError
from nanovllm.server.state import ServerState, state_of

router = APIRouter(tags=["models"])


class ModelCard(BaseModel):
    """A model that can be named in requests."""

    id: str
    object: Literal["model"] = "model"
    created: int
    """Unix time in seconds."""
    owned_by: str = "nanovllm"
    root: str
    """What was loaded."""
    parent: str | None = None
    """The model that an adapter changes."""
    max_model_len: int


class ModelList(BaseModel):
    """All models of the server."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    """List the model and its adapters."""
    server = state_of(request)
    adapters = server.adapters.by_name.values()
    return ModelList(data=[_card(server), *(_card(server, adapter) for adapter in adapters)])


@router.get("/v1/models/{model:path}")
async def get_model(request: Request, model: str) -> ModelCard:
    """Describe the model."""
    server = state_of(request)
    return _card(server, server.check_model(model))


@router.post("/v1/embeddings", response_model=None)
@router.post("/v1/rerank", response_model=None)
async def refuse(request: Request) -> NoReturn:
    """Refuse: the model generates text."""
    what = "embeddings" if request.url.path.endswith("/embeddings") else "scores"
    raise APIError(
        501,
        f"this model generates text and makes no {what}: use a server for {what}",
        code="not_supported",
    )


def _card(server: ServerState, adapter: LoRARequest | None = None) -> ModelCard:
    return ModelCard(
        id=server.model_name if adapter is None else adapter.lora_name,
        created=server.start_time,
        root=server.llm.engine.config.model if adapter is None else adapter.lora_path,
        parent=None if adapter is None else adapter.base_model_name or server.model_name,
        max_model_len=server.max_model_len,
    )
