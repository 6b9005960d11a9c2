"""Routes that control the engine, in vLLM's form: its adapters, memory, profile and weights.

Those of memory are there with enable_sleep_mode, those of the profile with profile_dir, and what a
trainer asks with dev_mode: pauses, new weights, what the server is.
"""

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import PlainTextResponse
from pydantic import Field

from nanovllm.apps.server.error_bodies import APIError, naming_params
from nanovllm.apps.server.generation import admit, while_connected
from nanovllm.apps.server.json_route import JSONRoute, parse
from nanovllm.apps.server.protocol import RequestModel
from nanovllm.apps.server.state import ServerState, state_of
from nanovllm.options.other_names import other_names
from nanovllm.options.validation import shown

adapter_router = APIRouter(tags=["models"], route_class=JSONRoute)
sleep_router = APIRouter(tags=["development"])
profile_router = APIRouter(tags=["profile"])
training_router = APIRouter(tags=["development"], route_class=JSONRoute)


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


class LoadAdapterRequest(RequestModel):
    """Which adapter requests may name from now on."""

    others = other_names({"is_3d_lora_weight": (False,)})

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)
    """A directory in the server's lora_directory; a relative path begins there."""
    load_inplace: bool = False
    """Whether the name may be an adapter's, which the new one then replaces."""


class UnloadAdapterRequest(RequestModel):
    """Which adapter requests may not name any more."""

    ignored = frozenset({"lora_int_id"})

    lora_name: str = Field(min_length=1)


