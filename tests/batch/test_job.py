"""Jobs of the demo model: each row once, the same bytes, whatever order, format or crash."""

import asyncio
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nanovllm import demo_model
from nanovllm.apps.batch.job import Progress, run_job
from nanovllm.apps.batch.job_files import JobFiles
from nanovllm.apps.batch.row_engine import RowEngine
from nanovllm.apps.batch.rows import InputRow
from nanovllm.apps.batch.sources import open_source
from nanovllm.errors import ConfigError, EngineDeadError
from tests.batch.helpers import (
    FLAGS,
    SAMPLING,
    questions,
    read_rows,
    row_options,
    run,
    write_rows,
)
from tests.helpers import environment

BAD: list[dict[str, Any] | str] = [
    "{bad",
    {"prompt": 5},
    {"prompt": "too long " * 200},
    {"prompt": "x", "messages": []},
    {"other": 1},
    {"prompt": "x", "sampling_params": {"temprature": 1}},
    {"prompt": "x", "sampling_params": {"n": 2}},
    {"prompt": "x", "sampling_params": {"top_p": 7}},
    {"prompt": "x", "sampling_params": 3},
    {"prompt": "x", "id": 1.5},
    {"prompt": "half \ud800"},
    {"messages": [{"role": "user", "content": 3}]},
    {"messages": "hello"},
]
ERRORS = [
    "the line is not JSON",
    "a prompt must be a string or a list of token ids, got int 5",
    "max_model_len",
    "'prompt' or 'messages', got both",
    "'prompt' or 'messages', got neither",
    "no field 'temprature'; did you mean 'temperature'?",
    "n is the same for all rows",
    "top_p must be",
    "sampling_params must be an object, got 3",
    "id must be a string or an integer, got 1.5",
    "not valid Unicode",
    "content",
    "messages must be a list of objects",
]


def test_bad_rows_get_errors_and_the_others_outputs(tmp_path: Path) -> None:
    good = questions(4)
    chat = {"messages": [{"role": "user", "content": "What is a KV cache?"}], "id": "chat"}
    source = write_rows(tmp_path / "in.jsonl", [*good, *BAD, "", chat, {"prompt": [5, 6, 7]}])
    finished = run(source, tmp_path / "out.jsonl")
    assert (finished.num_rows, finished.num_failed) == (19, len(BAD))
    rows = read_rows(tmp_path / "out.jsonl")
    for row, error in zip(rows[4:-2], ERRORS, strict=True):
        assert error in row["error"]
        assert row["generated_text"] is None
    for row in (*rows[:4], *rows[-2:]):
        assert row["error"] is None
        assert row["num_generated_tokens"] == len(row["generated_tokens"]) > 0
    assert [row["id"] for row in rows] == [*range(13), 1.5, *range(14, 17), "chat", 18]
    assert [row["tag"] for row in rows[:4]] == [0, 1, 2, 3]
    assert rows[-2]["generated_text"].startswith("The KV cache")
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_the_outputs_are_those_of_any_batch(tmp_path: Path) -> None:
    """Rows that have ids get the same outputs in another order, by another engine."""
    rows = [{**row, "id": f"r{i}"} for i, row in enumerate(questions(30))]
    run(write_rows(tmp_path / "a.jsonl", rows), tmp_path / "a-out.jsonl")
    random.Random(0).shuffle(rows)
    alone = {"max_model_len": 128, "num_kvcache_blocks": 64, "max_num_seqs": 1}
    run(write_rows(tmp_path / "b.jsonl", rows), tmp_path / "b-out.jsonl", engine_options=alone)
    a, b = read_rows(tmp_path / "a-out.jsonl"), read_rows(tmp_path / "b-out.jsonl")
    assert sorted(a, key=lambda row: row["tag"]) == sorted(b, key=lambda row: row["tag"])
    assert len({row["generated_text"] for row in a}) > 20


