"""benchmarks.exactness compares the answers of another engine, and of a server."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.exactness.__main__ import engine_verdicts, main
from nanovllm import demo_model
from tests.wire_server import CLOSE, Asked, Step, WireServer, whole


@pytest.mark.long  # three processes import transformers
def test_transformers_computes_the_same_requests() -> None:
    ways = ["again", "of 2", "drafts"]
    found = engine_verdicts("transformers", sys.executable, demo_model.MODEL, 4, ways)
    verdicts = {verdict.way: verdict for verdict in found}
    assert verdicts.keys() == {"alone again", "batches of 2", "n-gram drafts"}
    assert all(verdict.num_answers == 4 for verdict in verdicts.values())
    assert verdicts["alone again"].status == "same"


def test_an_engine_that_is_not_there() -> None:
    with pytest.raises(SystemExit, match=f"vllm is not installed in {sys.executable}"):
        next(engine_verdicts("vllm", sys.executable, demo_model.MODEL, 4, []))


def completion(asked: Asked, logprobs: Any) -> list[Step]:
    choice = {"text": str(asked.body["seed"]), "logprobs": logprobs}
    return [(0.0, whole(200, {"choices": [choice]}))]


def ask(monkeypatch: pytest.MonkeyPatch, url: str, *more: str) -> int:
    monkeypatch.setattr(sys, "argv", ["exactness", url, "--num-requests", "4", *more])
    return main()


def test_a_server_without_log_probabilities(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with WireServer(lambda asked: completion(asked, None)) as wire:
        assert ask(monkeypatch, wire.url) == 0
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[0] for row in rows] == [
        *("| alone again", "| 2 at once", "| 8 at once", "| 64 at once")
    ]
    assert all("| same | 0 | 0 | 4 | texts only |" in row for row in rows)


def test_answers_of_other_lengths_differ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tokens are the same, but some have no log-probability the second time."""
    asked_before: set[int] = set()

    def script(asked: Asked) -> list[Step]:
        seed = asked.body["seed"]
        values = [-1.0] * (1 if seed == 2 and seed in asked_before else 2)
        asked_before.add(seed)
        return completion(asked, {"token_logprobs": values})

    with WireServer(script) as wire:
        assert ask(monkeypatch, wire.url, "--output", str(tmp_path / "found.json")) == 1
    verdicts = json.loads((tmp_path / "found.json").read_text())["verdicts"]
    assert [(each["num_different"], each["num_different_tokens"]) for each in verdicts] == [
        (1, 0)
    ] * 4


def test_a_server_that_breaks_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = iter(range(1000))

    def script(asked: Asked) -> list[Step]:
        return [CLOSE] if next(counter) > 9 else completion(asked, None)

    with WireServer(script) as wire, pytest.raises(SystemExit, match="disconnected"):
        ask(monkeypatch, wire.url)
