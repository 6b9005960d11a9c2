"""What clients send as messages, and how it reaches templates that are particular."""

import json
from typing import Any

import pytest

from nanovllm import LLM
from nanovllm.chat.openai_messages import prepared
from nanovllm.errors import InvalidRequestError

USER: dict[str, Any] = {"role": "user", "content": "6*7?"}
SAID: dict[str, Any] = {"role": "assistant", "content": "It is 42."}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "c", "content": "42"}

MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.tool_calls is defined and m.tool_calls is not none %}"
    "[TOOL_CALLS]{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{# tools #}"
)
LLAMA = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at once') }}{% endif %}{{ m.tool_calls[0].function | tojson }}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}{# tools #}"
)
QWEN_CODER = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}<function={{ c.function.name }}>"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>{{ v }}{% endfor %}"
    "{% endfor %}{% endfor %}{# tools #}"
)
R1 = (  # the last of several system messages counts
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = m.content %}{% endif %}{% endfor %}{{ ns.system }}{% for m in messages %}"
    "{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
GEMMA2 = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}"
    "{% endfor %}"
)
CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def rendered(llm: LLM, template: str, *messages: Any, **options: Any) -> str:
    chat = llm.engine.input_processor.chat
    return chat.render(messages, {"chat_template": template, **options}).text


def called(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments, **more}
    return {"role": "assistant", "tool_calls": [{"id": "c", "function": function, **more}]}


@pytest.mark.parametrize("template", [MISTRAL, LLAMA])
@pytest.mark.parametrize(
    "more",
    [
        {"tool_calls": []},
        {"tool_calls": None, "function_call": {}},
        {"reasoning": "", "reasoning_content": "", "name": "", "refusal": "", "audio": {}},
    ],
)
def test_what_is_empty_is_as_if_it_were_not_there(
    demo_llm: LLM, template: str, more: dict[str, Any]
) -> None:
    """Symptom: beside "tool_calls": [] the text of a message left the prompt."""
    assert prepared([{**SAID, **more}]) == prepared([SAID])
    plain = rendered(demo_llm, template, USER, SAID, USER)
    assert SAID["content"] in plain
    assert rendered(demo_llm, template, USER, {**SAID, **more}, USER) == plain


def test_empty_tools_and_documents_are_as_none(demo_llm: LLM) -> None:
    template = "{{ tools is none }}{{ documents is none }}{{ messages[0].content }}{# tools #}"
    assert rendered(demo_llm, template, USER, tools=[], documents=[]) == "TrueTrue6*7?"


@pytest.mark.parametrize(
    "arguments", ['{"a": "He said "hi""}', '"é"', "[1]", "a\nb", '{"a": 1, "a": 2}', '{"a": 1e999}']
)
@pytest.mark.parametrize("template", [MISTRAL, LLAMA, QWEN_CODER])
def test_arguments_that_are_no_object_are_in_the_prompt(
    demo_llm: LLM, template: str, arguments: str
) -> None:
    text = rendered(demo_llm, template, USER, called(arguments), {**USER, "content": "again"})
    assert "again" in text
    assert arguments in text or json.dumps(arguments, ensure_ascii=False)[1:-1] in text


def test_several_calls_for_gpt_oss_get_a_message_each_before_its_result(demo_llm: LLM) -> None:
    """Symptom: its template shows the first call of a message, and the others are lost."""
    calls = [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in "abcd"]
    results = [{"role": "tool", "tool_call_id": name, "content": f"<{name}>"} for name in "dba"]
    asked = {"role": "assistant", "content": "Let me look.", "tool_calls": calls}
    template = (
        "{# <|channel|> <|message|> #}{% for m in messages %}"
        "{{ m.tool_calls[0].function.name if m.tool_calls else m.content }}{% endfor %}"
    )
    text = rendered(demo_llm, template, USER, asked, *results, SAID)
    assert text == "6*7?a<a>b<b>cd<d>It is 42."