def test_several_answers_and_an_own_seed(tmp_path: Path) -> None:
    rows = [{"prompt": "A cache", "sampling_params": {"seed": 3}}] * 2 + [{"prompt": "A cache"}] * 2
    for name, none in (("in", {}), ("none", {"sampling_params": {"seed": -1}})):
        source = write_rows(tmp_path / f"{name}.jsonl", [*rows[:3], {**rows[3], **none}])
        run(source, tmp_path / f"{name}-out.jsonl", sampling={**SAMPLING, "n": 3})
    outputs = read_rows(tmp_path / "in-out.jsonl")
    first, second, third, fourth = (row["generated_text"] for row in outputs)
    assert first == second != third != fourth
    assert read_rows(tmp_path / "none-out.jsonl")[3]["generated_text"] == fourth
    assert len(set(third)) == len(third) == 3


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
    opened, options, output = open_source(source), row_options(), tmp_path / "out.jsonl"
    for done in (0, 10, 15):
        FlakyPool.rows_left = done
        with pytest.raises(Killed):
            run_job(opened, output, options, lambda: FlakyPool(options))
        assert not output.exists()
    seen: list[Progress] = []
    finished = run_job(opened, output, options, lambda: RowEngine(options), seen.append)
    assert (finished.num_before, finished.num_failed) == (25, 1)
    assert seen[-1].num_done == 41
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_resumed_job_is_the_same_job(tmp_path: Path) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", questions(5)), tmp_path / "out.jsonl"
    options = row_options()
    FlakyPool.rows_left = 2
    with pytest.raises(Killed):
        run_job(open_source(source), output, options, lambda: FlakyPool(options))
    with pytest.raises(ConfigError, match="sampling: max_tokens is 6, now 7"):
        run(source, output, sampling={**SAMPLING, "max_tokens": 7})
    draft = dataclasses.replace(options, model=demo_model.DRAFT_MODEL)
    with pytest.raises(ConfigError, match="its model is '.*model', now '.*draft'"):
        run_job(open_source(source), output, draft, lambda: RowEngine(draft))
    write_rows(source, questions(6))
    with pytest.raises(ConfigError, match="its input is"):
        run(source, output)


def test_a_job_killed_in_the_middle_and_resumed(tmp_path: Path) -> None:
    """kill -9 of the process; what it leaves is text."""
    source = write_rows(tmp_path / "in.jsonl", questions(120))
    output, journal = tmp_path / "out.jsonl", tmp_path / "out.jsonl.parts" / "rows.jsonl"
    command = [sys.executable, "-m", "nanovllm.apps.cli.main", "batch", str(source), str(output)]
    command += [*FLAGS, "--max-tokens", "6"]
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

    def refuse() -> Any:
        raise AssertionError("an engine is made")

    opened = open_source(source)
    finished = run_job(opened, output, row_options(), refuse)
    assert finished[:3] == (1, 1, 1)
    assert output.read_bytes() == first
    assert not journal.parent.exists()


def test_an_output_that_appears_in_the_middle_loses_no_rows(tmp_path: Path) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", questions(2)), tmp_path / "out.jsonl"
    options = row_options()
    with pytest.raises(ConfigError, match="exists, and this job has not written it"):
        run_job(
            open_source(source),
            output,
            options,
            lambda: RowEngine(options),
            lambda progress: output.touch(),
        )
    output.unlink()
    assert run(source, output).num_before == 2
    assert len(read_rows(output)) == 2


class Dying:
    """Rows that an engine answers, until it dies."""

    def __init__(self, form: Any, rows: int) -> None:
        self._form, self._rows = form, rows

    async def answer(self, row: InputRow) -> dict[str, Any]:
        self._rows -= 1
        if self._rows < 0:
            raise EngineDeadError("it died")
        found: dict[str, Any] = await self._form.answer(row)
        return found


def test_a_dead_engine_is_made_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_rows(tmp_path / "in.jsonl", questions(30))
    run(source, tmp_path / "whole.jsonl")
    make, lives = RowEngine._make, iter([3, 9, 5])

    def make_dying(self: RowEngine) -> Any:
        llm, form = make(self)
        rows = next(lives, None)
        return llm, form if rows is None else Dying(form, rows)

    monkeypatch.setattr(RowEngine, "_make", make_dying)
    run(source, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    lives = iter([0] * 9)
    with pytest.raises(EngineDeadError, match="5 engines died before a row was done: it died"):
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
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "x"}] * 3000)
    pool, most = SlowFirst(), 0

    def look(progress: Progress) -> None:
        nonlocal most
        if not pool.first.is_set():
            most = max(pool.begun)

    run_job(open_source(source), tmp_path / "out.jsonl", row_options(), lambda: pool, look)
    assert most == 1023
    assert sorted(pool.begun) == list(range(3000))


def test_an_input_that_changes(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", questions(3))
    options = row_options()

    def change(progress: Progress) -> None:
        write_rows(source, questions(4))

    with pytest.raises(ConfigError, match="has changed while it was read"):
        run_job(
            open_source(source),
            tmp_path / "out.jsonl",
            options,
            lambda: RowEngine(options),
            change,
        )
    assert not (tmp_path / "out.jsonl").exists()


def test_an_empty_file(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [])
    assert run(source, tmp_path / "out.jsonl").num_rows == 0
    assert (tmp_path / "out.jsonl").read_bytes() == b""
