"""What the server says of itself: its models, whether it is alive and ready, its metrics.

GET /health, /ready and /version wait for no engine step.
"""

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from huggingface_hub import try_to_load_from_cache
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from nanovllm import __version__
from nanovllm.apps.server.admission import shutting_down
from nanovllm.apps.server.json_route import JSONRoute
from nanovllm.apps.server.state import ServerState, state_of
from nanovllm.errors import CheckpointError, EngineDeadError
from nanovllm.loading.files import local_path, read_json
from nanovllm.loading.tokenizer_files import read_chat_templates
from nanovllm.options.lora_request import LoRARequest
from nanovllm.options.sampling_params import chat_sampling

_GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""What is in the names of architectures that write text."""

router = APIRouter(tags=["server"])
models_router = APIRouter(tags=["models"], route_class=JSONRoute)  # the list may be long


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


@router.get("/metrics", include_in_schema=False)
async def metrics(request: Request) -> Response:
    """Return all metrics in Prometheus' text format."""
    return Response(await state_of(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)


@models_router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """List the model and its adapters."""
    server = state_of(request)
    adapters = server.adapters.by_name.values()
    cards = [*(_card(server, name=name) for name in server.names)]
    cards += [_card(server, adapter) for adapter in adapters]
    return {"object": "list", "data": cards}


@models_router.get("/v1/models/{model:path}")
async def get_model(request: Request, model: str) -> dict[str, Any]:
    """Describe the model."""
    server = state_of(request)
    return _card(server, server.check_model(model), server.name_in_answer(model))


def _card(
    server: ServerState, adapter: LoRARequest | None = None, name: str | None = None
) -> dict[str, Any]:
    """Return what the server says of its model or an adapter: vLLM's fields, and four of its own.

    They are `chats`, whether it takes conversations; `reads_pictures`, whether they may have some;
    `chat_sampling`, what to ask for in a person's chat where the checkpoint recommends no sampling;
    `arithmetic`, what decides an answer's bits.
    """
    engine = server.llm.engine
    is_free = engine.config.generation_config != "vllm"
    name = name or server.model_name if adapter is None else adapter.lora_name
    return {
        "id": name,
        "display_name": name,  # for Anthropic's client
        "object": "model",
        "created": server.start_time,
        "owned_by": "nanovllm",
        "root": engine.config.model if adapter is None else adapter.lora_path,
        "parent": None if adapter is None else adapter.base_model_name or server.model_name,
        "max_model_len": server.max_model_len,
        "chats": server.has_chat_template and engine.input_processor.limit.generates,
        "reads_pictures": engine.worker_info.encoder is not None,
        "chat_sampling": chat_sampling(engine.generation_config) if is_free else {},
        "arithmetic": {} if server.arithmetic is None else server.arithmetic._asdict(),
    }


def may_chat(model: str, *, has_template: bool) -> bool | None:
    """Return whether a model that is not loaded takes conversations, by its files.

    Nothing is downloaded. None: the files are not here, or do not say.
    """
    try:
        path: Any = local_path(model) / "config.json"
        if not path.is_file():
            path = try_to_load_from_cache(model, "config.json")
    except ValueError:  # neither a path nor the name of a repository
        return None
    if not isinstance(path, Path | str):
        return None
    folder = Path(path).parent
    try:
        name = str(read_json(folder / "config.json").get("architectures"))
        settings = read_json(folder / "tokenizer_config.json")
        has_template = has_template or read_chat_templates(folder, settings) is not None
    except CheckpointError:
        return None
    return has_template and any(kind in name for kind in _GENERATING)
