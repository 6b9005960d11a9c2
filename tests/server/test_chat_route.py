"""/v1/chat/completions by OpenAI's client, unmodified."""

import json
import math
from typing import Any

import pytest
from openai import OpenAI

from tests.glossary import ANSWERS, QUESTIONS
from tests.server.conftest import Running

MODEL = "model"
PATH = "/v1/chat/completions"


def question(index: int) -> list[Any]:
    return [{"role": "user", "content": QUESTIONS[index]}]


def test_answers_a_question(client: OpenAI) -> None:
    found = client.chat.completions.create(model=MODEL, messages=question(0))
    (choice,) = found.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == ANSWERS[0]
    assert choice.message.tool_calls is None
    assert choice.message.reasoning is None  # vLLM's field
    assert choice.finish_reason == "stop"
    assert found.id.startswith("chatcmpl-")
    assert found.object == "chat.completion"
    assert found.model == MODEL
    assert found.system_fingerprint
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens


def test_takes_text_parts(client: OpenAI) -> None:
    content = [{"type": "text", "text": QUESTIONS[1]}]
    messages: list[Any] = [{"role": "user", "content": content}]
    found = client.chat.completions.create(model=MODEL, messages=messages)
    assert found.choices[0].message.content == ANSWERS[1]


def test_logprobs(client: OpenAI) -> None:
    found = client.chat.completions.create(
        model=MODEL, messages=question(0), logprobs=True, top_logprobs=2, max_tokens=5
    )
    logprobs = found.choices[0].logprobs
    assert len(logprobs.content) == 5
    assert "".join(entry.token for entry in logprobs.content) == found.choices[0].message.content
    for entry in logprobs.content:
        assert entry.top_logprobs[0].token == entry.token  # it is the most likely one
        assert len(entry.top_logprobs) == 2
        assert bytes(entry.bytes or []).decode() == entry.token
        assert math.exp(entry.logprob) <= 1


def test_max_tokens_has_two_names(client: OpenAI) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        limit: Any = {name: 3}
        found = client.chat.completions.create(model=MODEL, messages=question(0), **limit)
        assert found.usage.completion_tokens == 3
        assert found.choices[0].finish_reason == "length"


def test_default_max_tokens_is_the_room_in_the_context(client: OpenAI, server: Running) -> None:
    found = client.chat.completions.create(
        model=MODEL, messages=question(0), extra_body={"ignore_eos": True}
    )
    assert found.usage.total_tokens == server.state.max_model_len
    assert found.choices[0].finish_reason == "length"


def test_continue_final_message(client: OpenAI) -> None:
    start = ANSWERS[0][:20]
    found = client.chat.completions.create(
        model=MODEL,
        messages=[*question(0), {"role": "assistant", "content": start}],
        extra_body={"add_generation_prompt": False, "continue_final_message": True},
    )
    assert start + (found.choices[0].message.content or "") == ANSWERS[0]


def test_chat_template_kwargs(client: OpenAI) -> None:
    """The template of the demo model closes the reasoning before the answer."""

    def num_prompt_tokens(**kwargs: Any) -> int:
        found = client.chat.completions.create(
            model=MODEL,
            messages=question(0),
            max_tokens=1,
            extra_body={"chat_template_kwargs": kwargs},
        )
        return found.usage.prompt_tokens

    assert num_prompt_tokens(enable_thinking=False) > num_prompt_tokens()


@pytest.mark.parametrize("shown", [True, False])
def test_reasoning_has_both_names_and_is_counted(server: Running, shown: bool) -> None:
    """The shipped model does not reason: a grammar makes it write the tags, which are tokens."""
    grammar = 'start: <think> "\\nThe user asks.\\n" </think> "\\n\\nLet me look."'
    asked = {"structured_outputs": {"grammar": grammar}, "include_reasoning": shown, "n": 2}
    found = server.send(PATH, {"messages": question(0), **asked}).body
    for choice in found["choices"]:
        message = choice["message"]
        assert message["content"] == "Let me look."
        assert message["reasoning"] == ("The user asks." if shown else None)
        assert message["reasoning_content"] == message["reasoning"]
    counted = found["usage"]["completion_tokens_details"]["reasoning_tokens"]
    tokenize = {"prompt": "The user asks."}
    assert counted == 2 * server.send("/tokenize", tokenize).body["count"]
    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    text = server.send(PATH, {"messages": question(0), **asked}).body
    events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    for name in ("reasoning", "reasoning_content"):
        said = "".join(delta.get(name, "") for delta in deltas)
        assert sorted(said) == sorted("The user asks." * 2 * shown)
    assert events[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": counted}
