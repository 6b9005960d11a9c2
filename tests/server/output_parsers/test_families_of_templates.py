"""What a conversation has stands in the prompt, whatever the template of the model's family shows.

Beside transformers: where its `apply_chat_template` shows all, the text is the same.
"""

import json
import re
import resource
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm.apps.server.output_parsers import tool_formats
from nanovllm.apps.server.output_parsers.channels import MuseParser
from nanovllm.apps.server.output_parsers.parts import ToolCallArguments, ToolCallStart
from nanovllm.apps.server.output_parsers.tool_formats import find_tool_format
from nanovllm.apps.server.protocol import Tool
from nanovllm.chat.templates import ChatTemplates
from nanovllm.errors import InvalidRequestError
from tests.chat.family_templates import TEMPLATES

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
DAYS = {"type": "integer", "description": "How many"}
CITY = {"type": "string", "description": "Where"}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    function = {"name": name, "description": f"Does {name}", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [tool("find_weather", city=CITY, days=DAYS), tool("book_room", city=CITY)]


def call(name: str, number: int = 1, **arguments: Any) -> dict[str, Any]:
    text = json.dumps(arguments, ensure_ascii=False)
    function = {"name": name, "arguments": text}
    return {"id": f"calls{number:04}", "type": "function", "function": function}


def calling(*calls: dict[str, Any], content: str | None = None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **more}


def result(content: str, number: int = 1) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"calls{number:04}", "content": content}


SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "How is Rome?"}
AGAIN = {"role": "user", "content": "And Oslo?"}
ANSWER = {"role": "assistant", "content": "It is warm there."}
ROME = calling(call("find_weather", city="Perugia", days=37))
BOOK = calling(call("book_room", 2, city='Ost"en', note="é\n{x}"))
SUN, FULL = result("31 degrees"), result("fully booked", 2)

CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "a question": ([ASKED], False),
    "a system message": ([SYSTEM, ASKED, ANSWER, AGAIN], False),
    "tools": ([ASKED], True),
    "tools and a system message": ([SYSTEM, ASKED], True),
    "tools in a later turn": ([ASKED, ANSWER, AGAIN], True),
    "a result": ([ASKED, ROME, SUN], True),
    "a round": ([ASKED, ROME, SUN, ANSWER, AGAIN], True),
    "a round with a system message": ([SYSTEM, ASKED, ROME, SUN, ANSWER, AGAIN], True),
    "a call without arguments": ([ASKED, calling(call("list_rooms")), SUN], True),
    "arguments of all kinds": (
        [ASKED, calling(call("find_weather", a=[41, 2.5, None], b={"c": True}, d="x'y")), SUN],
        True,
    ),
    "text beside a call": ([ASKED, {**ROME, "content": "Let me look."}, SUN], True),
    "two calls one after the other": ([ASKED, ROME, SUN, BOOK, FULL, ANSWER, AGAIN], True),
    "two calls at once": (
        [ASKED, calling(*ROME["tool_calls"], *BOOK["tool_calls"]), SUN, FULL, ANSWER, AGAIN],
        True,
    ),
    "calls of an earlier request": ([ASKED, ROME, SUN, ANSWER, AGAIN], False),
}


class Tokenizer(SimpleNamespace):
    """The part of a tokenizer that templates need."""

    special_tokens_map = TOKENS
    chat_template = None

    def get_chat_template(self, chat_template: str, tools: Any = None) -> str:
        return chat_template


@pytest.fixture(scope="module")
def chat() -> Iterator[ChatTemplates]:
    made = ChatTemplates(Tokenizer())  # type: ignore[arg-type]
    yield made
    made.shutdown()


def render(chat: ChatTemplates, family: str, conversation: list[Any], tools: Any) -> str:
    options = {"chat_template": TEMPLATES[family], "tools": tools, "add_generation_prompt": True}
    return chat.render(conversation, options).text