def test_what_client_libraries_add_to_a_call_is_left_out(demo_llm: LLM) -> None:
    more = {"parsed_arguments": {"a": 1}, "provider_specific_fields": None, "extra_content": {}}
    (message,) = prepared([called('{"a": 1}', **more)])
    assert message["tool_calls"] == [{"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}]
    (old,) = prepared([{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}])
    assert old["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    (message,) = prepared([{"role": "assistant", "content": None, "refusal": "No."}])
    assert message["content"] == "No."
    for nothing in ("", " ", None, "null", {}, "{}"):
        (message,) = prepared([called(nothing)])
        assert message["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    "thought",
    [
        {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}], "closed": True},
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "reasoning", "reasoning": "Hm."},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
    ],
)
def test_thoughts_among_the_parts_of_an_answer_are_reasoning(thought: dict[str, Any]) -> None:
    """As Mistral's and Anthropic's answers have them, which agents keep."""
    hidden = {"type": "redacted_thinking", "data": "x"}
    parts = [thought, hidden, {"type": "text", "text": "42"}]
    (message,) = prepared([{"role": "assistant", "content": parts}])
    assert (message["content"], message["reasoning"]) == ("42", "Hm.")
    assert message["reasoning_content"] == "Hm."
    with pytest.raises(InvalidRequestError, match="content part of type"):
        prepared([{"role": "user", "content": parts}])


@pytest.mark.parametrize("template", [QWEN_CODER, R1, GEMMA2, CHATML])
@pytest.mark.parametrize("late", [False, True])
def test_every_system_message_is_in_the_prompt(demo_llm: LLM, template: str, late: bool) -> None:
    """Symptom: 400 for each request, or the first message is lost."""
    systems = [{"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Go."}]
    turns = [USER, SAID, {**USER, "content": "And 7*7?"}]
    messages = [systems[0], *turns[:2], systems[1], turns[2]] if late else [*systems, *turns]
    text = rendered(demo_llm, template, *messages)
    for message in messages:
        assert text.count(message["content"]) == 1
    if template is CHATML:  # takes them as they are
        assert text.count("<system>") == 2
    elif late:
        assert text.endswith("Go.\n\nAnd 7*7?")
    else:
        end = "\n\n6*7?" if template is GEMMA2 else ""
        assert f"Be brief.\n\nGo.{end}" in text


@pytest.mark.parametrize("template", [QWEN_CODER, R1, GEMMA2, CHATML])
def test_a_system_message_of_a_later_turn_changes_nothing_before_it(
    demo_llm: LLM, template: str
) -> None:
    """Symptom: each turn of an agent that ends its results so computed the whole conversation."""
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, USER]
    before = ""
    for turn in range(4):
        messages.append({"role": "system", "content": f"{9 - turn} tokens left"})
        text = rendered(demo_llm, template, *messages)
        assert text.startswith(before)
        assert all(message["content"] in text for message in messages if "content" in message)
        before = text
        between = {"role": "system", "content": f"Between {turn}."}
        messages += [SAID, USER] if template is GEMMA2 else [called({}), between, RESULT]


def test_tools_for_a_template_without_a_system_role(demo_llm: LLM) -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    text = rendered(demo_llm, GEMMA2, USER, tools=tools)
    assert '"name": "weather"' in text
    assert text.endswith("6*7?")


def test_a_refusal_of_all_forms_is_the_first(demo_llm: LLM) -> None:
    template = "{% for m in messages %}{{ raise_exception(m.content) }}{% endfor %}"
    messages = [{"role": "system", "content": "one"}, {"role": "system", "content": "two"}]
    with pytest.raises(InvalidRequestError, match="render this: one$"):
        rendered(demo_llm, template, *messages)


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ({"role": "user"}, "message 0: the content must be a string or a list of parts, got None"),
        ({"role": "assistant", "tool_calls": 5}, "message 0: tool_calls must be a list, got 5"),
        ({"role": "assistant", "tool_calls": [5]}, r"message 0: tool_calls\[0\] must be "),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "has no function's name"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}, "has no function's"),
    ],
)
def test_bad_messages_are_refused_by_name(message: Any, what: str) -> None:
    with pytest.raises(InvalidRequestError, match=what):
        prepared([message])
