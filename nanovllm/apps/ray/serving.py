"""`nanovllm.apps.ray.deployment`: a model as a Ray Serve application.

Checks the options and joins the two deployments: frontends that take HTTP requests, and replicas
with an engine each. Starts nothing.
"""

import dataclasses
import inspect
from collections.abc import Collection
from typing import Any, NamedTuple

from ray import serve
from ray.serve.config import AutoscalingConfig

from nanovllm.apps.ray.affinity import AffinityRouter
from nanovllm.apps.ray.frontend import Frontend
from nanovllm.apps.ray.replica import EngineReplica
from nanovllm.apps.server.server_options import ServerOptions, check_options, keys_of_environment
from nanovllm.errors import ConfigError
from nanovllm.options.config import Config
from nanovllm.options.other_names import OTHER_NAMES, find_other
from nanovllm.options.validation import check_int, check_names, did_you_mean, shown

_NOT_HERE = {
    "lora_directory": "a client reaches one replica, and all must have its adapter: lora_modules",
    "name": "the name is the application's: name of serve.run, or in its YAML",
    "route_prefix": "the path is the application's: route_prefix of serve.run, or in its YAML",
    "port": "the port is Ray Serve's: http_options, or serve.start",
    "uds": "Ray Serve's proxies listen: http_options, or serve.start",
    "root_path": "the path is the application's: route_prefix of serve.run, or in its YAML",
}
"""Options that belong to the application, and not to its deployments."""
_OF_SERVE = inspect.signature(serve.deployment).parameters.keys() - {
    *("_func_or_class", "name", "version", "user_config", "request_router_config")
}
"""Options of Ray Serve that the replicas may be given."""
_TARGET_REQUESTS = 32
"""Requests per replica that autoscaling aims for; more slow down each answer on most devices."""
_MOST_REPLICAS = 100
"""With num_replicas="auto", as Ray Serve's own."""
_START_ATTEMPTS = 3
"""Replicas that may fail to start before the application does."""
_SHUTDOWN_WAIT_SECONDS = 1.0
"""For frontends to learn that a replica gets no more requests."""


def deployment(model: str, *, num_frontends: int = 1, **options: Any) -> serve.Application:
    """Return a Ray Serve application that answers OpenAI's API with replicas of one model.

    `serve.run(deployment("Qwen/Qwen3-0.6B"))` starts it. Turns of one conversation go to one
    replica, whose prefix cache has the turns before: see `affinity.conversation_key`.

    Args:
        model: a hub id, or a path that every node has.
        num_frontends: how many processes take HTTP requests and pass them on to replicas.
        options: the fields of `Config` and of `ServerOptions`, and the arguments of
            `serve.deployment` for the replicas, such as num_replicas, autoscaling_config,
            ray_actor_options and placement_group_bundles. Defaults that differ from Ray Serve's:
            max_ongoing_requests is twice `max_num_seqs`, so that the next requests are there when
            some end; max_queued_requests is `max_waiting`, and further requests get status 503;
            autoscaling aims at 32 requests a replica; a replica may take `drain_seconds` to end.

    Raises:
        ConfigError: an option is unknown, of the wrong type or out of range.
    """
    check_int(ConfigError, "num_frontends", num_frontends, 1)
    given = _split(options)
    config = Config(model=model, **given.engine)
    check_options(given.server, config)
    common: dict[str, Any] = {
        "graceful_shutdown_timeout_s": given.server.drain_seconds,
        "graceful_shutdown_wait_loop_s": _SHUTDOWN_WAIT_SECONDS,
        "max_constructor_retry_count": _START_ATTEMPTS,
    }
    of_engines = common | {
        "max_ongoing_requests": 2 * config.max_num_seqs,
        "max_queued_requests": given.server.max_waiting,
        "request_router_config": {"request_router_class": AffinityRouter},
        **given.serve,
        **_replicas(given.serve),
        "ray_actor_options": _resources(config, given),
    }
    of_frontends = common | {
        "num_replicas": num_frontends,
        "max_ongoing_requests": given.server.max_connections,
    }
    try:
        engines = serve.deployment(**of_engines)(EngineReplica)
        frontends = serve.deployment(**of_frontends)(serve.ingress()(Frontend))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"Ray Serve refuses an option of the deployment: {error}") from error
    in_replica = dataclasses.replace(given.server, cors_origins=())  # the frontends send those
    engine_options = {**given.engine, **_threads(given), "model": config.model}
    return frontends.bind(engines.bind(engine_options, in_replica), given.server)


