"""Whole answers: the format of a model, its parser and its grammars."""

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from nanovllm import SamplingParams, demo_model
from nanovllm.apps.server.conversation import AnswerReader
from nanovllm.apps.server.output_parsers.answer_format import (
    AnswerFormat,
    ToolChoice,
    find_answer_format,
)
from nanovllm.apps.server.output_parsers.parts import (
    Part,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from nanovllm.apps.server.protocol import ChatRequest, FunctionName, Tool
from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.errors import ConfigError, InvalidRequestError
from nanovllm.features.structured.grammar import GrammarCompiler
from nanovllm.options.sampling_params import TOKEN_MARK
from nanovllm.options.structured_outputs import structured_outputs
from nanovllm.outputs import CompletionOutput
from tests.server.output_parsers.helpers import split

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    Tool.model_construct(name="weather", parameters=CITY),
    Tool.model_construct(name="now", parameters=None),
]
STRICT = [TOOLS[0].model_copy(update={"strict": True}), TOOLS[1]]
QWEN = "{% if tools %}<tool_call>{% endif %}{{ m.reasoning_content }}<think></think>"
MAY_THINK = "<think>\n\n</think>"
LLAMA = "{% if tools %}<|python_tag|>{% endif %}"
MISTRAL = "{% if tools %}[TOOL_CALLS] {% endif %}"
QWEN35 = (
    "{% if tools %}<tool_call><function=f>{% endif %}{{ m.reasoning_content }}<think>\n</think>"
)
LFM2 = "{% if tools %}<|tool_list_start|>{% endif %}"
MISTRAL_ARGS = "{% if tools %}[TOOL_CALLS]f[ARGS]{% endif %}"
TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|end|>"]


def make_tokenizer(*, special: bool) -> Tokenizer:
    """Return the shipped tokenizer with the tags as tokens of their own."""
    tokenizer = Tokenizer.from_file(str(Path(demo_model.MODEL) / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in TAGS])
    return tokenizer


TOKENIZERS: dict[bool | str, Tokenizer] = {
    special: make_tokenizer(special=special) for special in (False, True)
}
TOKENIZERS["plain"] = Tokenizer.from_file(str(Path(demo_model.MODEL) / "tokenizer.json"))
COMPILERS = {
    kind: GrammarCompiler(made.to_str, made.get_vocab_size(), (made.token_to_id("<|im_end|>"),))
    for kind, made in TOKENIZERS.items()
}


def answer_format(template: str, *, special: bool = False) -> AnswerFormat:
    added = TOKENIZERS[special].get_added_tokens_decoder()
    return find_answer_format(template, "auto", "auto", added)


class Grammar:
    """What an answer must be."""

    def __init__(
        self, params: SamplingParams, *, special: bool = False, without_tags: bool = False
    ) -> None:
        kind = "plain" if without_tags else special
        self._tokenizer = TOKENIZERS[kind]
        compiler = COMPILERS[kind]
        assert params.structured_outputs is not None
        self._matcher = compiler.matcher(structured_outputs(params.structured_outputs))

    def takes(self, text: str) -> bool:
        """Whether a text is a whole answer."""
        token_ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        matcher = self._matcher.deep_copy()
        if matcher.try_consume_tokens(token_ids) < len(token_ids):
            return False
        return bool(matcher.is_accepting())


def calls(
    template: str,
    tool_choice: ToolChoice,
    *,
    special: bool = False,
    tools: Sequence[Any] = TOOLS,
    **options: Any,
) -> Grammar:
    """Return what makes an answer call tools."""
    form = answer_format(template, special=special).tool_grammar(tools, tool_choice, **options)
    return Grammar(SamplingParams(structured_outputs=form), special=special)


def parse(parser_of: AnswerFormat, text: str, *, prompt: str = "", cut: bool = False) -> list[Part]:
    parser = parser_of.parser(prompt, TOOLS)
    return [*parser.feed(decoded(parser_of, text)), *parser.finish(cut=cut)]


