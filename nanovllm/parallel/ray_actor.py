"""The rank in a Ray actor, as it runs on its node. It finds the model's files there.

The engine sends it messages over `links`.
"""

import dataclasses
import logging
import os
import signal
import socket
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import ray
import torch
import xxhash
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import nanovllm
from nanovllm.errors import CheckpointError, log_failure
from nanovllm.loading.hub import configured_checkpoint, draft_checkpoint
from nanovllm.options.config import Config
from nanovllm.parallel.links import accept, listen
from nanovllm.parallel.rank_process import RankJob, run_rank
from nanovllm.parallel.rank_setup import check_networks, rank_platform
from nanovllm.platform import Platform
from nanovllm.utils.distributed import make_store
from nanovllm.worker.model_loader import NetworkSpec

logger = logging.getLogger(__name__)

_NUM_SLICES = 16
_SLICE_BYTES = 2**16  # what is compared of each weight file: small ones as a whole
_END_SECONDS = 2.0  # how long a rank whose engine is gone may take to end by itself


class ActorPlace(NamedTuple):
    """Where an actor is, and what it runs."""

    node_id: str
    pid: int
    address: str
    port: int  # where it waits for the engine
    store_port: int  # where ranks find each other; 0 for all but rank 0
    versions: str  # of nanovllm, torch and Python, which must be the same everywhere

    def __str__(self) -> str:
        return f"node {self.address} ({self.node_id[:8]})"


def versions() -> str:
    """Return the versions of this process: of what is in messages, and of what computes."""
    return f"nanovllm {nanovllm.__version__}, torch {torch.__version__.partition('+')[0]}"


class FoundFiles(NamedTuple):
    """What the engine read of a model. A rank must find the same on its node."""

    network: NetworkSpec
    digests: dict[str, str]  # of the weight files, by name


def found_files(network: NetworkSpec) -> FoundFiles:
    """Return `network` with the digests of its files."""
    return FoundFiles(network, {file.name: _digest(file) for file in network.files})


def _digest(path: Path) -> str:
    """Return a digest of a file's size and of slices all over it: another version of a model often
    has files of the same sizes.
    """
    size = path.stat().st_size
    digest = xxhash.xxh3_128(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        for index in range(_NUM_SLICES):
            file.seek(index * max(0, size - _SLICE_BYTES) // (_NUM_SLICES - 1))
            digest.update(file.read(_SLICE_BYTES))
    return digest.hexdigest()


class RankActor:
    """One rank. Its process has one CPU thread pool, and one GPU if Ray gives it any."""

    def __init__(self) -> None:
        self._store: TCPStore | None = None
        self._server: socket.socket | None = None

    def open(self, rank: int) -> ActorPlace:
        """Listen, and return where; rank 0 also serves the store of all ranks."""
        address = ray.util.get_node_ip_address()
        self._server = listen(address)
        if rank == 0:
            self._store = make_store(address)
        return ActorPlace(
            ray.get_runtime_context().get_node_id(),
            os.getpid(),
            address,
            self._server.getsockname()[1],
            self._store.port if self._store is not None else 0,
            versions(),
        )

    def run(
        self, job: RankJob, config: Config, found: list[FoundFiles], key: bytes, place: str
    ) -> None:
        """Run the rank until the engine closes its connection.

        Args:
            found: what the engine read of the network and, if there is one, of the draft network.
            key: what the engine proves to have.
            place: this node, for messages.
        """
        assert self._server is not None
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine handles Ctrl-C
        with self._server:
            messages, lifeline = (accept(self._server, key) for _ in range(2))
        threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()

        def prepare() -> tuple[Platform, NetworkSpec, NetworkSpec | None]:
            platform = rank_platform(dataclasses.replace(config, tensor_parallel_size=1))
            return platform, *_find_networks(config, found, place)

        try:
            run_rank(job, messages, prepare)
        except Exception as error:  # the engine has been told
            log_failure(logger, error, f"rank {job.rank} ended")
        finally:
            messages.close()


def _find_networks(
    config: Config, found: list[FoundFiles], place: str
) -> tuple[NetworkSpec, NetworkSpec | None]:
    """Return the networks from this node's files.

    Raises:
        CheckpointError: they are missing here, or differ from those that the engine read.
    """
    try:
        networks = check_networks(config, configured_checkpoint(config), draft_checkpoint(config))
    except CheckpointError as error:
        raise type(error)(
            f"{place}: {error}; each node of a rank needs the model at the same path, or a hub id"
        ) from error
    for mine, theirs in zip(filter(None, networks), found, strict=False):
        if mine.model_config != theirs.network.model_config:
            raise CheckpointError(
                f"{place}: {mine.config.model} has another config.json than here; give all nodes "
                "the same"
            )
        if differing := found_files(mine).digests.items() ^ theirs.digests.items():
            name, _ = min(differing)
            raise CheckpointError(
                f"{place}: {name} of {mine.config.model} is another file than here; give all nodes "
                "the same"
            )
    return networks


def _end_with(lifeline: Connection) -> None:
    """End this process soon after the engine's end of `lifeline` is gone: a rank may wait in a
    collective for minutes.
    """
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        time.sleep(_END_SECONDS)
        os._exit(1)