def reference(family: str, conversation: list[dict[str, Any]], tools: Any) -> str | None:
    """Return transformers' text; None if it cannot render the conversation."""
    from transformers.utils.chat_template_utils import render_jinja_template

    plain = json.loads(json.dumps(conversation))
    for message in plain:
        message["content"] = message["content"] or ""
        for each in message.get("tool_calls", ()):
            each["function"]["arguments"] = json.loads(each["function"]["arguments"])
    try:
        texts, _ = render_jinja_template(
            [plain],
            tools=tools,
            chat_template=TEMPLATES[family],
            add_generation_prompt=True,
            **TOKENS,
        )
    except Exception:
        return None
    return str(texts[0])


def is_in(text: str, value: Any) -> bool:
    """Whether a text has a value of arguments, in some notation."""
    if isinstance(value, str):
        quoted = json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]
        return any(form in text for form in (value, *quoted))
    if isinstance(value, dict):
        return all(is_in(text, inner) for item in value.items() for inner in item)
    if isinstance(value, list):
        return all(is_in(text, inner) for inner in value)
    return json.dumps(value) in text or str(value) in text


def has_all(text: str, conversation: list[dict[str, Any]], tools: Any) -> bool:
    """Whether tools, calls and results are in a text, and what was said without a call."""
    expected: list[Any] = [each["function"]["name"] for each in tools or ()]
    for message in conversation:
        calls = message.get("tool_calls", ())
        expected += [] if message["content"] is None else [message["content"]]
        for each in calls:
            function = each["function"]
            expected += [function["name"], json.loads(function["arguments"])]
    return all(is_in(text, value) for value in expected)


@pytest.mark.parametrize("family", TEMPLATES)
def test_what_a_conversation_has_is_in_the_prompt(chat: ChatTemplates, family: str) -> None:
    for name, (conversation, has_tools) in CONVERSATIONS.items():
        tools = TOOLS if has_tools else None
        text = render(chat, family, conversation, tools)
        assert has_all(text, conversation, tools), (name, text)
        expected = None if family == "Kimi" else reference(family, conversation, tools)
        if expected is not None and has_all(expected, conversation, tools):
            assert text == expected, name


OWN = {"SmolLM2, Qwen 1.5", "DeepSeek-R1-Distill", "Gemma 2", "Gemma 3", "Llama 3", "Mistral 7B"}
OWN |= {"Phi-3, Phi-4"}
"""Families whose templates show no tools."""


@pytest.mark.parametrize("family", TEMPLATES)
def test_which_templates_show_tools(chat: ChatTemplates, family: str) -> None:
    assert (chat.shape(TEMPLATES[family]).tools is not None) == (family not in OWN)


FORMATS = {
    "Qwen 2.5, Qwen 3": "HERMES",
    "Qwen 3.5": "TAGGED",
    "SmolLM3": "HERMES",
    "Granite 3.0": "GRANITE",
    "Granite 3.3": "GRANITE",
    "Gemma 4": "GEMMA4",
    "Llama 3.1": "LLAMA",
    "Llama 3.2 pythonic": "LLAMA_PYTHONIC",
    "functionary": None,
    "Mistral Nemo": "MISTRAL",
    "Mistral Small": "MISTRAL_ARGS",
    "Phi-4-mini": "PHI4_MINI_TAGS",
    "LFM2": "PYTHONIC",
    "LFM2.5": "PYTHONIC",
    "HunYuan A13B": "HUNYUAN_LIST",
    "Olmo 3 Think": "OLMO3",
    "Muse Glimmer": "MUSE_GLIMMER",
    "GLM 4.5, Laguna": "GLM",
    "Kimi": "KIMI",
    "DeepSeek V3": "DEEPSEEK3",
    "Command R7B": "COHERE",
    **dict.fromkeys(OWN, "HERMES"),
}
"""The formats of the families' calls."""


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_parser_reads_what_the_prompt_shows(chat: ChatTemplates, family: str) -> None:
    """The model writes calls as it sees them: the parser finds those of the prompt in it."""
    template = TEMPLATES[family]
    found = find_tool_format(template, chat.shape(template))
    name = FORMATS[family]
    assert found is (None if name is None else getattr(tool_formats, name))
    if found is None:
        return
    functions = [Tool.model_construct(**each["function"]) for each in TOOLS]
    beside = {**ROME, "content": "Let me look."}
    for message in (ROME,) if name == "LLAMA_PYTHONIC" else (ROME, beside):
        before = render(chat, family, [ASKED], TOOLS).rstrip().removesuffix("<think>")
        text = render(chat, family, [ASKED, message, SUN], TOOLS)
        assert text.startswith(before)
        is_muse = family == "Muse Glimmer"
        parser = MuseParser(functions=functions) if is_muse else found.parser(found.tags, functions)
        parts = parser.feed(text.removeprefix(before)) + parser.finish(cut=False)
        assert [part.name for part in parts if isinstance(part, ToolCallStart)] == ["find_weather"]
        written = "".join(part.text for part in parts if isinstance(part, ToolCallArguments))
        assert json.loads(written) == {"city": "Perugia", "days": 37}


