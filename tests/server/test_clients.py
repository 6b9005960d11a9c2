"""nanovllm's own client with the server itself: `chat --url`."""

import io
import sys

import pytest

from nanovllm.apps.cli import main as cli
from tests.glossary import ANSWERS, QUESTIONS
from tests.server.conftest import Running


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
