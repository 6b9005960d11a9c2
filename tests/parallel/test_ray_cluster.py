"""Which Ray cluster is joined, where there is none. tests/ray has one."""

import os
import socket
import sys

import pytest

from nanovllm import LLM, demo_model
from nanovllm.errors import ConfigError
from nanovllm.options.config import Config

ray = pytest.importorskip("ray")


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[ray\]'"):
        LLM(demo_model.MODEL, distributed_executor_backend="ray")


def test_a_cluster_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: Ray tries for a minute, then ends the process."""
    from nanovllm.parallel.ray_cluster import join_cluster

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    with pytest.raises(ConfigError, match=rf"the address 127.0.0.1:{port}: no Ray cluster can"):
        join_cluster()
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:10001")
    with pytest.raises(ConfigError, match=f"the address 127.0.0.1:{port}: no Ray cluster can"):
        join_cluster(address=f"127.0.0.1:{port}")  # comes before the environment
    with pytest.raises(ConfigError, match="Ray's client .ray://. is not supported"):
        join_cluster()
    assert not ray.is_initialized()


def test_paths_mean_the_same_on_other_nodes() -> None:
    from nanovllm.parallel.ray_ranks import _for_other_nodes

    config = Config("model", kv_cache_dir="cache", distributed_executor_backend="ray")
    assert _for_other_nodes(config).kv_cache_dir == os.path.abspath("cache")
