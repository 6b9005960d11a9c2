"""What a server says of its arithmetic, and `nanovllm prove --peer URL` beside it."""

import json
from pathlib import Path

import pytest
from openai import OpenAI

from nanovllm.apps.cli import main as cli
from tests.server.conftest import Running


def test_the_model_and_the_fingerprint_say_what_is_guaranteed(client: OpenAI) -> None:
    (model,) = client.models.list().data
    arithmetic = model.model_dump()["arithmetic"]
    assert arithmetic["dtype"] == arithmetic["weights"] == arithmetic["kv_cache"]
    assert arithmetic["num_ranks"] == 1
    answer = client.completions.create(model=model.id, prompt="A cache", max_tokens=1)
    is_said = "-invariant-" in (answer.system_fingerprint or "")
    assert is_said == arithmetic["batch_invariant"]
    assert arithmetic["kernels"].startswith("C, ") or not is_said


def test_a_server_gives_the_same_answers(
    server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "found.json"
    url = f"http://{server.host}:{server.port}/v1"
    assert cli.main(["prove", "--peer", url, "--num-requests", "6", "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert found["engine"] == f"nanovllm at {url}"
    assert [verdict["way"] for verdict in found["verdicts"]] == [
        *("alone again", "2 at once", "8 at once", "64 at once")
    ]
    assert all(verdict["num_answers"] == 6 for verdict in found["verdicts"])


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["prove", "--peer", "http://127.0.0.1:9"]) == 2
    assert "is the server running?" in capsys.readouterr().err