def decoded(parser_of: AnswerFormat, text: str) -> str:
    """Return a text as the engine decodes it where its tags are tokens."""
    params = parser_of.params(SamplingParams(), "", TOOLS, "auto")
    for token_id in params.kept_token_ids:
        tag = TOKENIZERS[True].id_to_token(token_id)
        text = text.replace(tag, TOKEN_MARK + tag)
    return text


JSON_CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'
JSON_NOW = '{"name": "now", "arguments": {}}'
HERMES_CALL = f"<tool_call>\n{JSON_CALL}\n</tool_call>"
LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Rome"}}'
MUSE_MARKS = "<atem:function_calls> to=self<|message|>"
MUSE_NEXT = "<|eom|><|start|>assistant"


def pair(
    begin: str, end: str, between: str | None = None, call: str = JSON_CALL, now: str = JSON_NOW
) -> tuple[str, str]:
    """Return an answer with a call, and one with two.

    Args:
        between: what stands between calls; None if each is between `begin` and `end`.
    """
    between = end + begin if between is None else between
    return f"{begin}{call}{end}", f"{begin}{call}{between}{now}{end}"


def by_name(call: str) -> dict[str, str]:
    """Return both calls, where one has the name NAME and ARGUMENTS."""
    filled = (
        call.replace("NAME", name).replace("ARGUMENTS", arguments).replace("NUMBER", str(index))
        for index, (name, arguments) in enumerate((("weather", '{"city": "Rome"}'), ("now", "{}")))
    )
    return dict(zip(("call", "now"), filled, strict=True))


HERMES = pair("<tool_call>\n", "\n</tool_call>", "\n</tool_call>\n<tool_call>\n")
SEED = pair("<seed:tool_call>\n", "\n</seed:tool_call>", "\n</seed:tool_call>\n<seed:tool_call>\n")
MINIMAX = tuple(text.replace("seed:", "minimax:") for text in SEED)
DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK_CALL = by_name("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>")
BLOCK = by_name(
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>"
)
KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
KIMI_CALL = by_name(
    "<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>"
)
COHERE_CALL = by_name('{"tool_call_id": "NUMBER", "tool_name": "NAME", "parameters": ARGUMENTS}')
GEMMA_CALL = by_name("<start_function_call>call:NAMEARGUMENTS<end_function_call>")
HUNYUAN_CALL = by_name("<tool_call>NAME\n```json\nARGUMENTS\n```</tool_call>")
MUSE_CALL = by_name(
    ' to=NAME<|message|><atem:function_calls>\n<atem:invoke name="NAME">\nARGUMENTS\n'
    "</atem:invoke>\n</atem:function_calls>"
)

