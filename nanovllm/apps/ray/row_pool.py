"""Actors of Ray that answer the rows of a batch. One that dies is replaced; others do its rows.

An actor has an engine and keeps nothing: the driver alone writes what is finished.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from typing import Any

import ray
from ray.exceptions import (
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

from nanovllm.apps.batch.batch_options import RowOptions
from nanovllm.apps.batch.row_engine import RowEngine
from nanovllm.apps.batch.rows import DIED, InputRow, failed_line
from nanovllm.errors import ConfigError, EngineDeadError
from nanovllm.options.validation import shown
from nanovllm.parallel.ray_cluster import amounts, free_room, join_cluster

logger = logging.getLogger(__name__)

_MAX_DEATHS_ALONE = 2
"""A row gets an error after this many deaths of a worker that had no other row."""
_MAX_FRUITLESS_DEATHS = 12
"""The batch ends after this many deaths per worker without a finished row."""
_GONE = (RayActorError, ObjectLostError, OutOfMemoryError, WorkerCrashedError)
"""What a call raises if its actor, or the node with its result, is gone. Ray itself kills actors of
a node without memory."""
_OWN_OPTIONS = {"max_concurrency": 2**16, "max_restarts": 0}
"""Of an actor: it takes as many calls as it is given, and the pool replaces it."""
_SILENT_SECONDS = 30.0
"""How long no worker may have a place in the cluster before the log says so."""
_ROOM_SECONDS = 300.0
"""How long until the batch ends; an autoscaler takes minutes to add a machine."""


class RowActor:
    """An engine in an actor. It is made by `start`, so that its errors reach the driver."""

    def __init__(self, options: RowOptions) -> None:
        self._options = options
        self._engine: RowEngine | None = None

    async def start(self) -> int:
        """Make the engine; return how many rows to give it at once. Raises NanoVLLMError."""
        self._engine = RowEngine(self._options)
        return self._engine.capacity

    async def answer(self, row: InputRow) -> bytes:
        """Return the output of a row as a line of JSON. Raises EngineDeadError."""
        assert self._engine is not None
        return await self._engine.answer(row)


class _Worker:
    """An actor and what it has to do."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.has_place = False
        """Whether its process runs."""
        self.capacity = 0
        """0 until its engine is ready, and when it is gone."""
        self.deaths: Counter[int] = Counter()
        """Its rows, by the deaths that they have seen."""

    @property
    def num_rows(self) -> int:
        """How many rows it has."""
        return self.deaths.total()

    def has_room(self, deaths: int) -> bool:
        """Whether it takes a row that has seen so many deaths."""
        most = max([deaths, *(seen for seen, number in self.deaths.items() if number)])
        return self.num_rows < self.limit(most)

    def limit(self, deaths: int) -> int:
        """Return how many rows it may have, if one of them has seen so many deaths.

        A quarter with each death. So the row that kills its engine is soon alone, and the others
        are done.
        """
        return max(min(self.capacity, 1), self.capacity >> 2 * deaths)


