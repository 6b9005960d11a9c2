"""`nanovllm prove`: its options, and what it cannot show."""

import pytest

from nanovllm import demo_model
from nanovllm.apps.cli import main as cli


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-requests", "3"], "num-requests must be"),
        (["m", "n"], "prove takes one MODEL"),
        (["--ways", "sideways"], "'sideways' is in no way's name; the ways are: batches of 2, "),
        (["/no/such/model"], "model directory '/no/such/model' does not exist"),
    ],
)
def test_bad_arguments(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo_model, "default_model", lambda: demo_model.MODEL)
    assert cli.main(["prove", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_what_did_not_happen_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """A sequence of one block is never preempted."""
    arguments = ["prove", demo_model.MODEL, "--ways", "preempted", "--num-requests", "4"]
    assert cli.main([*arguments, "--max-model-len", "32"]) == 2
    shown = capsys.readouterr()
    (line,) = [line for line in shown.out.splitlines() if line.startswith("preempted ")]
    assert line.split()[1:5] == ["not", "shown", "0", "preemptions"]
    assert "nothing is shown" in shown.err


def test_ways_that_the_engine_refuses_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["prove", demo_model.MODEL, "--ways", "int8 KV", "--num-requests", "4"]
    assert cli.main([*arguments, "--dtype", "float32"]) == 2
    message = capsys.readouterr().err
    assert "nothing is shown: none of these ways can be tried (int8 KV: " in message


@pytest.mark.parametrize(
    ("path", "message"),
    [("/no/such/folder/file", "cannot be written"), (".", "is a directory")],
)
def test_a_file_that_cannot_be_written(
    path: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["prove", demo_model.MODEL, "--output", path]) == 2
    assert f"output '{path}' {message}" in capsys.readouterr().err