CALLS = [  # a template, and answers
    (QWEN, *HERMES),
    (QWEN35, *HERMES),
    (LFM2, *pair("<|tool_call_start|>[", "]<|tool_call_end|>", ", ")),
    (LLAMA, *(text.replace("arguments", "parameters") for text in pair("", "", "; "))),
    (MISTRAL, *pair("[TOOL_CALLS][", "]", ", ")),
    (MISTRAL_ARGS, *pair("[TOOL_CALLS]", "", **by_name("NAME[ARGS]ARGUMENTS"))),
]
FORMATS = {  # marks of a template, and answers
    "muse_glimmer": (MUSE_MARKS, *pair("", "", MUSE_NEXT, **MUSE_CALL)),
    "granite": ("<|tool_call|>", *pair("<|tool_call|>[", "]", ", ")),
    "phi4_mini_json": ("functools[", *pair("functools[", "]", ", ")),
    "phi4_mini_json in tags": ("<|/tool|>", *pair("<|tool_call|>[", "]<|/tool_call|>", ", ")),
    "hunyuan_a13b": ("<tool_calls>[", *pair("<tool_calls>[", "]</tool_calls>", ", ")),
    "hunyuan_a13b, dense": (
        "<tool_calls> ```json",
        *pair("<tool_calls>", "</tool_calls>", "\n", **HUNYUAN_CALL),
    ),
    "seed_oss": ("<seed:tool_call>", *SEED),
    "functiongemma": ("<start_function_call>", *pair("", "", **GEMMA_CALL)),
    "pythonic": ("[func_name1(", *pair("[", "]", ", ")),
    "olmo3": ("<function_calls>", *pair("<function_calls>\n", "\n</function_calls>", "\n")),
    "minimax_m2": ("<minimax:tool_call>", *MINIMAX),
    "glm45": ("<tool_call><arg_key>", *HERMES),
    "deepseek_v31": (DEEPSEEK[0], *pair(*DEEPSEEK, "", **DEEPSEEK_CALL)),
    "deepseek_v3": (f"{DEEPSEEK[0]} ```json", *pair(*DEEPSEEK, "\n", **BLOCK)),
    "kimi_k2": (KIMI[0], *pair(*KIMI, "", **KIMI_CALL)),
    "cohere_command3": (
        "<|START_ACTION|>",
        *pair("<|START_ACTION|>[", "]<|END_ACTION|>", ",\n", **COHERE_CALL),
    ),
    "nemotron_json": ("<TOOLCALL>", *pair("<TOOLCALL>[", "]</TOOLCALL>", ", ")),
    "minicpm3": (
        "<|tool_call_start|>```python",
        *pair("<|tool_call_start|>[", "]<|tool_call_end|>", ", "),
    ),
}
CASES = [
    *((*case, "auto", special) for case in CALLS for special in (False, True)),
    *(
        (f"{{% if tools %}}{marks}{{% endif %}}", one, two, name.split(",")[0].split()[0], False)
        for name, (marks, one, two) in FORMATS.items()
    ),
]


@pytest.mark.parametrize(("template", "one", "two", "name", "special"), CASES)
def test_grammars_take_calls_and_nothing_else(
    template: str, one: str, two: str, name: str, special: bool
) -> None:
    required = calls(template, "required", special=special)
    assert required.takes(one)
    assert required.takes(two)
    assert not required.takes("Rome")
    assert not required.takes(one[:-1])
    assert not required.takes(one.replace("Rome", 'Rome", "x": "y'))
    assert not required.takes(one.replace("weather", "whether"))
    assert not required.takes(one.replace('"city"', '"town"'))
    named = calls(template, FunctionName(name="weather"), special=special)
    single = calls(template, "required", special=special, parallel_tool_calls=False)
    for grammar in (named, single):
        assert grammar.takes(one)
        assert not grammar.takes(two)
    for found in (
        answer_format(template, special=special),
        find_answer_format(template, name, "auto"),
    ):
        for text, names in ((one, ["weather"]), (two, ["weather", "now"])):
            parts = parse(found, text)
            assert [part.name for part in parts if isinstance(part, ToolCallStart)] == names
            assert not any(isinstance(part, TextDelta) for part in parts)


def test_muse_glimmer_reasons_before_what_it_must_write() -> None:
    template = f"{{% if tools %}}{MUSE_MARKS}{{% endif %}}"
    thought = f" to=self<|message|>Rome?{MUSE_NEXT}"
    required = calls(template, "required")
    assert required.takes(f"{thought}{thought}{MUSE_CALL['call']}")
    assert not required.takes(thought)
    params = SamplingParams(structured_outputs={"json": CITY})
    form = Grammar(answer_format(template).params(params, "", [], "auto"))
    assert form.takes(f'{thought} to=user<|message|>{{"city": "Rome"}}')
    assert not form.takes('{"city": "Rome"}')
    parts = parse(answer_format(template), f"{thought} to=user<|message|>Yes.<|eot|>")
    assert parts == [ReasoningDelta("Rome?"), TextDelta("Yes.")]