@adapter_router.post("/v1/load_lora_adapter")
async def load_adapter(request: Request, body: LoadAdapterRequest) -> PlainTextResponse:
    """Read an adapter, and let requests name it as their model."""
    server = state_of(request)
    place = admit(request, 1)
    with naming_params(LoadAdapterRequest.model_fields, "lora_path"):
        run = partial(place.prepare, pool=server.loading)
        await server.adapters.load(body.lora_name, body.lora_path, run, in_place=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@adapter_router.post("/v1/unload_lora_adapter")
async def unload_adapter(request: Request, body: UnloadAdapterRequest) -> PlainTextResponse:
    """Let no request name an adapter any more; those that have it go on."""
    server = state_of(request)
    server.adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@sleep_router.post("/sleep")
async def sleep(request: Request, level: int = 1, mode: str = "abort") -> dict[str, Any]:
    """Give back the memory of weights and KV; requests in flight end, or are awaited."""
    with naming_params(("level", "mode"), "level"), while_connected(request):
        await controlled(request).llm.sleep(level, mode)
    return {"status": "sleeping", "level": level}


@sleep_router.post("/wake_up")
async def wake_up(
    request: Request, tags: Annotated[list[str] | None, Query()] = None
) -> dict[str, Any]:
    """Take back the memory of "weights", "kv_cache" or both."""
    with naming_params(("tags",), "tags"):
        is_awake = await controlled(request).llm.wake_up(tags)
    return {"status": "awake" if is_awake else "sleeping", "tags": tags}


@sleep_router.get("/is_sleeping")
async def is_sleeping(request: Request) -> dict[str, bool]:
    """Say whether the engine sleeps."""
    return {"is_sleeping": await state_of(request).llm.is_sleeping()}


@profile_router.post("/start_profile")
async def start_profile(request: Request) -> dict[str, str]:
    """Begin a profile in the directory `profile_dir`."""
    llm = controlled(request).llm
    await llm.start_profile()
    return {"profile_dir": llm.engine.config.profile_dir or ""}


@profile_router.post("/stop_profile")
async def stop_profile(request: Request) -> dict[str, list[str]]:
    """End the profile and return the paths of its files, on the server's machine."""
    return {"files": await controlled(request).llm.stop_profile()}


_PACKED = other_names({"packed": (False,)})


class TransferInfo(RequestModel):
    """Where a trainer, rank 0, has its store, and which rank the server has."""

    others = _PACKED

    master_address: str = Field(min_length=1)
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(default=1, ge=1)
    world_size: int = Field(default=2, ge=2)
    timeout: Annotated[float, Field(gt=0, le=86400)] = 300.0
    """Seconds to wait for the trainer, and for each tensor."""


class TransferRequest(RequestModel):
    init_info: TransferInfo


class UpdateInfo(RequestModel):
    """The tensors that the trainer broadcasts next, in this order."""

    others = _PACKED

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class UpdateRequest(RequestModel):
    update_info: UpdateInfo


class DiskRequest(RequestModel):
    """Which weights to read, in SGLang's form."""

    others = other_names(
        {"load_format": ("auto", "safetensors"), "flush_cache": (True,), "keep_pause": (False,)}
    )
    ignored = frozenset({"is_async", "torch_empty_cache", "recapture_cuda_graph", "token_step"})

    model_path: str = Field(min_length=1)
    """A directory on the server's machine."""
    weight_version: str | None = None
    abort_all_requests: bool = False


@training_router.post("/pause")
async def pause(
    request: Request,
    mode: str = "abort",
    clear_cache: bool = True,
    wait_for_inflight_requests: bool = False,
) -> dict[str, str]:
    """Compute nothing until /resume; requests in flight are aborted, awaited or kept. Those that
    come in the pause are refused, or kept as well.

    A client that leaves while they are awaited gives up the pause. Older clients ask to wait.
    """
    mode = "wait" if wait_for_inflight_requests else mode
    with naming_params(("mode",), "mode"), while_connected(request):
        server = controlled(request)
        await server.llm.pause_generation(mode=mode, clear_cache=clear_cache)
        server.refuses_in_pause = mode != "keep"
    return {"status": "paused"}


@training_router.post("/resume")
async def resume(request: Request) -> dict[str, str]:
    """Go on with the requests that were kept."""
    await controlled(request).llm.resume_generation()
    return {"status": "resumed"}


@training_router.get("/is_paused")
async def is_paused(request: Request) -> dict[str, bool]:
    """Say whether the engine is paused."""
    return {"is_paused": await state_of(request).llm.is_paused()}


@training_router.post("/reset_prefix_cache")
async def reset_prefix_cache(
    request: Request, reset_running_requests: bool = False, reset_external: bool = False
) -> dict[str, bool]:
    """Forget all cached prefixes, also those in lower tiers; not while requests hold blocks, unless
    they are to compute their KV anew.
    """
    del reset_external  # the tiers below the pool never stay
    llm = controlled(request).llm
    return {"success": await llm.reset_prefix_cache(reset_running_requests)}


@training_router.get("/server_info")
async def server_info(request: Request, config_format: str = "json") -> dict[str, Any]:
    """Tell a trainer what it must know of the engine, by vLLM's names."""
    del config_format  # JSON is the only one
    server = state_of(request)
    config = server.llm.engine.config
    dtype = config.dtype if server.arithmetic is None else server.arithmetic.dtype
    lora = {"max_lora_rank": config.max_lora_rank, "max_loras": config.max_loras}
    return {
        "vllm_config": {
            "model_config": {
                "model": config.model,
                "dtype": f"torch.{dtype}",
                "max_model_len": server.max_model_len,
                "quantization": config.quantization,
                "logprobs_mode": config.logprobs_mode,
            },
            "parallel_config": {
                "tensor_parallel_size": config.tensor_parallel_size,
                "data_parallel_size": 1,
            },
            "lora_config": lora if config.enable_lora else None,
            "weight_transfer_config": None,  # vLLM's engines for it are on GPUs
        }
    }


@training_router.get("/get_world_size")
async def get_world_size(request: Request, include_dp: bool = True) -> dict[str, int]:
    """Say how many processes of the server join a transfer: one, which serves all ranks."""
    del request, include_dp
    return {"world_size": 1}


@training_router.post("/init_weight_transfer_engine")
async def init_weight_transfer_engine(request: Request, body: TransferRequest) -> dict[str, str]:
    """Join a trainer; leave the one of before, and give up its update."""
    info = body.init_info
    if info.rank_offset >= info.world_size:
        raise APIError(
            400,
            f"rank_offset {info.rank_offset} must be below world_size, {info.world_size}",
            param="init_info.rank_offset",
        )
    await controlled(request).transfer.join(
        info.master_address, info.master_port, info.rank_offset, info.world_size, info.timeout
    )
    return {"message": "Weight transfer initialized"}


@training_router.post("/shutdown_weight_transfer_engine")
async def shutdown_weight_transfer_engine(request: Request) -> dict[str, str]:
    """Leave the trainer."""
    await controlled(request).transfer.leave()
    return {"message": "Weight transfer shut down"}


@training_router.post("/start_weight_update")
async def start_weight_update(request: Request) -> dict[str, str]:
    """Begin an update. Requests in flight end, unless the engine is paused."""
    server = controlled(request)
    given = await _optional_body(request)
    if given.pop("is_checkpoint_format", True) is not True or given:
        raise APIError(400, "start_weight_update takes is_checkpoint_format=true, or no body")
    await server.llm.start_weight_update()
    return {"message": "Weight update started"}


@training_router.post("/update_weights")
async def update_weights(request: Request, body: UpdateRequest) -> dict[str, str]:
    """Receive tensors of the update that has begun."""
    info = body.update_info
    fields = {name: f"update_info.{name}" for name in UpdateInfo.model_fields}
    with naming_params((), "update_info", fields):
        await controlled(request).transfer.receive(info.names, info.dtype_names, info.shapes)
    return {"message": "Weights updated"}


@training_router.post("/update_weights_from_disk")
async def update_weights_from_disk(request: Request, body: DiskRequest) -> dict[str, Any]:
    """Read new weights from a directory. Requests in flight are aborted, or finish first; those of
    a paused engine are kept.
    """
    mode = "abort" if body.abort_all_requests else "wait"
    with naming_params(DiskRequest.model_fields, "model_path"):
        llm = controlled(request).llm
        await llm.update_weights(body.model_path, weight_version=body.weight_version, mode=mode)
    return {"success": True, "message": "Weights updated"}


@training_router.post("/finish_weight_update")
async def finish_weight_update(request: Request) -> dict[str, str]:
    """End the update; `weight_version` in the body, if there is one, names the new weights."""
    server = controlled(request)
    given = await _optional_body(request)
    version = given.pop("weight_version", None)
    if given:
        raise APIError(400, f"there is no field {shown(next(iter(given)))}: only weight_version")
    await server.llm.finish_weight_update(version)
    return {"message": "Weight update finished"}


@training_router.get("/weight_info")
async def weight_info(request: Request) -> dict[str, Any]:
    """Return the version of the weights: 0 as they were loaded."""
    return {"weight_version": state_of(request).llm.engine.output_processor.weight_version}


async def _optional_body(request: Request) -> dict[str, Any]:
    """Return the object in a body that may be missing, whatever its Content-Type says."""
    given = parse(await request.body() or b"{}")
    if not isinstance(given, dict):
        raise APIError(400, f"the body should be an object, got {shown(given)}")
    return given
