"""Ranks that Ray places: an actor each, in a placement group, on one node or on several.

Ray decides where a rank runs, and reports its death. Messages use our own connections, which cost a
step less than actor calls.
"""

import contextlib
import dataclasses
import logging
import os
import secrets
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nanovllm.errors import ConfigError, EngineDeadError
from nanovllm.loading.files import local_path
from nanovllm.options.config import Config
from nanovllm.parallel.links import connect
from nanovllm.parallel.rank_process import RankJob
from nanovllm.parallel.rank_setup import num_threads
from nanovllm.parallel.ray_actor import ActorPlace, RankActor, found_files, versions
from nanovllm.parallel.ray_cluster import join_cluster, wait_for_room
from nanovllm.utils.process import call_in_forked
from nanovllm.worker.model_loader import NetworkSpec

_START_SECONDS = 300.0
"""How long actors may take to start: a node may read Python's packages from a slow network."""
_CONNECT_SECONDS = 30.0
_EXIT_SECONDS = 5.0
"""How long `end` waits for the ranks to end before it kills them, and then for their processes."""
_ALIVE_SECONDS = 1.0  # how often a long wait asks Ray for the actors


class RayRanks:
    """tensor_parallel_size actors. This process joins no process group.

    Each actor has two connections: one for messages, and a *lifeline* without any, which ends when
    the process or its machine does.
    """

    def __init__(self, target: NetworkSpec, draft: NetworkSpec | None = None) -> None:
        config = target.config
        self.size = config.tensor_parallel_size
        self.places: list[ActorPlace] = []
        self._config = _for_other_nodes(config)
        self._found = [found_files(network) for network in (target, draft) if network is not None]
        self._num_threads = num_threads(config)
        self._job: str | None = None  # Ray's name of this process in that cluster
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []
        self._runs: list[Any] = []  # what an actor's `run` will return: ready when it has ended
        self._messages: list[Connection] = []
        self._lifelines: list[Connection] = []
        call_in_forked(self._close_all)

    def _close_all(self) -> None:
        for connection in (*self._messages, *self._lifelines):
            connection.close()

    def start(self) -> None:
        join_cluster(self.size * self._num_threads)
        self._job = ray.get_runtime_context().get_job_id()
        bundle = self._bundle()
        self._group = placement_group([bundle] * self.size, strategy="PACK")
        wait_for_room(self._group, bundle, self.size)
        actor_class = ray.remote(RankActor)
        for rank in range(self.size):
            actor = actor_class.options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, rank),
            )
            self._actors.append(actor.remote())
        try:
            opened = [actor.open.remote(rank) for rank, actor in enumerate(self._actors)]
            self.places = ray.get(opened, timeout=_START_SECONDS)
        except RayError as error:
            raise EngineDeadError(f"Ray could not start the ranks: {_first_line(error)}") from error
        for place in self.places:
            if place.versions != versions():
                raise ConfigError(
                    f"{place} has {place.versions}, but this process has {versions()}; install the "
                    "same on all nodes"
                )
        self._run()

    def _run(self) -> None:
        key = secrets.token_bytes(32)
        store_at = (self.places[0].address, self.places[0].store_port)
        level = logging.getLogger("nanovllm").getEffectiveLevel()
        for rank, (actor, place) in enumerate(zip(self._actors, self.places, strict=True)):
            job = RankJob(rank, self.size, store_at, place.address, self._num_threads, level)
            self._runs.append(actor.run.remote(job, self._config, self._found, key, str(place)))
        try:
            for place in self.places:
                for connections in (self._messages, self._lifelines):
                    made = connect(place.address, place.port, key, _CONNECT_SECONDS)
                    connections.append(made)
        except (AuthenticationError, EOFError, OSError) as error:
            raise EngineDeadError(
                f"{place} cannot be reached at port {place.port} ({error}); do all nodes and this "
                "process see each other, and may they open ports?"
            ) from error

    def _bundle(self) -> dict[str, float]:
        """Return what a rank needs of a node: a GPU, or the cores of its threads."""
        device = self._config.device
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        if device == "cuda" or (device == "auto" and has_gpus):
            self._config = dataclasses.replace(self._config, device="cuda")
            return {"GPU": 1.0}
        if device == "auto":
            self._config = dataclasses.replace(self._config, device="cpu")
        return {"CPU": float(self._num_threads)}

    def send(self, rank: int, message: memoryview) -> None:
        self._messages[rank].send_bytes(message)

    def wait(self) -> list[int]:
        while True:
            ready = wait([*self._messages, *self._lifelines], timeout=_ALIVE_SECONDS)
            if ready or not self.alive():
                return [rank for rank, way in enumerate(self._messages) if way in ready]

    def receive(self, rank: int) -> Any:
        return self._messages[rank].recv()

    def alive(self) -> bool:
        return not wait(self._lifelines, timeout=0) and not (
            self._in_cluster() and ray.wait(self._runs, timeout=0)[0]
        )

    def endings(self) -> list[str]:
        ended = wait(self._lifelines, timeout=2.0)
        return [
            f"nanovllm-rank{rank}, process {place.pid} on {place}, was lost{self._cause(rank)}"
            for rank, (place, lifeline) in enumerate(
                zip(self.places, self._lifelines, strict=False)
            )
            if lifeline in ended
        ]

    def _cause(self, rank: int) -> str:
        """Return what Ray says of a rank that has ended, if it knows within a second."""
        if not self._in_cluster():
            return ""
        try:
            ray.get(self._runs[rank], timeout=1.0)
        except GetTimeoutError:
            return ""
        except RayError as error:
            return f": {_first_line(error)}"
        return ""

    def end(self, *, at_once: bool = False) -> None:
        actors = self._actors
        runs = self._runs
        group = self._group
        messages = self._messages
        lifelines = self._lifelines
        self._actors = []
        self._runs = []
        self._group = None
        self._messages = []
        self._lifelines = []
        with contextlib.ExitStack() as last:  # in the opposite order; all, if one is interrupted
            for lifeline in lifelines:
                last.callback(lifeline.close)
            if self._in_cluster():
                last.callback(_wait_for_all, lifelines)
                if group is not None:
                    last.callback(remove_placement_group, group)
                for actor in actors:
                    last.callback(ray.kill, actor)
                if messages and not at_once:
                    last.callback(ray.wait, runs, num_returns=len(runs), timeout=_EXIT_SECONDS)
            for way in messages:
                last.callback(way.close)  # a rank that waits for a message reads end-of-file

    def _in_cluster(self) -> bool:
        """Return whether this process is still in the cluster of the ranks.

        Hazard: most of Ray's functions start a cluster where there is none.
        """
        return (
            self._job is not None
            and ray.is_initialized()
            and ray.get_runtime_context().get_job_id() == self._job
        )