@pytest.mark.parametrize("special", [False, True])
def test_a_model_may_reason_before_a_call(special: bool) -> None:
    inside = calls(QWEN, "required", special=special, prompt="<think>\n")
    assert inside.takes(f"Rome? 1 < 2\n</think>\n\n{HERMES_CALL}")
    assert not inside.takes(HERMES_CALL)
    before = calls(QWEN, "required", special=special)
    assert before.takes(f"<think>\nRome?\n</think>\n\n{HERMES_CALL}")
    assert before.takes(HERMES_CALL)
    behind = calls(QWEN, "required", special=special, prompt="<think>\n\n</think>\n\n")
    assert behind.takes(HERMES_CALL)
    assert not behind.takes(f"<think>\nRome?\n</think>\n\n{HERMES_CALL}")
    unasked = calls(MAY_THINK, "required", special=special)
    assert unasked.takes(HERMES_CALL)
    assert not unasked.takes(f"<think>\nRome?\n</think>\n\n{HERMES_CALL}")


def test_schemas_of_arguments() -> None:
    """$ref refers to the tool's own schema; additional properties come only if declared."""
    tree = {
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/node"}},
        "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
        "required": ["tree"],
    }
    inner = {"type": "object", "properties": {"b": {"const": 1}}}
    tools = [
        Tool.model_construct(name="grow", parameters=tree),
        Tool.model_construct(
            name="any", parameters={"type": "object", "additionalProperties": True}
        ),
        Tool.model_construct(
            name="inner", parameters={"properties": {"a": inner}, "required": ["a"]}
        ),
    ]
    grammar = calls(LLAMA, "required", tools=tools)
    assert grammar.takes('{"name": "grow", "parameters": {"tree": [[], [[]]]}}')
    assert not grammar.takes('{"name": "grow", "parameters": {"tree": 1}}')
    assert grammar.takes('{"name": "any", "parameters": {"x": 1}}')
    assert grammar.takes('{"name": "inner", "parameters": {"a": {"b": 1}}}')
    assert not grammar.takes('{"name": "inner", "parameters": {"a": {"b": 1, "c": 1}}}')


def test_annotations_of_tools_count_towards_no_limit() -> None:
    """Symptom: 40 tools that say what they do are too many for tool_choice="required"."""
    long = {"type": "string", "description": "x" * 2000, "title": "y", "examples": ["z"]}
    parameters = {"type": "object", "properties": {"description": long}, "description": "x"}
    tools = [Tool.model_construct(name=f"f{i}", parameters=parameters) for i in range(40)]
    grammar = calls(LLAMA, "required", tools=tools)
    assert grammar.takes('{"name": "f39", "parameters": {"description": "a"}}')


