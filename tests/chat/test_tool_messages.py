"""Tools and tool calls in conversations, for templates that know them and for those that do not."""

import json
from typing import Any

from nanovllm import LLM
from tests.server.output_parsers.helpers import parse

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def call(arguments: str, call_id: str = "call_1") -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": [call('{"a": [1, "é"]}'), call("")]},
    {"role": "tool", "tool_call_id": "call_1", "name": "f", "content": "sun"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "rain"}]},
    {"role": "assistant", "reasoning": "Hm.", "content": "Both."},
]


def render(llm: LLM, conversation: list[dict[str, Any]], **options: Any) -> str:
    token_ids = llm.render(conversation, add_generation_prompt=False, **options)
    return llm.get_tokenizer().decode(token_ids)


def test_templates_get_every_field_of_a_turn(demo_llm: LLM) -> None:
    template = (
        "{% for m in messages %}{{ m.role }},{{ m.content }},{{ m.name }},{{ m.tool_call_id }},"
        "{{ m.reasoning_content }},{% for c in m.tool_calls %}{{ c.id }}{{ c.function | tojson }}"
        "{% endfor %}|{% endfor %}"
    )
    long = "[" * 100_000
    message = {"role": "assistant", "tool_calls": [call(long)]}
    assert (
        f'"{long}"'
        in demo_llm.engine.input_processor.chat.render([message], {"chat_template": template}).text
    )
    assert render(demo_llm, CONVERSATION, chat_template=template) == (
        'user,Hi,,,,|assistant,,,,,call_1{"name": "f", "arguments": {"a": [1, "é"]}}'
        'call_1{"name": "f", "arguments": {}}|tool,sun,f,call_1,,|'
        "tool,rain,,call_2,,|assistant,Both.,,,Hm.,|"
    )


def test_a_template_without_tools_gets_them_as_text(demo_llm: LLM) -> None:
    text = render(demo_llm, CONVERSATION, tools=[TOOL])
    system, user, assistant, results, last = text.split("<|im_end|>\n")[:5]
    assert system.startswith("<|im_start|>system\n# Tools\n")
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in system
    assert user == "<|im_start|>user\nHi"
    assert results == (
        "<|im_start|>user\n<tool_response>\nsun\n</tool_response>\n"
        "<tool_response>\nrain\n</tool_response>"
    )
    assert last == "<|im_start|>assistant\nBoth."
    assistant = assistant.removeprefix("<|im_start|>assistant\n")
    assert parse("hermes", [assistant]) == [("f", '{"a": [1, "é"]}'), ("f", "{}")]


def test_tools_are_added_to_the_system_message(demo_llm: LLM) -> None:
    conversation: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    text = render(demo_llm, conversation, tools=[TOOL])
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert "Tools" not in render(demo_llm, conversation)
    assert conversation[0]["content"] == "Be brief."


def test_templates_of_lfm2(demo_llm: LLM) -> None:
    """Most know no calls: then these become text, as the model writes it."""
    template = (
        "List of tools: [{% for t in tools %}{{ t.function.name }}{% endfor %}]"
        "{% for m in messages %}{{ m.role }}:{{ m.thinking }}{{ m.content }}CALLS#{% endfor %}"
    )
    plain = render(demo_llm, CONVERSATION, tools=[TOOL], chat_template=template)
    user, assistant, _, _, last, _ = plain.split("#")
    assert (user, last) == ("List of tools: [f]user:HiCALLS", "assistant:Hm.Both.CALLS")
    calls = [call for call in parse("lfm2", [assistant]) if isinstance(call, tuple)]
    assert calls == [("f", '{"a": [1, "é"]}'), ("f", "{}")]
    template = template.replace("CALLS", "{{ m.tool_calls | tojson if m.tool_calls else '' }}")
    known = render(demo_llm, CONVERSATION, tools=[TOOL], chat_template=template)
    assert '"arguments": {"a": [1, "é"]}' in known
    assert "tool_call_start" not in known
