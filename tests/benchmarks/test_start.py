"""The stages of a start come in their order."""

import pytest

from benchmarks import start
from nanovllm import demo_model


def test_stages_of_a_start(capsys: pytest.CaptureFixture[str]) -> None:
    start.main(["--model", demo_model.MODEL, "--rounds", "1", "--cold"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0].strip("| ") for row in rows] == list(start.STAGES)
    seconds = [float(row[2]) for row in rows]
    assert 0 < seconds[0] <= seconds[1] < seconds[2] <= seconds[3]


def test_an_engine_that_fails_is_named(tmp_path: object) -> None:
    with pytest.raises(SystemExit, match="ended before 'load'"):
        start.main(["--model", f"{tmp_path}", "--rounds", "1"])
