"""One Ray cluster of two nodes in this machine, for all tests of this folder.

pytest-xdist gives the whole folder to one worker: see `pytest_xdist_make_scheduler` in
tests/conftest.py. The cluster ends with the folder's last test, so that no later test shares the
cores and memory with it.
"""

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT

if importlib.util.find_spec("ray") is None:
    collect_ignore_glob = ["*"]

NUM_NODES = 2
NODE: dict[str, Any] = {"num_cpus": 3, "object_store_memory": 80 * 2**20}
"""What each node says it has; 80 MiB is near the least that Ray takes."""

_running: list[Any] = []
"""The cluster and its directory, while it runs."""


@pytest.fixture
def ray_cluster() -> Any:
    """The `ray.cluster_utils.Cluster`: two nodes of three CPUs; this process is connected.

    Other processes connect by RAY_ADDRESS=cluster.address. A test that kills a node adds it itself,
    with `cluster.add_node(**NODE)`, so that two stay. Ray's workers import this tree's package.
    """
    if not _running:
        _start()
    return _running[0]


@pytest.fixture(scope="session", autouse=True)
def _ended_at_last() -> Iterator[None]:
    yield
    _stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    try:
        return (yield)
    finally:
        if nextitem is not None and Path(__file__).parent not in nextitem.path.parents:
            _stop()


def _start() -> None:
    import ray
    from ray.cluster_utils import Cluster

    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Each takes two seconds to start.
    os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112
    # Ray writes the address there whatever temp_dir is, and makes no directory for it.
    Path(ray._private.utils.get_ray_address_file(None)).parent.mkdir(parents=True, exist_ok=True)
    directory = tempfile.mkdtemp(prefix="ray")  # short: the path of a Unix socket has a limit
    head = {**NODE, "include_dashboard": False, "temp_dir": directory}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    _running.extend((cluster, directory))
    for _ in range(NUM_NODES - 1):
        cluster.add_node(wait=False, **NODE)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)


def _stop() -> None:
    if not _running:
        return
    import ray

    cluster, directory = _running
    _running.clear()
    ray.shutdown()
    cluster.shutdown()
    shutil.rmtree(directory, ignore_errors=True)
