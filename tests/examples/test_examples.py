"""Each script in examples/ runs to its end on a model that is here, and shows what it promises."""

import builtins
import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator

import pytest

from nanovllm import AsyncLLM, demo_model
from tests.glossary import ANSWER_TO, QUESTION
from tests.helpers import HAS_GRAMMARS, ROOT

EXAMPLES = ROOT / "examples"
KV_CACHE = " what stores the attention keys and values of every token processed so far"

Run = Callable[..., list[str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs an example in this process and returns the lines it prints."""

    def run_example(name: str, *arguments: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", [f"examples/{name}.py", *arguments])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run_example


def test_chat(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second question is answered after the first one, and an empty line ends the chat."""
    questions = iter([QUESTION, "What is a KV cache?", ""])
    monkeypatch.setattr(builtins, "input", lambda prompt: next(questions))
    first, second = run("chat")
    assert "fixed-size blocks" in first
    assert "keys and values" in second
    assert next(questions, None) is None


def test_batch(run: Run) -> None:
    lines = run("batch")
    assert lines[0] == f"paged attention: {ANSWER_TO[QUESTION]}"
    assert len({line[3:] for line in lines[6:9]}) == 3, "three different texts of one prompt"
    assert lines[9].endswith("ended by stop")


def test_lora(run: Run) -> None:
    without, adapted = run("lora")
    assert without.startswith(f"without: {KV_CACHE}")
    assert adapted.startswith("with mine: ")
    assert KV_CACHE not in adapted


@pytest.mark.skipif(not HAS_GRAMMARS, reason="needs the extra 'structured'")
def test_structured(run: Run) -> None:
    schema, parsed, expression, choice, grammar = run("structured")
    book = json.loads(schema.removeprefix("a JSON schema: "))
    assert [*book] == ["title", "year", "kind"]
    assert parsed.endswith(repr(book))
    assert len(expression.partition(": ")[2].split("-")) == 3
    assert choice.partition(": ")[2] in ("positive", "negative")
    assert grammar.partition(": ")[2].startswith(("yes", "no"))


def test_speculation(run: Run) -> None:
    *ways, text = run("speculation", demo_model.MODEL)
    counts = [[int(n) for n in re.findall(r"(\d+) (?:tokens|steps)", way)] for way in ways]
    (tokens, steps), (same_tokens, fewer_steps) = counts
    assert tokens == steps == same_tokens >= fewer_steps
    assert text.startswith("1 text: ")


def test_vision(run: Run) -> None:
    """The answers are right: the shipped model reads what the example draws."""
    pytest.importorskip("PIL")
    assert run("vision") == [
        "What do you see? A red circle at the top left, a blue square at the top right "
        "and an orange triangle at the bottom left.",
        "Where is the blue square? At the top right.",
        "What colour is the triangle? Orange.",
        "How many circles are there? One.",
    ]


@pytest.fixture
def url() -> Iterator[str]:
    """The address of a server of the shipped model."""
    from tests.server.conftest import running

    llm = AsyncLLM(demo_model.MODEL)
    with running(llm) as server:
        yield server.url
    llm.shutdown()


def test_server_client(run: Run, url: str) -> None:
    pytest.importorskip("openai")
    lines = run("server_client", url)
    assert lines[0].startswith("model: ")
    assert lines[1] == ANSWER_TO[QUESTION]
    assert lines[2].endswith(" tokens")
    assert KV_CACHE[:20] in "\n".join(lines[3:])


def test_embed(monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("fastapi.testclient")
    monkeypatch.setattr(sys, "argv", ["examples/embed.py"])
    app = runpy.run_path(str(EXAMPLES / "embed.py"))["app"]
    with client.TestClient(app) as browser:
        reply = browser.get("/explain", params={"term": "paged attention"})
    assert reply.status_code == 200
    assert reply.text == ANSWER_TO[QUESTION]
