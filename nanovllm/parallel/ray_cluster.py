"""The Ray cluster that this process joined or started, and the room in it."""

import concurrent.futures
import logging
import os
import socket
import threading
import time
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from nanovllm.errors import ConfigError

logger = logging.getLogger(__name__)

_ROOM_SECONDS = 300.0  # how long to wait for room; an autoscaler takes minutes to add a machine
_KNOCK_SECONDS = 5.0
_SILENT_SECONDS = 3.0  # how much of this to wait before the log tells of it


def join_cluster(num_cpus: int = 0, address: str | None = None, **options: Any) -> None:
    """Connect this process to a Ray cluster, unless it is already.

    That is the one at `address`, or that of RAY_ADDRESS, or the one that `ray start` began on
    this machine. If there is none, or the address is "local", a cluster of this machine alone is
    started, which ends with this process.

    Args:
        num_cpus: how many cores such a cluster says it has at least.
        options: more of `ray.init`.

    Raises:
        ConfigError: the cluster does not answer, or Ray's client is used.
    """
    given = os.environ.get("RAY_ADDRESS", "") if address is None else address
    address = "" if ray.is_initialized() else given
    if address.startswith("ray://") or ray.util.client.ray.is_connected():
        raise ConfigError(
            "Ray's client (ray://) is not supported: run this program on a node of the cluster, "
            "such as by `ray job submit`"
        )
    if address and address != "local":
        _join(address, options)
    elif not ray.is_initialized():
        _join_or_start(num_cpus, {**options, "address": address or None})


def _join_or_start(num_cpus: int, options: dict[str, Any]) -> None:
    cores = {"num_cpus": num_cpus} if num_cpus > (os.cpu_count() or 1) else {}
    try:
        # No resources of names of our own: an option that only a new cluster takes.
        _in_lasting_thread(**{**options, "include_dashboard": False, "resources": {}, **cores})
    except ValueError:  # a cluster runs here
        _join(None, options)
    else:
        logger.info("no Ray cluster found: started one on this machine, for this process")


def _join(address: str | None, options: dict[str, Any]) -> None:
    try:
        if address is not None and address.rpartition(":")[2].isdigit():
            host, _, port = address.rpartition(":")  # else Ray tries for a minute, then exits
            at = (host.strip("[]"), int(port))
            socket.create_connection(at, timeout=_KNOCK_SECONDS).close()
        ray.init(**{**options, "address": address})
    except (OSError, RuntimeError, ValueError) as error:
        where = f"the address {address}" if address else "what `ray start` began here"
        raise ConfigError(
            f"{where}: no Ray cluster can be joined there: {error}; correct the address or "
            "RAY_ADDRESS, or leave both out, or use `ray stop`"
        ) from error


def _in_lasting_thread(**options: Any) -> None:
    """Call `ray.init` in the main thread, or else in one that never ends.

    Hazard: Linux ends Ray's processes with the thread that started them.
    """
    if threading.current_thread() is threading.main_thread():
        ray.init(**options)
        return
    made: concurrent.futures.Future[None] = concurrent.futures.Future()

    def start() -> None:
        try:
            ray.init(**options)
        except BaseException as error:
            made.set_exception(error)
        else:
            made.set_result(None)
            threading.Event().wait()

    threading.Thread(target=start, name="ray", daemon=True).start()
    made.result()


def wait_for_room(group: PlacementGroup, bundle: dict[str, float], size: int) -> None:
    """Wait until the cluster has reserved `size` times the resources `bundle` for `group`.

    Raises:
        ConfigError: it had no room for minutes.
    """
    needed = f"{size} times {amounts(bundle)}, each on one node"
    deadline = time.monotonic() + _ROOM_SECONDS
    if group.wait(min(_SILENT_SECONDS, _ROOM_SECONDS)):
        return
    logger.warning("waiting for room in the Ray cluster: %s; %s", needed, free_room(bundle))
    if not group.wait(max(0.0, deadline - time.monotonic())):
        raise ConfigError(
            f"the Ray cluster has no room for {needed}: {free_room(bundle)}; ask for less, by "
            "tensor_parallel_size or num_threads, or add nodes"
        )


def free_room(bundle: dict[str, float]) -> str:
    """Say how much of these resources is free in the cluster, for a message."""
    free = ray.available_resources()
    total = ray.cluster_resources()
    parts = [f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in bundle]
    return f"{', '.join(parts)} are free on {len(ray.nodes())} nodes"


def amounts(bundle: dict[str, float]) -> str:
    """Return the resources as a text, such as "1 CPU and 2 GPU"."""
    return " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())