def app(args: dict[str, Any]) -> serve.Application:
    """Return `deployment(**args)`: the `import_path` of a YAML file is nanovllm.apps.ray:app.

    Raises:
        ConfigError: as `deployment`; or there is no model.
    """
    if "model" not in args:
        raise ConfigError('args must name a model, such as {"model": "Qwen/Qwen3-0.6B"}')
    return deployment(**args)


class _Given(NamedTuple):
    """What was given, by whose option it is."""

    server: ServerOptions
    engine: dict[str, Any]
    serve: dict[str, Any]


def _split(options: dict[str, Any]) -> _Given:
    """Return the options by owner; those of the server are checked.

    Raises:
        ConfigError: an option is unknown, or the server's is invalid.
    """
    of_server = {field.name for field in dataclasses.fields(ServerOptions)}
    known = {field.name for field in dataclasses.fields(Config)} | of_server | _OF_SERVE
    for name, value in options.items():
        if name in _NOT_HERE:
            raise ConfigError(f"{name}={shown(value)} cannot be set here: {_NOT_HERE[name]}")
        if name not in known and find_other(OTHER_NAMES["Config"], name) is None:
            raise ConfigError(f"deployment has no option {shown(name)}{did_you_mean(name, known)}")

    def part(names: Collection[str]) -> dict[str, Any]:
        return {name: value for name, value in options.items() if name in names}

    given = part(of_server)
    given["api_keys"] = (*given.get("api_keys", ()), *keys_of_environment())
    return _Given(
        ServerOptions(**given), part(options.keys() - of_server - _OF_SERVE), part(_OF_SERVE)
    )


def _replicas(given: dict[str, Any]) -> dict[str, Any]:
    """Return Ray Serve's options of the number of replicas."""
    number = given.get("num_replicas")
    scaling = given.get("autoscaling_config")
    if number == "auto" and scaling is None:
        scaling = {"min_replicas": 1, "max_replicas": _MOST_REPLICAS}
    if scaling is None:
        return {"num_replicas": 1 if number is None else number}
    if number not in (None, "auto"):
        raise ConfigError(
            f"num_replicas={shown(number)} and autoscaling_config both say how many replicas there "
            "are; give one"
        )
    scaling = check_names(ConfigError, "autoscaling_config", scaling)
    for name in scaling.keys() - AutoscalingConfig.model_fields.keys():
        hint = did_you_mean(name, AutoscalingConfig.model_fields)
        raise ConfigError(f"autoscaling_config has no field {shown(name)}{hint}")
    scaling = {"target_ongoing_requests": _TARGET_REQUESTS, **scaling}
    return {"autoscaling_config": scaling, "num_replicas": None}


def _resources(config: Config, given: _Given) -> dict[str, Any]:
    """Return Ray's options of a replica's actor: with GPUs if its engine is to run on them."""
    resources = given.serve.get("ray_actor_options") or {}
    resources = check_names(ConfigError, "ray_actor_options", resources)
    by_ray = given.engine.get("distributed_executor_backend") == "ray"  # its ranks have the GPUs
    if config.device.startswith("cuda") and not by_ray:
        resources.setdefault("num_gpus", config.tensor_parallel_size)
    return resources


def _threads(given: _Given) -> dict[str, Any]:
    """Return the number of an engine's CPU threads: that of its CPUs in Ray, if it is given."""
    num_cpus = (given.serve.get("ray_actor_options") or {}).get("num_cpus")
    if num_cpus is None or "num_threads" in given.engine:
        return {}
    return {"num_threads": max(1, int(num_cpus))}