def test_errors_of_tools_name_them() -> None:
    found = answer_format(LLAMA)
    many = [{"type": "object", "properties": {"x" * 60_000: {}}}] * 2
    tools = [Tool.model_construct(name="f", parameters=parameters) for parameters in many]
    given = SamplingParams(structured_outputs={"json": CITY})
    for tool_choice, params in (("required", SamplingParams()), ("auto", given)):
        with pytest.raises(InvalidRequestError, match="^tools: their grammar has 12.* is 65536"):
            found.params(params, "", tools, tool_choice)
    bad = [Tool.model_construct(name="f", parameters={"properties": {"a": {"not": {}}}})]
    with pytest.raises(InvalidRequestError, match=r'^tools cannot be used: .*"f": .*"not"'):
        Grammar(found.params(SamplingParams(), "", bad, "required"))
    with pytest.raises(InvalidRequestError, match=r"^structured_outputs.json '{.*}' next to tools"):
        Grammar(found.params(given, "", bad, "auto"))
    wrong = SamplingParams(structured_outputs={"regex": "("})
    with pytest.raises(InvalidRequestError, match=r"^structured_outputs.regex '\(' cannot be used"):
        Grammar(answer_format(QWEN).params(wrong, "<think>", [], "auto"))


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("template", ["{% if tools %}<tool_call>{% endif %}", QWEN])
def test_strict_tools_hold_in_calls_that_the_model_makes_of_itself(
    template: str, special: bool
) -> None:
    def grammar(**options: Any) -> Grammar:
        found = answer_format(template, special=special).params(
            SamplingParams(), "", STRICT, "auto", **options
        )
        return Grammar(found, special=special)

    def call(name: str, arguments: str) -> str:
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

    rome = call("weather", '{"city": "Rome"}')
    found = grammar()
    for text in ("", 'Hello, {"name": 5}.', rome, f"Well.\n{rome}", f"{rome}\n{rome}"):
        assert found.takes(text)
        assert found.takes(f"<think>\nHm.\n</think>\n\n{text}") is (template == QWEN)
    assert found.takes(call("now", '{"anything": [1]}'))
    for arguments in ("{}", '{"city": 5}', '{"city": "Rome", "country": "it"}', "[]"):
        assert not found.takes(f"Well.\n{call('weather', arguments)}")
    assert not found.takes(call("unknown", "{}"))
    assert not grammar(parallel_tool_calls=False).takes(f"{rome}\n{rome}")


@pytest.mark.parametrize("template", [LLAMA, QWEN35, LFM2])
def test_where_strict_tools_do_not_hold(template: str) -> None:
    """A grammar would have the model write calls otherwise than it was trained to."""
    found = answer_format(template).params(SamplingParams(), "", STRICT, "auto")
    assert found.structured_outputs is None


@pytest.mark.parametrize(("template", "one", "two"), CALLS)
def test_no_answer_has_more_calls_than_a_request_may_have(
    template: str, one: str, two: str
) -> None:
    """Symptom: tool_choice="required" gives 285 calls, which cannot be sent back."""
    after = two.removeprefix(one)
    if template in (MISTRAL, LFM2):  # a list
        after = ', {"name": "now", "arguments": {}}'
        closing = "]" if template == MISTRAL else "]<|tool_call_end|>"
        one = one.removesuffix(closing)
    else:
        closing = ""
    grammar = calls(template, "required")
    assert grammar.takes(one + 127 * after + closing)
    assert not grammar.takes(one + 128 * after + closing)
    parts = parse(answer_format(template), one + 130 * after + closing)
    assert sum(isinstance(part, ToolCallStart) for part in parts) == 128
    rest = "".join(part.text for part in parts if isinstance(part, TextDelta))
    assert rest.count("now") == 3


def test_tools_that_cannot_be_called() -> None:
    found = answer_format(QWEN)
    assert found.tool_grammar(TOOLS, "auto") is found.tool_grammar(TOOLS, "none") is None
    with pytest.raises(InvalidRequestError, match="a tool named 'f', but tools has none"):
        found.tool_grammar(TOOLS, FunctionName(name="f"))
    with pytest.raises(InvalidRequestError, match="needs a tool, but"):
        found.tool_grammar([], "required")
    other = find_answer_format("{{ tools }}", "auto", "auto")
    with pytest.raises(InvalidRequestError, match="needs a known format of tool calls"):
        other.tool_grammar(TOOLS, "required")


@pytest.mark.parametrize("special", [False, True])
def test_reasoning_text_and_calls(special: bool) -> None:
    text = f"<think>\na</think>\nb<|end|>\n{HERMES_CALL}<|end|>"
    *parts, start, arguments, last = parse(answer_format(QWEN, special=special), text)
    assert parts == [ReasoningDelta("a"), TextDelta("b<|end|>")]
    assert last == TextDelta("<|end|>")
    assert isinstance(start, ToolCallStart)
    assert arguments == ToolCallArguments(0, '{"city": "Rome"}')


