"""What a server says of its arithmetic, and `nanovllm prove --peer URL` beside it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from nanovllm.apps.cli import main as cli
from tests.server.conftest import Running
from tests.wire_server import CLOSE, Asked, Step, WireServer, whole


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


def completion(asked: Asked, logprobs: Any) -> list[Step]:
    choice = {"text": str(asked.body["seed"]), "logprobs": logprobs}
    return [(0.0, whole(200, {"choices": [choice]}))]


def prove(url: str) -> int:
    return cli.main(["prove", "--peer", url, "--num-requests", "4"])


def test_a_server_without_log_probabilities(capsys: pytest.CaptureFixture[str]) -> None:
    with WireServer(lambda asked: completion(asked, None)) as wire:
        assert prove(wire.url) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all("texts only" in line for line in lines if "at once" in line)


def test_answers_of_other_lengths_differ(capsys: pytest.CaptureFixture[str]) -> None:
    """The tokens are the same, but some have no log-probability the second time."""
    asked_before: set[int] = set()

    def script(asked: Asked) -> list[Step]:
        seed = asked.body["seed"]
        values = [-1.0] * (1 if seed == 2 and seed in asked_before else 2)
        asked_before.add(seed)
        return completion(asked, {"token_logprobs": values})

    with WireServer(script) as wire:
        assert prove(wire.url) == 1
    assert "1 of 4 differ, 0 in tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda asked: [CLOSE], "is the server running?"),
        (lambda asked: [(0.0, b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"), CLOSE], "closed"),
        (lambda asked: [(0.0, whole(503, {"error": "dying"}))], 'status 503: {"error": "dying"}'),
        (lambda asked: completion(asked, {"token_logprobs": [float("nan")]}), "is NaN"),
        (lambda asked: completion(asked, {"token_logprobs": [None]}), "not an answer of OpenAI's"),
        (lambda asked: [(0.0, whole(200, {"choices": []}))], "not an answer of OpenAI's API"),
        (lambda asked: [(0.0, whole(200, ["choices"]))], "not an answer of OpenAI's API"),
    ],
)
def test_a_server_that_breaks_in_the_middle(
    answer: Callable[[Asked], list[Step]], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    counter = iter(range(1000))

    def script(asked: Asked) -> list[Step]:
        return answer(asked) if next(counter) > 9 else completion(asked, None)

    with WireServer(script) as wire:
        assert prove(wire.url) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
