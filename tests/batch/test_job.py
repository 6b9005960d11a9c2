"""Jobs of the demo model: each row once, the same bytes, whatever order, format or crash."""

import asyncio
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from nanovllm import demo_model
from nanovllm.apps.batch import row_engine
from nanovllm.apps.batch.job import Progress, run_job
from nanovllm.apps.batch.job_files import JobFiles
from nanovllm.apps.batch.row_engine import RowApp, RowEngine
from nanovllm.apps.batch.rows import InputRow, Source
from nanovllm.errors import ConfigError, EngineDeadError
from tests.batch.helpers import ENGINE, FLAGS, questions, read_rows, row_options, run, write_rows
from tests.helpers import environment


class Killed(Exception):
    pass


class FlakyPool(RowEngine):
    """An engine of a process that ends after some rows."""

    rows_left = 0

    async def answer(self, row: InputRow) -> bytes:
        """Return the output of a row, unless the process has ended."""
        output = await super().answer(row)
        if not FlakyPool.rows_left:
            raise Killed
        FlakyPool.rows_left -= 1
        return output


def test_a_resumed_job_computes_what_is_missing(tmp_path: Path) -> None:
    rows = [*questions(40), "{bad"]
    source = write_rows(tmp_path / "in.jsonl", rows)
    run(source, tmp_path / "whole.jsonl")
    opened, options, output = Source(source), row_options(), tmp_path / "out.jsonl"
    for done in (0, 10, 15):
        FlakyPool.rows_left = done
        with pytest.raises(Killed):
            run_job(opened, output, options, FlakyPool)
        assert not output.exists()
    seen: list[Progress] = []
    finished = run_job(opened, output, options, RowEngine, seen.append)
    assert (finished.num_before, finished.num_failed) == (25, 1)
    assert seen[-1].num_done == 41
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_resumed_job_is_the_same_job(tmp_path: Path) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", questions(5)), tmp_path / "out.jsonl"
    options = row_options()
    FlakyPool.rows_left = 2
    with pytest.raises(Killed):
        run_job(Source(source), output, options, FlakyPool)
    with pytest.raises(ConfigError, match="engine options: seed is None, now 7"):
        run(source, output, engine_options={**ENGINE, "seed": 7})
    draft = dataclasses.replace(options, model=demo_model.DRAFT_MODEL)
    with pytest.raises(ConfigError, match="its model is '.*model', now '.*draft'"):
        run_job(Source(source), output, draft, RowEngine)
    write_rows(source, questions(6))
    with pytest.raises(ConfigError, match="its input is"):
        run(source, output)


@pytest.mark.long
def test_a_job_killed_in_the_middle_and_resumed(tmp_path: Path) -> None:
    """kill -9 of the process; what it leaves is text."""
    source = write_rows(tmp_path / "in.jsonl", questions(120))
    output, journal = tmp_path / "out.jsonl", tmp_path / "out.jsonl.parts" / "rows.jsonl"
    command = [sys.executable, "-m", "nanovllm.apps.cli.main", "batch", str(source), str(output)]
    command += FLAGS
    job = subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL)
    while job.poll() is None:
        if journal.exists() and journal.read_bytes().count(b"\n") >= 5:
            os.kill(job.pid, signal.SIGKILL)
            break
        time.sleep(0.002)
    assert job.wait() == -signal.SIGKILL
    number, _, text = journal.read_text().splitlines()[0].partition("\t")
    assert number.isdigit()
    assert json.loads(text)["error"] is None
    assert 5 <= run(source, output).num_before < 120
    run(source, tmp_path / "whole.jsonl")
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_job_killed_before_its_directory_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is computed again, whichever of its files are left."""
    source, output = write_rows(tmp_path / "in.jsonl", ["{bad"]), tmp_path / "out.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(JobFiles, "remove", lambda self: None)
        run(source, output)
    first, journal = output.read_bytes(), tmp_path / "out.jsonl.parts" / "rows.jsonl"
    journal.unlink()

    def refuse(options: object) -> Any:
        raise AssertionError("an engine is made")

    opened = Source(source)
    finished = run_job(opened, output, row_options(), refuse)
    assert finished[:3] == (1, 1, 1)
    assert output.read_bytes() == first
    assert not journal.parent.exists()


def test_an_output_that_appears_in_the_middle_loses_no_rows(tmp_path: Path) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", questions(2)), tmp_path / "out.jsonl"
    options = row_options()
    with pytest.raises(ConfigError, match="exists, and this job has not written it"):
        run_job(
            Source(source),
            output,
            options,
            RowEngine,
            lambda progress: output.touch(),
        )
    output.unlink()
    assert run(source, output).num_before == 2
    assert len(read_rows(output)) == 2


class Dying(RowApp):
    """Answers some rows; then its engine is dead."""

    rows_left: float = 0

    async def answer(self, row: InputRow) -> dict[str, Any]:
        self.rows_left -= 1
        if self.rows_left < 0:
            raise EngineDeadError("it died")
        return await super().answer(row)


def test_a_dead_engine_is_made_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_rows(tmp_path / "in.jsonl", questions(20))
    run(source, tmp_path / "whole.jsonl")
    make, lives = RowEngine._make, iter([3, 5])

    def make_dying(self: RowEngine) -> RowApp:
        app = Dying(make(self).llm, self._options)
        app.rows_left = next(lives, math.inf)
        return app

    monkeypatch.setattr(RowEngine, "_make", make_dying)
    run(source, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    monkeypatch.setattr(row_engine, "MAX_DEATHS", 2)
    lives = iter([0] * 2)
    with pytest.raises(EngineDeadError, match="2 engines died before a row was done: it died"):
        run(source, tmp_path / "dead.jsonl")


class SlowFirst:
    """A pool without a model, whose first row takes long."""

    capacity = 4

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.first = asyncio.Event()

    async def start(self) -> None:
        pass

    async def answer(self, row: InputRow) -> bytes:
        assert row.number is not None
        self.begun.append(row.number)
        if row.number == 0:
            await asyncio.wait_for(self.first.wait(), 60)
        elif row.number == 1023:
            asyncio.get_running_loop().call_later(0.1, self.first.set)
        await asyncio.sleep(0)
        return b'{"error": null}'

    def close(self) -> None:
        pass


def test_a_slow_row_stops_the_others_at_the_window(tmp_path: Path) -> None:
    """So what is finished behind it, and what the output's order waits for, stays bounded."""
    source = write_rows(tmp_path / "in.jsonl", ["{}"] * 3000)
    pool, most = SlowFirst(), 0

    def look(progress: Progress) -> None:
        nonlocal most
        if not pool.first.is_set():
            most = max(pool.begun)

    run_job(Source(source), tmp_path / "out.jsonl", row_options(), lambda _: pool, look)
    assert most == 1023
    assert sorted(pool.begun) == list(range(3000))


def test_an_input_that_changes(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", questions(3))
    options = row_options()

    def change(progress: Progress) -> None:
        write_rows(source, questions(4))

    with pytest.raises(ConfigError, match="has changed while it was read"):
        run_job(
            Source(source),
            tmp_path / "out.jsonl",
            options,
            RowEngine,
            change,
        )
    assert not (tmp_path / "out.jsonl").exists()