def test_special_tokens_are_dropped_by_their_ids() -> None:
    """What merely reads like a special token is text; tags stay for the parser, and are marked."""
    found, tokenizer = answer_format(MISTRAL, special=True), TOKENIZERS[True]
    typed = ["<p>", "<", "|end|", ">", "[TOOL_", "CALLS]"]
    token_ids = [i for text in typed for i in tokenizer.encode(text).ids]
    tags = [tokenizer.token_to_id(tag) for tag in ("[TOOL_CALLS]", "<|end|>", "<think>")]
    with_tools = found.params(SamplingParams(), "", TOOLS, "auto")
    assert with_tools.skip_special_tokens
    assert with_tools.kept_token_ids == (tags[0],)
    skipped = frozenset(tags) - {*with_tools.kept_token_ids}
    assert with_tools.marks_kept_tokens
    marked = frozenset(with_tools.kept_token_ids)
    detokenizer = Detokenizer(tokenizer, marked=marked, skip_special_tokens=False, skipped=skipped)
    detokenizer.add_all([tags[1], *token_ids, tags[2], tags[0]])
    assert detokenizer.text == f"<p><|end|>[TOOL_CALLS]{TOKEN_MARK}[TOOL_CALLS]"
    calling = found.parser("", TOOLS)
    assert calling.feed(detokenizer.text) == [TextDelta("<p><|end|>[TOOL_CALLS]")]
    parser = found.parser("", [])
    assert parser.feed("<p><|end|>") + parser.finish() == [TextDelta("<p><|end|>")]
    for tools, choice in (([], "auto"), (TOOLS, "none")):
        without: ToolChoice = choice  # type: ignore[assignment]
        assert found.params(SamplingParams(), "", tools, without).kept_token_ids == ()
    shown = found.params(SamplingParams(skip_special_tokens=False), "", TOOLS, "auto")
    assert not shown.skip_special_tokens
    reasons = answer_format(QWEN, special=True).params(SamplingParams(), "", [], "auto")
    assert reasons.kept_token_ids == (tags[2], tokenizer.token_to_id("</think>"))


def test_calls_are_looked_for_only_with_tools() -> None:
    parser = answer_format(QWEN).parser("", [])
    assert parser.feed(HERMES_CALL) + parser.finish() == [TextDelta(HERMES_CALL)]


def test_where_a_prompt_ends() -> None:
    found = answer_format(QWEN)
    assert found.starts_in_reasoning("<|im_start|>assistant\n<think>\n")
    assert not found.starts_in_reasoning("<think>\n\n</think>\n\n")
    assert not answer_format(LLAMA).starts_in_reasoning("<think>\n")


def test_named_formats() -> None:
    found = find_answer_format(None, "llama3_json", "deepseek_r1")
    parts = parse(found, f"a</think>{LLAMA_CALL}", prompt="<think>\n")
    assert parts[0] == ReasoningDelta("a")
    assert isinstance(parts[1], ToolCallStart)
    assert parse(find_answer_format(QWEN, "none", "none"), f"<think>{HERMES_CALL}") == [
        TextDelta(f"<think>{HERMES_CALL}")
    ]
    with pytest.raises(ConfigError, match="tool_call_parser must be one of auto, none, hermes"):
        find_answer_format(None, "hermess", "auto")
    with pytest.raises(ConfigError, match="reasoning_parser must be one of auto, none, qwen3"):
        find_answer_format(None, "auto", "qwen")


@pytest.mark.parametrize("prompt", ["<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n"])
def test_qwen_3_5_reasons_and_calls_by_the_types_of_its_tools(prompt: str) -> None:
    found = answer_format(QWEN35)
    inside = found.starts_in_reasoning(prompt)
    days = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    tools = [Tool.model_construct(name="weather", parameters=days)]
    parser = found.parser(prompt, tools)
    values = "<parameter=city>\n7\n</parameter>\n<parameter=days>\n7\n</parameter>\n"
    call = f"<tool_call>\n<function=weather>\n{values}</function>\n</tool_call>"
    text = f"{'' if inside else '<think>'}Hm.\n</think>\n\nI look.\n\n{call}"
    parts = [part for character in text for part in parser.feed(character)] + parser.finish()
    assert split(parts) == ("Hm.", "I look.", [("weather", '{"city": "7", "days": 7}')])


