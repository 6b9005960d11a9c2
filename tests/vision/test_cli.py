"""Pictures in `nanovllm run`, `chat` and `generate`."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM
from nanovllm.apps.cli import main as cli
from nanovllm.apps.cli.repl import Chat, dropped_picture, model_source
from tests.vision.pictures import PARAMS, noise
from tests.vision.test_doors import chat

QUESTION = "What is it?"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a b.png"
    noise(24, 40, 5).save(path)
    return path


def test_a_conversation_about_a_picture(
    llm: LLM, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By /image, and by a path that is dropped; the second question still sees it."""
    params = PARAMS.clone(logprobs=None)
    picture = {"type": "image", "image": file}
    tokens, _ = chat(llm, picture)
    tokenizer: Any = llm.engine.input_processor.tokenizer
    expected = tokenizer.decode(tokens, skip_special_tokens=True)
    for line in (f"/image {file}", f"'{file}'", str(file).replace(" ", "\\ ")):
        conversation = Chat(model_source(llm, params, {}), None)
        conversation.run([line, QUESTION, "Why?"])
        out, err = capsys.readouterr()
        assert not err
        assert expected.strip() in out
        messages = conversation._messages(conversation._turns)
        assert [part["type"] for part in messages[0]["content"]] == ["image_url", "text"]
        assert messages[2]["content"] == "Why?"
    conversation.run(["/image", "/image no.png", "/regen"])
    assert "cannot read the picture 'no.png'" in capsys.readouterr().err


def test_a_line_that_names_no_picture(file: Path) -> None:
    assert dropped_picture("/etc/hosts") is None
    assert dropped_picture("no.png") is None
    assert dropped_picture(f"What is in {file}?") is None


def test_flags(qwen: Callable[[str], Path], file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = qwen("qwen3_vl")
    flags = "--temperature 0 --max-tokens 4 --max-model-len 384 --num-kvcache-blocks 64"
    for command in ("run", "generate --chat --model"):
        words = [*command.split(), str(path), "--image", str(file), *shlex.split(flags), QUESTION]
        assert cli.main(words) == 0
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert first == second
    assert cli.main(["run", str(path), "--image", "no.png", *shlex.split(flags), QUESTION]) == 2
    assert "cannot read the picture" in capsys.readouterr().err