def _wait_for_all(lifelines: list[Connection]) -> None:
    """Wait until the processes at the other ends are gone, for some seconds."""
    left = list(lifelines)
    deadline = time.monotonic() + _EXIT_SECONDS
    while left and (ended := wait(left, timeout=max(0.0, deadline - time.monotonic()))):
        left = [lifeline for lifeline in left if lifeline not in ended]


def _for_other_nodes(config: Config) -> Config:
    """Return `config` as ranks need it: no tokenizer, and paths that mean the same anywhere."""
    spec = config.speculation
    if spec is not None and spec.model is not None:
        spec = dataclasses.replace(spec, model=_absolute(spec.model))
    return dataclasses.replace(
        config,
        model=_absolute(config.model),
        speculative_config=spec,
        download_dir=config.download_dir and os.path.abspath(config.download_dir),
        kv_cache_dir=config.kv_cache_dir and str(Path(config.kv_cache_dir).expanduser().absolute()),
        tokenizer=None,
        skip_tokenizer_init=True,
        generation_config="vllm",
    )


def _absolute(model: str) -> str:
    path = local_path(model)
    return str(path.absolute()) if path.exists() else model


def _first_line(error: Exception) -> str:
    """Return what Ray says, without the traces and hints that follow."""
    return str(error).strip().partition("\n")[0]
