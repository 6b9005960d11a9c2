"""GET /v1/models; POST /v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's form."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from huggingface_hub import try_to_load_from_cache
from pydantic import Field

from nanovllm.apps.server import generation
from nanovllm.apps.server.error_bodies import naming_params
from nanovllm.apps.server.json_route import JSONRoute
from nanovllm.apps.server.protocol.common import RequestModel
from nanovllm.apps.server.state import ServerState, state_of
from nanovllm.errors import CheckpointError
from nanovllm.loading.files import read_json
from nanovllm.loading.tokenizer_files import read_chat_templates
from nanovllm.options.lora_request import LoRARequest
from nanovllm.options.other_names import OtherName, other_names
from nanovllm.options.sampling_params import chat_sampling

_GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""What is in the names of architectures that write text."""

router = APIRouter(tags=["models"], route_class=JSONRoute)


class LoadAdapterRequest(RequestModel):
    """Which adapter requests may name from now on."""

    others: ClassVar[Mapping[str, OtherName]] = other_names({"is_3d_lora_weight": (False,)})

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)
    """A directory in the server's lora_directory; a relative path begins there."""
    load_inplace: bool = False
    """Whether the name may be an adapter's, which the new one then replaces."""


class UnloadAdapterRequest(RequestModel):
    """Which adapter requests may not name any more."""

    ignored: ClassVar[frozenset[str]] = frozenset({"lora_int_id"})

    lora_name: str = Field(min_length=1)


def may_chat(model: str, *, has_template: bool) -> bool | None:
    """Return whether a model that is not loaded takes conversations, by its files.

    Nothing is downloaded. None: the files are not here, or do not say.
    """
    path: Any = Path(model) / "config.json"
    if not path.is_file():
        try:
            path = try_to_load_from_cache(model, "config.json")
        except ValueError:  # not the name of a repository
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


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """List the model and its adapters."""
    server = state_of(request)
    adapters = server.adapters.by_name.values()
    cards = [*(_card(server, name=name) for name in server.names)]
    cards += [_card(server, adapter) for adapter in adapters]
    return {"object": "list", "data": cards}


@router.get("/v1/models/{model:path}")
async def get_model(request: Request, model: str) -> dict[str, Any]:
    """Describe the model."""
    server = state_of(request)
    return _card(server, server.check_model(model), server.name_in_answer(model))


@router.post("/v1/load_lora_adapter")
async def load_adapter(request: Request, body: LoadAdapterRequest) -> PlainTextResponse:
    """Read an adapter, and let requests name it as their model."""
    server = state_of(request)
    place = generation.admit(request, 1)
    with naming_params(LoadAdapterRequest.model_fields, "lora_path"):
        run = partial(place.prepare, pool=server.loading)
        await server.adapters.load(body.lora_name, body.lora_path, run, in_place=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter")
async def unload_adapter(request: Request, body: UnloadAdapterRequest) -> PlainTextResponse:
    """Let no request name an adapter any more; those that have it go on."""
    server = state_of(request)
    server.adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _card(
    server: ServerState, adapter: LoRARequest | None = None, name: str | None = None
) -> dict[str, Any]:
    """Return what the server says of its model or an adapter: vLLM's fields, and three of its own.

    They are `chats`, whether it takes conversations; `chat_sampling`, what to ask for in a person's
    chat where the checkpoint recommends no sampling; `arithmetic`, what decides an answer's bits.
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
        "chat_sampling": chat_sampling(engine.generation_config) if is_free else {},
        "arithmetic": {} if server.arithmetic is None else server.arithmetic._asdict(),
    }