def qwen_3_5_reader(prompt: str) -> AnswerReader:
    """Return what reads an answer of Qwen 3.5 in a chat that has a tool."""
    function = {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}
    given = {
        "tools": [{"type": "function", "function": function}],
        "messages": [{"role": "user", "content": "Hi"}],
    }
    body = ChatRequest.model_validate({"model": "m", **given})
    engine = SimpleNamespace(input_processor=SimpleNamespace(tokenizer=None))
    llm = SimpleNamespace(engine=engine)
    server: Any = SimpleNamespace(answer_format=answer_format(QWEN35), llm=llm)
    return AnswerReader(server, body, prompt)


QWEN35_CALL = "<tool_call><function=f><parameter=a>7</parameter></function></tool_call>"


@pytest.mark.parametrize("size", [1, 1000])
def test_a_call_in_reasoning_that_is_not_closed(size: int) -> None:
    """Symptom: no call, and the finish reason "stop": an agent believes that the model is done."""
    reader = qwen_3_5_reader("<|im_start|>assistant\n<think>\n")
    text = f"I look.\n{QWEN35_CALL}"
    parts: list[Part] = []
    for start in range(0, len(text), size):
        parts += reader.parts(CompletionOutput(0, text[start : start + size], [], None))
    last = CompletionOutput(0, "", [], "stop")
    parts += reader.parts(last)
    assert split(parts) == ("I look.", "", [("f", '{"a": 7}')])
    assert reader.finish_reason(last) == "tool_calls"


def test_a_stop_string_in_a_call_in_reasoning() -> None:
    """The arguments of such a call are not whole, so it is not one to make."""
    reader = qwen_3_5_reader("<|im_start|>assistant\n<think>\n")
    text = "I look.\n<tool_call><function=f><parameter=b>/tm"
    last = CompletionOutput(0, text, [], "stop", stop_reason="p/a")
    assert split(reader.parts(last)) == ("I look.", "", [("f", '{"b": "/tm')])
    assert reader.finish_reason(last) == "stop"


def test_qwen_3_5_without_reasoning() -> None:
    """The template writes empty reasoning, so that the model writes none."""
    found = answer_format(QWEN35)
    assert not found.starts_in_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert parse(found, "Hello") == [TextDelta("Hello")]


FORMS: list[tuple[dict[str, Any], str, str]] = [
    ({"json": CITY}, '{"city": "Rome"}', '{"city": 1}'),
    ({"json_object": True}, '{"a": [1, 2]}', "[1]"),
    ({"choice": ["yes", "no\n"]}, "no\n", "maybe"),
    ({"regex": r"a/b\/\\|c"}, r"a/b/" + "\\", "a"),
    ({"grammar": 'start: word word\nword: "a" | "b"'}, "ab", "abc"),
]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("form", "right", "wrong"), FORMS, ids=lambda form: str(form)[:20])
def test_forms_come_after_reasoning(
    form: dict[str, Any], right: str, wrong: str, inside: bool
) -> None:
    prompt = "<think>\n" if inside else ""
    given = SamplingParams(structured_outputs=form)
    params = answer_format(QWEN).params(given, prompt, [], "auto")
    assert params.structured_outputs != given.structured_outputs
    takes = Grammar(params).takes
    thought = "Hm.\n</think>\n\n" if inside else "<think>\nHm.\n</think>\n\n"
    assert takes(thought + right)
    assert not takes(thought + wrong)
    assert takes(right) != inside
    assert not takes(f"\n{right}")
    assert answer_format(LLAMA).params(given, prompt, [], "auto") == given


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ('start: "(" start ")" | "x"', "((x))", "(Hm.\n</think>\n\nx)"),
        ('start: answer\nanswer: "x"', "x", "y"),
        ('start: thought\nthought: form // }\nform: "x}"\nTHOUGHT: "y"', "x}", "y"),
        ('%llguidance {}\n%ignore / /\nstart: "a" LINES\nLINES: "b"', "a   b", "a\nb"),
        ('start: %json {"const": "}"}', '"}"', "}"),
    ],
)
def test_a_grammar_after_reasoning_is_whole(grammar: str, right: str, wrong: str) -> None:
    """Symptom: rules that call `start` begin with reasoning again, and names collide."""
    given = SamplingParams(structured_outputs={"grammar": grammar})
    takes = Grammar(answer_format(QWEN).params(given, "<think>\n", [], "auto")).takes
    assert takes(f"Hm.\n</think>\n\n{right}")
    assert not takes(f"Hm.\n</think>\n\n{wrong}")
    assert Grammar(given).takes(right)