@pytest.mark.parametrize("family", TEMPLATES)
def test_tools_need_no_description(chat: ChatTemplates, family: str) -> None:
    bare = [{"type": "function", "function": {"name": "list_rooms"}}]
    assert "list_rooms" in render(chat, family, [ASKED], bare)


def test_a_template_that_never_ends_is_tried_once() -> None:
    chat = ChatTemplates(Tokenizer())  # type: ignore[arg-type]
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    options = {"chat_template": f"{{# tools #}}{loop}", "tools": TOOLS}
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with pytest.raises(InvalidRequestError, match="more than 1 s of processor time"):
        chat.render([ASKED], options)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 2
    assert chat.shape("{% for %} tools").tools is None  # it is refused where it is rendered
    chat.shutdown()


def test_options_of_a_template_go_before_tools(chat: ChatTemplates) -> None:
    options = {"chat_template": TEMPLATES["SmolLM3"], "tools": TOOLS, "xml_tools": ["mine"]}
    text = chat.render([ASKED], options).text
    assert "mine" in text
    assert "find_weather" not in text


def test_kimi_has_the_names_of_functions_in_ids(chat: ChatTemplates) -> None:
    """Its template writes no name: a call with another id would be of no function."""
    both = calling(*ROME["tool_calls"], *BOOK["tool_calls"])
    named = calling({**ROME["tool_calls"][0], "id": "functions.find_weather:7"})
    answered = {**SUN, "tool_call_id": "functions.find_weather:7"}
    nameless = {"role": "tool", "content": "cloudy"}
    said = [ASKED, both, FULL, SUN, ANSWER, AGAIN, named, answered, ROME, nameless]
    text = render(chat, "Kimi", said, TOOLS)
    calls = re.findall(r"<\|tool_call_begin\|>(.*?)<\|tool_call_argument_begin\|>", text)
    first, second, third, last = calls
    assert (first, second) == ("functions.find_weather:0", "functions.book_room:1")
    assert (third, last) == ("functions.find_weather:7", "functions.find_weather:3")
    results = [(second, "fully"), (first, "31"), (third, "31"), (last, "cloudy")]
    assert re.findall(r"Return of (.*)\n(\w+)", text) == results


@pytest.mark.parametrize("family", ["Llama 3.1", "Llama 3.2 pythonic", "Muse Glimmer"])
def test_what_a_template_takes_one_by_one_becomes_messages(
    chat: ChatTemplates, family: str
) -> None:
    """Symptom: an answer of ours with two calls is refused when it is sent back."""
    both = {
        **ROME,
        "content": "Let me look.",
        "tool_calls": [*ROME["tool_calls"], *BOOK["tool_calls"]],
    }
    text = render(chat, family, [ASKED, {**both, "reasoning": "Hm."}, SUN, FULL], TOOLS)
    says = {"role": "assistant", "content": "Let me look.", "reasoning": "Hm."}
    pieces = [says, ROME, BOOK] if family == "Llama 3.1" else [says, {**both, "content": None}]
    assert text == render(chat, family, [ASKED, *pieces, SUN, FULL], TOOLS)
    assert text.index("Let me look.") < text.index("Perugia") < text.index("31 degrees")
