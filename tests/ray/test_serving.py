"""The options of a deployment: whose each one is, and what is refused. Nothing is started."""

from typing import Any

import pytest

pytest.importorskip("ray")
pytest.importorskip("fastapi")

from ray import serve

import nanovllm.apps.ray
from nanovllm import demo_model
from nanovllm.apps.ray import app, deployment
from nanovllm.apps.ray.replica import check_gpus
from nanovllm.apps.server.server_options import ServerOptions
from nanovllm.errors import ConfigError


def engine_of(application: serve.Application) -> Any:
    """Return the application that the frontends get: that of the engines."""
    return application._bound_deployment.init_args[0]


def test_each_option_goes_to_its_owner() -> None:
    found = deployment(
        "a-model",
        num_frontends=3,
        max_num_seqs=8,
        served_model_name="other",
        cors_origins=["*"],
        ray_actor_options={"num_cpus": 4},
        health_check_period_s=3,
    )
    frontends, engines = found._bound_deployment, engine_of(found)._bound_deployment
    options, server = engines.init_args
    assert options == {"max_num_seqs": 8, "num_threads": 4, "model": "a-model"}
    assert server.served_model_name == "other"
    assert (server.cors_origins, frontends.init_args[1].cors_origins) == ((), ("*",))
    assert (engines.num_replicas, frontends.num_replicas) == (1, 3)
    assert (engines.max_ongoing_requests, engines.max_queued_requests) == (16, 2048)
    assert frontends.max_ongoing_requests == ServerOptions().max_connections
    assert engines.ray_actor_options["num_cpus"] == 4


def test_autoscaling_aims_at_requests() -> None:
    bounds = {"min_replicas": 2, "max_replicas": 9}
    scaling = engine_of(deployment("m", autoscaling_config=bounds))._bound_deployment
    found = scaling._deployment_config.autoscaling_config
    assert (found.min_replicas, found.max_replicas, found.target_ongoing_requests) == (2, 9, 32)
    scaling = engine_of(deployment("m", num_replicas="auto"))._bound_deployment
    assert scaling._deployment_config.autoscaling_config.max_replicas == 100


def test_an_engine_on_gpus_gets_them() -> None:
    for given, expected in (({}, 2), ({"ray_actor_options": {"num_gpus": 0.5}}, 0.5)):
        found = deployment("m", device="cuda", tensor_parallel_size=2, **given)
        assert engine_of(found)._bound_deployment.ray_actor_options["num_gpus"] == expected
    bundles = [{"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}]
    found = deployment("m", placement_group_bundles=bundles, placement_group_strategy="SPREAD")
    config = engine_of(found)._bound_deployment._replica_config
    assert config.placement_group_bundles == bundles
    check_gpus({}, 1, 8)
    check_gpus({}, 0, 0)
    check_gpus({"device": "cpu"}, 0, 8)
    with pytest.raises(ConfigError, match=r'8 GPUs .* give ray_actor_options=\{"num_gpus": 1\}'):
        check_gpus({}, 0, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_replica": 2}, "has no option 'num_replica'; did you mean 'num_replicas'"),
        ({"lora_directory": "/a"}, "lora_directory='/a' cannot be set here: a client reaches one"),
        ({"lora_modules": ["a=/a"]}, "lora_modules=.* but enable_lora is False"),
        ({"port": 80}, "port=80 cannot be set here: the port is Ray Serve's"),
        ({"max_model_len": 0}, "max_model_len must be an integer from 1"),
        ({"max_waiting": 0}, "max_waiting must be an integer >= 1"),
        ({"num_frontends": 0}, "num_frontends must be an integer >= 1"),
        ({"num_replicas": -2}, "Ray Serve refuses"),
        ({"num_replicas": 2, "autoscaling_config": {"max_replicas": 3}}, "give one"),
        ({"autoscaling_config": [1, 2]}, "must be a dictionary"),
        ({"autoscaling_config": {"max_replica": 2}}, "did you mean 'max_replicas'"),
        ({"ray_actor_options": 3}, "ray_actor_options must be a dictionary"),
        ({"tool_call_parser": "no"}, "tool_call_parser"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        deployment(demo_model.MODEL, **options)


def test_the_builder_for_yaml_files() -> None:
    assert isinstance(app({"model": "m", "num_replicas": 2}), serve.Application)
    with pytest.raises(ConfigError, match="args must name a model"):
        app({})
    with pytest.raises(AttributeError, match="no attribute 'deploy'"):
        _ = nanovllm.apps.ray.deploy
