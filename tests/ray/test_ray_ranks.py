"""Ranks in Ray actors give the tokens of one process, die together, and leave nothing behind."""

import dataclasses
import functools
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
)
from nanovllm.loading.hub import open_checkpoint
from nanovllm.options.config import Config
from nanovllm.parallel import ray_cluster as cluster_module
from nanovllm.parallel.rank_executor import RankExecutor
from nanovllm.parallel.rank_setup import check_networks
from nanovllm.parallel.ray_actor import _find_networks, found_files
from nanovllm.parallel.ray_ranks import RayRanks, _for_other_nodes
from tests.helpers import COMPACT, environment, shared_memory, token_ids, wait_until
from tests.ray.conftest import NODE

MODEL = demo_model.MODEL
RAY: dict[str, Any] = {"distributed_executor_backend": "ray"}
TWO_NODES = {**RAY, "tensor_parallel_size": 2, "num_threads": 4}
"""Two threads a rank: a node of three cores has room for one rank, and for one of one thread."""
ONE_RANK = {**RAY, "num_threads": 1}
DEMO = {"dtype": "float32", "max_model_len": 256, "enable_prefix_caching": False}
SHORT = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
PROMPTS = [[i + 1] * (3 + i) for i in range(6)]


def processes(llm: Any) -> list[psutil.Process]:
    return [psutil.Process(place.pid) for place in llm.engine.executor.ranks.places]


def placement_groups() -> set[str]:
    found = ray.util.placement_group_table()
    return {name for name, group in found.items() if group["state"] != "REMOVED"}


@pytest.fixture
def nothing_left(ray_cluster: Any) -> Callable[..., None]:
    """Check that ranks are gone, with all that they used and all that was reserved in the test."""
    before = placement_groups()

    def check(ranks: list[psutil.Process], used: set[int] | None = None) -> None:
        wait_until(lambda: not any(rank.is_running() for rank in ranks), 10)
        wait_until(lambda: placement_groups() <= before, 10)  # a dead driver's: by Ray
        assert not (used or set()) & {entry.inode() for entry in os.scandir("/dev/shm")}

    return check


def generate_forever(llm: Any) -> None:
    while True:
        llm.generate([[1, 2, 3]] * 8, LONG, use_tqdm=False)


@pytest.fixture(scope="module")
def make_two_nodes() -> Iterator[Callable[[], LLM]]:
    """Return an LLM of the demo model on two nodes, the same for all tests, which must not harm it.

    A test that changes the cluster comes after them.
    """
    made = []

    @functools.cache
    def make() -> LLM:
        made.append(LLM(MODEL, **DEMO, **TWO_NODES))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()


@pytest.mark.long
def test_two_nodes_give_the_tokens_of_one_process(
    ray_cluster: Any, make_two_nodes: Any, make_llm: Any
) -> None:
    llm = make_two_nodes()
    first, second = llm.engine.executor.ranks.places
    assert first.node_id != second.node_id
    alone = make_llm(MODEL, **DEMO)
    sampled = SamplingParams(seed=7, max_tokens=40, logprobs=2)
    structured = SamplingParams(temperature=0, max_tokens=60, structured_outputs=COMPACT)
    for params in (SHORT, sampled, structured):  # the last needs the ranks' grammar compiler
        outputs = llm.generate(["What is a block table?"] * 3, params, use_tqdm=False)
        expected = alone.generate(["What is a block table?"] * 3, params, use_tqdm=False)
        assert token_ids(outputs) == token_ids(expected)


@pytest.mark.long
def test_a_rank_whose_node_has_no_files_says_so(ray_cluster: Any) -> None:
    """All nodes are in this machine: another path stands for a node without the files."""
    config = Config(MODEL, **ONE_RANK)
    ranks = RayRanks(*check_networks(config, open_checkpoint(MODEL)))
    ranks._config = dataclasses.replace(ranks._config, model="/nowhere")
    with pytest.raises(
        CheckpointError, match=r"node .*: model directory '/nowhere' does not exist"
    ):
        RankExecutor(ranks).start()


@pytest.mark.parametrize("changed", ["config.json", "model.safetensors"])
def test_a_node_with_another_version_of_the_model_is_refused(tmp_path: Path, changed: str) -> None:
    config = Config(MODEL, **RAY, skip_tokenizer_init=True)
    networks = check_networks(config, open_checkpoint(MODEL))
    found = [found_files(network) for network in networks if network is not None]
    assert _find_networks(config, found, "node 1")[0].files == networks[0].files
    other = tmp_path / "model"
    shutil.copytree(MODEL, other)
    if changed == "config.json":
        text = (other / changed).read_text().replace('"rms_norm_eps": 1e-', '"rms_norm_eps": 2e-')
        (other / changed).write_text(text)
    else:
        content = bytearray((other / changed).read_bytes())
        content[-1] ^= 1
        (other / changed).write_bytes(content)
    elsewhere = dataclasses.replace(config, model=str(other))
    with pytest.raises(CheckpointError, match=rf"node 1: .*{changed}.* than here"):
        _find_networks(elsewhere, found, "node 1")