def test_a_tag_that_is_no_token() -> None:
    """The vocabulary lacks it, so the model spells it."""
    found = find_answer_format("{% if tools %}[TOOL_CALLS][/THINK]", "auto", "auto")
    given = SamplingParams(structured_outputs={"choice": ["yes"]})
    takes = Grammar(found.params(given, "[THINK]", [], "auto"), without_tags=True).takes
    assert takes("Hm. [/THIN] no\n[/THINK]\n\nyes")
    assert not takes("yes")
    assert not takes("Hm.[/THINK]no")


@pytest.mark.parametrize("text", ['root ::= "a"', "\n" * 65_536])  # the longest, in no time
def test_a_grammar_that_cannot_come_after_reasoning(text: str) -> None:
    given = SamplingParams(structured_outputs={"grammar": text})
    begin = time.monotonic()
    with pytest.raises(InvalidRequestError, match="must be in Lark's notation"):
        answer_format(QWEN).params(given, "<think>", [], "auto")
    assert time.monotonic() - begin < 1


@pytest.mark.parametrize("text", ["{", "[" * 60_000, "[" * 30_000 + "]" * 30_000])
def test_a_schema_that_is_none_is_left_to_the_compiler(text: str) -> None:
    given = SamplingParams(structured_outputs={"json": text})
    params = answer_format(QWEN).params(given, "<think>", [], "auto")
    assert params.structured_outputs == given.structured_outputs
    with pytest.raises(InvalidRequestError, match=r"^structured_outputs\.json "):
        Grammar(params)


@pytest.mark.parametrize(("template", "one", "two"), CALLS)
def test_json_or_calls(template: str, one: str, two: str) -> None:
    """With a form of the text, a model may still call tools: agents ask for both."""
    special = template == QWEN
    found = answer_format(template, special=special)
    given = SamplingParams(structured_outputs={"json": {"type": "array", "items": {"const": 1}}})
    either = Grammar(found.params(given, "", TOOLS, "auto"), special=special).takes
    assert either("[1, 1]")
    assert either(one)
    assert either(two)
    assert not either("[2]")
    assert not either(one.replace("Rome", 'Rome", "x": "y'))
    single = found.params(given, "", TOOLS, "auto", parallel_tool_calls=False)
    assert not Grammar(single, special=special).takes(two)
    neither = found.params(given, "</think>", TOOLS, "none")
    assert neither.structured_outputs == given.structured_outputs
    choice = SamplingParams(structured_outputs={"choice": ["a"]})
    assert not Grammar(found.params(choice, "", TOOLS, "auto"), special=special).takes(one)


def test_params_of_a_request() -> None:
    given = SamplingParams(structured_outputs={"json": CITY})
    special = answer_format(MISTRAL, special=True)
    params = special.params(given, "", TOOLS, "required")
    assert params.structured_outputs == special.tool_grammar(TOOLS, "required")