class RayPool:
    """A batch's workers, as actors in the cluster that its options name: see `join_cluster`.

    Raises:
        ConfigError: there is no cluster at the address, or Ray refuses `worker_options`.
    """

    def __init__(self, options: RowOptions) -> None:
        self._options = options
        self._starts_ray = not ray.is_initialized()
        batch = options.batch
        join_cluster(
            batch.workers, batch.ray_address, log_to_driver=False, logging_level=logging.WARNING
        )
        self._actor_options = dict(batch.worker_options or _actor_resources(options))
        self._actor_class = self._make_class()
        self._workers: set[_Worker] = set()
        self._starting: set[asyncio.Task[None]] = set()
        self._num_deaths = 0  # since a row was finished
        self._waiting: Counter[int] = Counter()  # rows without a worker, by deaths seen
        self._failure: BaseException | None = None
        self._changed = asyncio.Condition()

    @property
    def capacity(self) -> int:
        """How many rows to have in it at once."""
        return max(1, sum(worker.capacity for worker in self._workers))

    async def start(self) -> None:
        """Make the actors; wait for the first one. Raises NanoVLLMError."""
        for _ in range(self._options.batch.workers):
            self._add_worker()
        await self._free_worker()

    async def answer(self, row: InputRow) -> bytes:
        """Return the output of a row as a line of JSON.

        Raises:
            NanoVLLMError: engines cannot be made, or die again and again.
        """
        deaths = deaths_alone = 0
        while deaths_alone < _MAX_DEATHS_ALONE:
            worker = await self._free_worker(deaths)
            limit = worker.limit(deaths)
            worker.deaths[deaths] += 1
            seen = deaths
            try:
                output: bytes = await worker.actor.answer.remote(row)
            except RayTaskError as error:
                raise _cause(error) from None
            except _GONE as error:
                self._replace(worker, error)
                deaths += 1
                deaths_alone += limit == 1
            else:
                self._num_deaths = 0
                return output
            finally:
                worker.deaths[seen] -= 1
                await self._tell()
        return failed_line(row, DIED)

    def close(self) -> None:
        """End the actors, and Ray if it was started here."""
        for task in self._starting:
            task.cancel()
        for worker in self._workers:
            with contextlib.suppress(Exception):  # the cluster may be gone
                ray.kill(worker.actor)
        self._workers.clear()
        if self._starts_ray:
            ray.shutdown()

    async def _free_worker(self, deaths: int = 0) -> _Worker:
        """Return the worker with the most room for a row; wait until one has some.

        Args:
            deaths: how many the row has seen. Those that have seen more go first.
        """
        async with self._changed:
            self._waiting[deaths] += 1
            try:
                while True:
                    if self._failure is not None:
                        raise self._failure
                    is_first = deaths == max(seen for seen, n in self._waiting.items() if n)
                    free = [worker for worker in self._workers if worker.has_room(deaths)]
                    if is_first and free:
                        return min(free, key=lambda worker: worker.num_rows / worker.capacity)
                    await self._changed.wait()
            finally:
                self._waiting[deaths] -= 1
                self._changed.notify_all()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _add_worker(self) -> None:
        worker = _Worker(self._actor_class.remote(self._options))
        self._workers.add(worker)
        task = asyncio.create_task(self._start(worker))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start(self, worker: _Worker) -> None:
        try:
            await self._wait_for_place(worker)
            worker.capacity = await worker.actor.start.remote()
        except RayTaskError as error:
            self._failure = _cause(error)
        except _GONE as error:
            self._replace(worker, error)
        except Exception as error:
            self._failure = error
        await self._tell()

    async def _wait_for_place(self, worker: _Worker) -> None:
        """Wait until a worker's process runs.

        Raises:
            ConfigError: the cluster had no room for a worker for minutes.
        """
        place = asyncio.wrap_future(worker.actor.__ray_ready__.remote().future())
        needed = {"CPU": self._actor_options.get("num_cpus") or 0.0}
        needed |= {"GPU": self._actor_options.get("num_gpus") or 0.0}
        needed |= self._actor_options.get("resources") or {}
        needed = {name: amount for name, amount in needed.items() if amount}
        for seconds in (_SILENT_SECONDS, _ROOM_SECONDS):
            done, _ = await asyncio.wait([place], timeout=seconds)
            if done or any(other.has_place for other in self._workers):
                break
            problem = (
                f"the Ray cluster has no room for a worker, which needs {amounts(needed)} on one "
                f"node: {free_room(needed)}; ask for less, by worker_options, or add nodes"
            )
            if seconds == _ROOM_SECONDS:
                raise ConfigError(problem)
            logger.warning("%s", problem)
        await place
        worker.has_place = True

    def _make_class(self) -> Any:
        given = self._actor_options
        try:
            for name in _OWN_OPTIONS.keys() & given.keys():
                raise ValueError(f"{name} is the batch's own: leave it out")
            return ray.remote(RowActor).options(**given, **_OWN_OPTIONS)
        except (TypeError, ValueError) as error:
            if self._starts_ray:
                ray.shutdown()
            raise ConfigError(f"worker_options={shown(given)}: {error}") from None

    def _replace(self, worker: _Worker, error: Exception) -> None:
        """Make a new actor for one that is gone, unless somebody has."""
        if worker not in self._workers:
            return
        self._workers.remove(worker)
        worker.capacity = 0
        with contextlib.suppress(Exception):
            ray.kill(worker.actor)  # it may be alive after its connection broke
        self._num_deaths += 1
        if self._num_deaths > _MAX_FRUITLESS_DEATHS * self._options.batch.workers:
            self._failure = EngineDeadError(
                f"{self._num_deaths} workers died before a row was done: {error}"
            )
            return
        reason = str(error).partition("\n")[0]  # Ray writes a page
        logger.warning("a worker of the batch is gone and is replaced: %s", reason)
        self._add_worker()


def _actor_resources(options: RowOptions) -> dict[str, Any]:
    """Return the resources of an actor with one engine: its GPUs, or a share of the CPUs."""
    given = options.engine_options
    on_cpu = given.get("device") == "cpu" or not ray.cluster_resources().get("GPU")
    if given.get("distributed_executor_backend") == "ray":  # its ranks are actors, too
        return {"num_cpus": 1}
    if not on_cpu:
        return {"num_cpus": 1, "num_gpus": given.get("tensor_parallel_size", 1)}
    nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    return {"num_cpus": _share(nodes, options.batch.workers)}


def _share(nodes: list[int], num_workers: int) -> int:
    """Return the most CPUs per worker with which all workers fit on these nodes; at least 1."""
    shares = range(max(nodes, default=1), 1, -1)
    return next((n for n in shares if sum(cpus // n for cpus in nodes) >= num_workers), 1)


def _cause(error: RayTaskError) -> BaseException:
    """Return the exception that an actor raised."""
    cause: BaseException | None = error.cause
    return error if cause is None else cause
