"""`nanovllm prove` with another engine; tests/server/test_prove.py has a server."""

import json
from pathlib import Path

import pytest

from nanovllm import demo_model
from nanovllm.apps.cli import main as cli
from nanovllm.apps.prove.prove_options import ProveOptions
from nanovllm.errors import ConfigError
from tests.helpers import ROOT


@pytest.mark.long
def test_transformers_computes_the_same_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "found.json"
    arguments = ["prove", demo_model.MODEL, "--peer", "transformers", "--num-requests", "4"]
    status = cli.main([*arguments, "--output", str(output)])
    found = json.loads(output.read_text())
    assert found["engine"].startswith("transformers ")
    verdicts = {verdict["way"]: verdict for verdict in found["verdicts"]}
    assert {"alone again", "batches of 2", "n-gram drafts"} <= verdicts.keys()
    assert all(verdict["num_answers"] == 4 for verdict in verdicts.values())
    assert verdicts["alone again"]["status"] == "same"
    assert status == any(verdict["num_different"] for verdict in verdicts.values())
    assert "alone again" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peer": "vlm"}, "peer must be vllm, llamacpp, transformers or a URL .* got 'vlm'"),
        ({"peer_python": "/bin/python"}, "peer_python is for a peer that is installed"),
        ({"num_requests": 3}, "num_requests must be"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ProveOptions(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peer", "vllm", "--dtype", "float32"], "--dtype is for nanovllm"),
        (["--peer", "vllm"], "MODEL is missing"),
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


@pytest.mark.parametrize("command", [["prove"], ["lab", "check", "examples/lab/lfu_eviction.py"]])
@pytest.mark.parametrize(
    ("path", "message"),
    [("/no/such/folder/file", "cannot be written"), (".", "is a directory")],
)
def test_a_file_that_cannot_be_written(
    command: list[str],
    path: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main([*command, demo_model.MODEL, "--reproduction", path]) == 2
    assert f"reproduction '{path}' {message}" in capsys.readouterr().err
    if command == ["prove"]:
        assert cli.main([*command, demo_model.MODEL, "--output", path]) == 2
        assert f"output '{path}' {message}" in capsys.readouterr().err


def test_a_peer_writes_no_script(capsys: pytest.CaptureFixture[str]) -> None:
    """Symptom: in a folder that is not writable a server cannot be asked."""
    arguments = ["prove", "--peer", "http://127.0.0.1:9", "--reproduction", "/no/such/folder/file"]
    assert cli.main(arguments) == 2
    assert "is the server running?" in capsys.readouterr().err


def test_a_peer_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["prove", demo_model.MODEL, "--peer", "vllm", "--peer-python", "/no/python"]
    assert cli.main(arguments) == 2
    assert "give the Python in which vllm is installed" in capsys.readouterr().err
