"""`nanovllm batch --workers N`: actors that die are replaced, and the output stays the same."""

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from nanovllm import errors
from nanovllm.apps.batch.batch_options import BatchOptions
from nanovllm.apps.batch.job import run_job
from nanovllm.apps.batch.rows import InputRow, Source
from nanovllm.apps.cli import main as cli
from nanovllm.errors import ConfigError, EngineDeadError
from tests.batch.helpers import (
    FLAGS,
    questions,
    read_rows,
    row_options,
    run,
    text_row,
    write_rows,
)

ray = pytest.importorskip("ray")

from ray.exceptions import OutOfMemoryError  # noqa: E402

from nanovllm.apps.ray import frontend, row_pool  # noqa: E402 (it needs Ray)
from nanovllm.apps.ray.row_pool import RayPool, RowActor, _share  # noqa: E402

ONE_CPU = {"num_cpus": 1}


class Exiting(RowActor):
    """An actor whose process ends at a certain prompt."""

    async def answer(self, row: InputRow) -> bytes:
        """Return the output of a row."""
        if row.fields.get("custom_id") == "poison":
            os._exit(1)
        return await super().answer(row)


@pytest.mark.long
def test_dying_actors_change_nothing(
    tmp_path: Path, ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that ends every engine gets an error, and no row beside it."""
    monkeypatch.setattr(row_pool, "RowActor", Exiting)
    rows = [*questions(12), "{bad"]
    rows.insert(6, text_row("poison", "A"))
    source, output = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    engine = {"max_model_len": 256, "num_kvcache_blocks": 512, "max_num_seqs": 1}
    options = row_options(engine_options=engine, workers=2, worker_options=ONE_CPU)
    finished = run_job(Source(source), output, options, RayPool)
    assert finished.num_failed == 2
    rows[6] = {"custom_id": "poison"}
    run(write_rows(tmp_path / "in.jsonl", rows), tmp_path / "whole.jsonl", engine_options=engine)
    found, expected = read_rows(output), read_rows(tmp_path / "whole.jsonl")
    assert "died while it computed this row" in found.pop(6)["error"]["message"]
    del expected[6]
    assert found == expected


@pytest.mark.long
def test_a_batch_ends_if_no_engine_stays_alive(
    tmp_path: Path, ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_pool, "RowActor", Exiting)
    monkeypatch.setattr(row_pool, "_MAX_FRUITLESS_DEATHS", 0)
    source = write_rows(tmp_path / "in.jsonl", [text_row("poison", "A")])
    options = row_options(worker_options=ONE_CPU)
    with pytest.raises(EngineDeadError, match="1 workers died before a row was done"):
        run_job(Source(source), tmp_path / "out.jsonl", options, RayPool)
    assert (tmp_path / "out.jsonl.parts" / "rows.jsonl").read_bytes() == b""


@pytest.mark.long
def test_errors_of_engines_reach_the_driver(ray_cluster: Any) -> None:
    engine = {"max_model_len": 256, "num_kvcache_blocks": 1}
    pool = RayPool(row_options(engine_options=engine, worker_options=ONE_CPU))
    with pytest.raises(errors.OutOfMemoryError, match="max_model_len"):
        asyncio.run(pool.start())
    pool.close()


def test_the_command_joins_a_cluster(tmp_path: Path, ray_cluster: Any) -> None:
    source = write_rows(tmp_path / "in.jsonl", questions(3))
    command = ["batch", str(source), str(tmp_path / "out.jsonl"), *FLAGS]
    flags = ["--ray-address", ray_cluster.address, "--worker-options", '{"num_cpus": 1}']
    assert cli.main([*command, *flags]) == 0
    run(source, tmp_path / "whole.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("nodes", "workers", "share"),
    [([2], 1, 2), ([2], 2, 1), ([2], 4, 1), ([8, 8, 8], 4, 4), ([8, 8, 8], 3, 8), ([], 1, 1)],
)
def test_workers_share_the_cpus(nodes: list[int], workers: int, share: int) -> None:
    assert _share(nodes, workers) == share


def test_an_address_without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(ConfigError, match=f"the address {address}: no Ray cluster can be joined"):
        RayPool(row_options(workers=2, ray_address=address))


@pytest.mark.parametrize(
    ("given", "message"),
    [({"cpus": 2}, "worker_options={'cpus': 2}: .*cpus"), ({"max_restarts": 1}, "leave it out")],
)
def test_options_that_ray_refuses(ray_cluster: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RayPool(row_options(workers=2, worker_options=given))
    assert ray.is_initialized()


def test_without_room_the_error_says_what_is_needed(
    ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: nothing was said, and nothing ended."""
    monkeypatch.setattr(row_pool, "_SILENT_SECONDS", 0.1)
    monkeypatch.setattr(row_pool, "_ROOM_SECONDS", 0.2)
    pool = RayPool(row_options(worker_options={"num_cpus": 99}))
    with pytest.raises(ConfigError, match="no room for a worker, which needs 99 CPU on one node"):
        asyncio.run(pool.start())
    pool.close()


def test_options_of_a_worker_ask_for_one() -> None:
    """Symptom: with one worker they were dropped."""
    assert BatchOptions(worker_options={"num_cpus": 2}).uses_ray
    assert BatchOptions(ray_address="local").uses_ray
    assert not BatchOptions().uses_ray


def test_an_actor_without_memory_is_gone() -> None:
    """Ray's monitor kills it, and raises what is no RayActorError."""
    assert issubclass(OutOfMemoryError, row_pool._GONE)
    assert issubclass(OutOfMemoryError, frontend._DIED)