def test_one_rank_ends_with_its_engine(nothing_left: Any) -> None:
    llm = LLM(MODEL, **ONE_RANK)
    ranks = processes(llm)
    assert len(ranks) == 1
    used = shared_memory(ranks)
    assert len(llm.generate([[1]], SHORT, use_tqdm=False)[0].token_ids) == 40
    llm.engine.executor.check_health()
    params = SamplingParams(logits_processors=[lambda _, logits: logits])
    with pytest.raises(InvalidRequestError, match="run in this process"):
        llm.generate("x", params, use_tqdm=False)
    del llm
    gc.collect()
    nothing_left(ranks, used)


def test_without_room_the_error_says_what_is_needed(
    ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "_ROOM_SECONDS", 0.2)
    with pytest.raises(ConfigError, match=r"no room for 2 times 8 CPU.* of 6 CPU are free on 2"):
        LLM(MODEL, **RAY, tensor_parallel_size=2, num_threads=16)
    with pytest.raises(ConfigError, match=r"no room for 1 times 1 GPU.* 0 of 0 GPU"):
        LLM(MODEL, **RAY, device="cuda")


SCRIPT = """
import sys
from nanovllm import LLM, SamplingParams

if __name__ == "__main__":
    model, size = sys.argv[1], int(sys.argv[2])
    ray = {"distributed_executor_backend": "ray", "num_threads": size}
    llm = LLM(model, tensor_parallel_size=size, **ray)
    print(*(place.pid for place in llm.engine.executor.ranks.places), flush=True)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    while True:
        llm.generate([[1, 2, 3]] * 8, params, use_tqdm=False)
"""


@pytest.mark.long
@pytest.mark.parametrize(("number", "size"), [(signal.SIGINT, 1), (signal.SIGKILL, 2)])
def test_ctrl_c_and_death_of_the_driver_end_the_ranks(
    ray_cluster: Any,
    nothing_left: Any,
    tmp_path: Path,
    number: signal.Signals,
    size: int,
) -> None:
    path = tmp_path / "run.py"
    path.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(path), MODEL, str(size)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment(RAY_ADDRESS=ray_cluster.address),
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    ranks = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
    assert len(ranks) == size
    time.sleep(0.3)
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode != 0
    nothing_left(ranks)
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in errors


@pytest.mark.long
def test_a_killed_node_raises_and_leaves_nothing(ray_cluster: Any, make_two_nodes: Any) -> None:
    """The last test with the shared engine, which it ends."""
    llm = make_two_nodes()
    ranks = processes(llm)
    used = shared_memory(ranks)
    nodes = {node.node_id: node for node in ray_cluster.worker_nodes}
    rank, place = next(
        (rank, place)
        for rank, place in enumerate(llm.engine.executor.ranks.places)
        if place.node_id in nodes  # the head's node stays
    )
    kill = functools.partial(ray_cluster.remove_node, allow_graceful=False)
    threading.Timer(0.5, kill, (nodes[place.node_id],)).start()
    start = time.monotonic()
    lost = f"nanovllm-rank{rank}, process {place.pid} on node {place.address} .{place.node_id[:8]}"
    with pytest.raises(EngineDeadError, match=lost):
        generate_forever(llm)
    assert time.monotonic() - start < 10.5
    wait_until(lambda: not any(rank.is_running() for rank in ranks), 10)
    assert not placement_groups()
    assert not used & {entry.inode() for entry in os.scandir("/dev/shm")}
    with pytest.raises(EngineDeadError):
        llm.generate([[1]], LONG, use_tqdm=False)
    for _ in range(2):
        llm.shutdown()
    ray_cluster.add_node(**NODE)


def test_paths_mean_the_same_in_another_directory() -> None:
    """Symptom: ranks keep KV in files below a directory of Ray's, where no engine looks for it."""
    found = _for_other_nodes(Config(MODEL, kv_cache_dir="kept", **RAY))
    assert found.kv_cache_dir == str(Path("kept").absolute())
    found = _for_other_nodes(Config(MODEL, kv_cache_dir="~/kept", **RAY))
    assert found.kv_cache_dir == str(Path.home() / "kept")
