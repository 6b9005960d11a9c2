"""OpenAI's batch format: the server's own answers, the same in each run."""

import json
from pathlib import Path
from typing import Any

import pytest

from nanovllm.errors import ConfigError
from tests.batch.helpers import read_rows, row_options, run, write_rows
from tests.glossary import QUESTION

pytest.importorskip("fastapi")

from nanovllm.apps.batch.row_engine import problem_of
from nanovllm.apps.server.protocol import ChatRequest

CHAT = "/v1/chat/completions"


def line(custom_id: Any, url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def chat(custom_id: Any, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    return line(custom_id, messages=messages, max_tokens=8, temperature=2.0, **more)


ROOM = {"max_model_len": 512, "num_kvcache_blocks": 512}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
GOOD = [
    *(chat(f"chat-{i}") for i in range(4)),
    chat("own-seed", seed=1, logprobs=True, n=2),
    line("text", "/v1/completions", prompt=["A cache", "A block"], max_tokens=4, temperature=2.0),
    line("response", "/v1/responses", input=QUESTION, max_output_tokens=6, temperature=2.0),
    line("vectors", "/v1/embeddings", input=["A cache", "A block"], dimensions=4),
    line("scores", "/v1/score", text_1="A cache", text_2=["A cache", "A block"]),
    line("ranks", "/v1/rerank", query="A cache", documents=["A block", "A cache"], top_n=1),
    chat("model", model="model"),
    chat("no-seed", seed=-1),
    {**chat("call"), "body": {**chat("")["body"], "tools": [TOOL], "tool_choice": "required"}},
]
BAD: list[tuple[dict[str, Any] | str, str]] = [
    ("{bad", "not JSON"),
    (line(5), "custom_id must be a string"),
    (line("", messages=[]), "custom_id must be a string that is not empty"),
    ({"prompt": "x"}, 'a row needs a body, as in {"custom_id": "a", "url"'),
    ({**line("a"), "body": "x"}, "body must be an object, got 'x'"),
    ({**line("a"), "method": "GET"}, "method must be POST, got 'GET'"),
    (line("a", "/v1/images"), "url must be one of /v1/chat/completions, .*got '/v1/images'"),
    (line("a", "/v1/embeddings", input=["a", "too long " * 600]), r"input\[1\]: .*max_model_len"),
    ({**line("a"), "urll": 1}, "no field 'urll'; did you mean 'url'"),
    (line("a", mesages=[]), "no field 'mesages'; did you mean 'messages'"),
    (chat("a", stream=True), "stream must be false"),
    (chat("a", model="gpt-4o"), "the model 'gpt-4o' does not exist"),
    (line("a", "/v1/completions", prompt="too long " * 600), "max_model_len"),
    (chat("a", top_p=7), "top_p must be"),
]


def test_answers_and_errors(tmp_path: Path) -> None:
    bad = [
        {**row, "custom_id": f"a{i}"}
        if isinstance(row, dict) and row.get("custom_id") == "a"
        else row
        for i, (row, _) in enumerate(BAD)
    ]
    source = write_rows(tmp_path / "in.jsonl", [*GOOD, *bad])
    finished = run(source, tmp_path / "out.jsonl", engine_options=ROOM)
    assert (finished.num_rows, finished.num_failed) == (len(GOOD) + len(BAD), len(BAD))
    rows = read_rows(tmp_path / "out.jsonl")
    assert len({row["id"] for row in rows}) == len(rows)
    for row, given in zip(rows, GOOD, strict=False):
        assert (row["custom_id"], row["error"]) == (given["custom_id"], None)
        assert row["response"]["status_code"] == 200
    by_id = {row["custom_id"]: row["response"]["body"] for row in rows[: len(GOOD)]}
    assert len({by_id[f"chat-{i}"]["choices"][0]["message"]["content"] for i in range(4)}) > 1
    assert len(by_id["own-seed"]["choices"][1]["logprobs"]["content"]) == 8
    assert [choice["index"] for choice in by_id["text"]["choices"]] == [0, 1]
    assert by_id["response"]["output"][0]["content"][0]["text"]
    for row, (_, message) in zip(rows[len(GOOD) :], BAD, strict=True):
        assert row["response"]["status_code"] in (400, 404)
        assert row["response"]["body"]["error"]["message"] == row["error"]["message"]
        assert pytest.raises(AssertionError, match=message).matches(
            AssertionError(row["error"]["message"])
        )


def test_a_custom_id_that_is_there_twice(tmp_path: Path) -> None:
    """The first row that has it gets an answer."""
    rows = [chat("a"), chat("b"), line("c"), chat("a"), chat("c", n=2)]
    run(write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", engine_options=ROOM)
    errors = [row["error"] and row["error"]["message"] for row in read_rows(tmp_path / "out.jsonl")]
    assert errors[:2] == [None, None]
    assert "messages" in errors[2]
    assert errors[3] == "row 0 has the custom_id 'a', too: each needs its own"
    assert errors[4] == "row 2 has the custom_id 'c', too: each needs its own"


def test_the_error_of_a_row_is_the_same_in_each_process() -> None:
    """Symptom: of several unknown fields a set's order chose one, which each process has anew."""
    others = dict.fromkeys("zyxwvutsrqponm", 1)
    assert "no field 'm'" in (problem_of({"body": {}, **others}) or "")
    with pytest.raises(ValueError, match="no field 'm'"):
        ChatRequest.model_validate({"messages": [], **others})


def test_a_row_has_the_same_answer_in_any_batch(tmp_path: Path) -> None:
    """Bytes, with ids of calls and answers; one after another, and in another order."""
    one = {"max_model_len": 512, "num_kvcache_blocks": 64, "max_num_seqs": 1}
    source = write_rows(tmp_path / "in.jsonl", GOOD)
    run(source, tmp_path / "a.jsonl", engine_options=ROOM)
    run(source, tmp_path / "b.jsonl", engine_options=one)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    run(write_rows(source, GOOD[4::-1]), tmp_path / "c.jsonl", engine_options=ROOM)
    a, c = (
        [row["response"]["body"]["choices"] for row in read_rows(tmp_path / f"{name}.jsonl")[:5]]
        for name in "ac"
    )
    assert a == c[::-1]


def test_the_name_of_the_model_and_parsers(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", GOOD[:1])
    with pytest.raises(ConfigError, match="reasoning_parser must be one of auto, none, qwen3"):
        row_options(reasoning_parser="qwen")
    run(source, tmp_path / "out.jsonl", served_model_name="mine")
    assert json.loads((tmp_path / "out.jsonl").read_text())["response"]["body"]["model"] == "mine"


def test_the_template_and_the_parsers_of_a_batch(tmp_path: Path) -> None:
    """The template's answer is a call that one parser reads and another one leaves in the text."""
    call = '[TOOL_CALLS][{"name": "f", "arguments": {}}]'
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}<|im_start|>{{ m.role }}{% endfor %}")
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "structured_outputs": {"choice": [call]},
        "max_tokens": 64,
    }
    row = {"custom_id": "a", "url": "/v1/chat/completions", "body": body}
    source = write_rows(tmp_path / "in.jsonl", [row])
    counts = set()
    for name, has_calls in (("mistral", True), ("hermes", False)):
        for given in (None, str(template)):
            output = tmp_path / f"{name}{given is None}.jsonl"
            run(source, output, tool_call_parser=name, chat_template=given, engine_options=ROOM)
            (done,) = read_rows(output)
            answer = done["response"]["body"]
            counts.add((given is None, answer["usage"]["prompt_tokens"]))
            message = answer["choices"][0]["message"]
            assert bool(message.get("tool_calls")) == has_calls
            assert (message["content"] == call) != has_calls
    assert len(counts) == 2
