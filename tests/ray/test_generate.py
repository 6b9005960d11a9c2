"""`nanovllm.apps.ray.generate`: a Dataset in and out."""

import contextlib
import threading
import time
from typing import Any

import psutil
import pytest

from nanovllm import demo_model
from nanovllm.apps.batch.rows import OUTPUT_COLUMNS
from nanovllm.errors import ConfigError
from tests.batch.helpers import ENGINE, SAMPLING, questions, read_rows, run, write_rows

ray = pytest.importorskip("ray")
pytest.importorskip("pyarrow")

from nanovllm.apps.ray.datasets import generate  # noqa: E402 (it needs Ray)

ROWS: list[dict[str, Any]] = [{**row, "id": i} for i, row in enumerate(questions(24))]
OPTIONS: dict[str, Any] = {
    "model": demo_model.MODEL,
    "sampling_params": SAMPLING,
    **ENGINE,
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What `nanovllm batch` writes for the same rows."""
    directory = tmp_path_factory.mktemp("batch")
    run(write_rows(directory / "in.jsonl", ROWS), directory / "out.jsonl")
    return [without_tag(row) for row in read_rows(directory / "out.jsonl")]


def without_tag(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("id", *OUTPUT_COLUMNS)}


@pytest.mark.long
def test_a_killed_actor(ray_cluster: Any, expected: list[dict[str, Any]]) -> None:
    """The outputs are those of the command; a bad row has its error."""
    rows = [*ROWS, {"id": 99, "prompt": "too long " * 200, "tag": 0}]
    killer = threading.Thread(target=kill_first, daemon=True)
    killer.start()
    outputs = generate(ray.data.from_items(rows), **OPTIONS, workers=2, block_rows=8)
    found = outputs.take_all()
    assert not killer.is_alive()
    assert [*found[0]] == [*ROWS[0], *OUTPUT_COLUMNS]
    *good, bad = sorted(map(without_tag, found), key=lambda row: row["id"])
    assert good == expected
    assert "max_model_len" in bad["error"]


def kill_first() -> None:
    """Kill the first actor with an engine, as soon as it works."""
    while True:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "RowsStage" in " ".join(process.cmdline()):
                    process.kill()
                    return
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 0}, "workers must be an integer >= 1, got 0"),
        ({"workers": (3, 2)}, "workers must be an integer >= 3, got 2"),
        ({"max_num_seqs": 0}, "max_num_seqs must be"),
        ({"sampling_params": 3}, "sampling_params must be a dictionary with names as keys, got 3"),
        ({"sampling_params": {"logprobs": 1}}, "logprobs=1 is not for a batch"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    """Before the dataset is looked at."""
    with pytest.raises(ConfigError, match=message):
        generate(None, **{**OPTIONS, **changes})  # type: ignore[arg-type]
