"""nanovllm's own clients with the server itself: `bench serve` and `chat --url`."""

import io
import json
import sys
from pathlib import Path

import pytest

from nanovllm.cli import main as cli
from tests.glossary import ANSWERS, QUESTIONS
from tests.server.conftest import Running


@pytest.mark.parametrize(
    ("flags", "num_requests"),
    [
        (["--random-prefix-len", "32", "--num-prefixes", "2", "--request-rate", "200"], 24),
        (["--endpoint", "/v1/chat/completions", "--num-turns", "2"], 48),
    ],
)
def test_bench_serve_measures_the_server(
    server: Running, tmp_path: Path, flags: list[str], num_requests: int
) -> None:
    saved = tmp_path / "load.json"
    flags += ["--num-prompts", "24", "--random-input-len", "20", "--random-output-len", "12"]
    flags += ["--max-concurrency", "8", "--ignore-eos", "--save-result", str(saved)]
    assert cli.main(["bench", "serve", "--url", server.url, *flags]) == 0
    found = json.loads(saved.read_text())
    assert (found["completed"], found["failed"]) == (num_requests, 0)
    assert found["output_lens"] == [12] * num_requests
    assert found["max_concurrent_requests"] <= 8
    if "--random-prefix-len" in flags:
        assert found["input_lens"] == [52] * num_requests
    for ttft, gaps, whole in zip(found["ttfts"], found["itls"], found["latencies"], strict=True):
        assert 0 < ttft <= whole
        assert 0 <= sum(gaps) <= whole - ttft + 1e-6
        assert len(gaps) < 12


def test_chat_url_gives_the_models_answers(
    server: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [QUESTIONS[0], QUESTIONS[5], "very " * 2000, "/reset", QUESTIONS[9]]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    assert cli.main(["chat", "--url", server.url]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [ANSWERS[index] for index in (0, 5, 9)]
    assert "the server answers 400: " in shown.err
    assert "1024" in shown.err
    assert "(/reset starts a new conversation)" in shown.err
