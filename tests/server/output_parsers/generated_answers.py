"""Answers of models, drawn from a small grammar of each format, and what they mean.

A grammar has what the chat template writes, and what models do beside it: other spaces and orders,
tags that are repeated or forgotten, calls in lists or alone, quotes that are not escaped.
"""

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from nanovllm.apps.server.output_parsers.channels import HARMONY_TAGS, MUSE_TAGS
from nanovllm.apps.server.output_parsers.reasoning import (
    COHERE,
    GEMMA4,
    HARMONY,
    MINICPM3,
    MISTRAL,
    MUSE,
    SEED,
    THINK,
    ReasoningFormat,
)
from nanovllm.apps.server.output_parsers.tool_formats import (
    DEEPSEEK31,
    FUNCTION_GEMMA,
    GEMMA4 as GEMMA4_CALLS,
    KIMI,
    MISTRAL_ARGS,
    TOOL_FORMATS,
)
from nanovllm.apps.server.protocol import Tool
from tests.server.output_parsers.helpers import marked_text

Call = tuple[str, dict[str, Any]]

NAMES = ("f", "get_weather", "mcp.files-read", "g2")
KEYS = ("a", "city", "type", "name", "x_1")
WORDS = ("Rome", "", "x", "two words", "é🌧", "7", "null", "C:\\dir\\", "a\nb\n", "  ", "\t")
ODD = ('say "x"', "it's", "},{", ")]", "a, b=1)", "[", "{'a': \"b\"", "</", "<|", "\\n", "::", "'")
NESTED = ("it's", "print('x')", "f('a')['b']", "say 'no', then go", "g('a', 'b')")
"""Strings whose quotes LFM2 does not escape. Those with a comma are clear only as an argument."""
UNTYPED = ("qwen3_coder", "seed_oss", "glm45", "minimax_m2")
"""Formats that leave the types of arguments to schemas."""
_SAID = "\ue000"  # stands in a tag that is said, so that it is taken for no token
TAGS = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[/THINK]"),
    *("<|python_tag|>", "<|tool_call>", "<tool_call|>", "<|channel>", "<|tool_call_end|>"),
    *("</parameter> x", "<function=f>", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
)
GEMMA_TAGS = GEMMA4_CALLS.tags
TEXTS = ("Let me see.", "I use a < b and <b>f</b>:", "Hm, [1] {x}: é", "It's\n\ntwo lines.")


class Answer(NamedTuple):
    """An answer of a model, and what it means."""

    text: str
    started: bool  # whether the prompt opens the reasoning
    marked: tuple[str, ...]  # tags that have TOKEN_MARK before them
    functions: list[Tool]
    reasoning: str
    said: str
    calls: list[Call]


class Family(NamedTuple):
    """How one family of models writes."""

    write: Callable[[Random, list[Call]], str] = lambda rng, calls: ""  # returns calls as text
    thought: ReasoningFormat | None = None
    near_calls: tuple[str, ...] = ()  # text that only looks like the beginning of a call
    has_tag: bool = True  # whether a call begins with a tag; else it begins a line
    begins_answer: bool = False  # whether nothing may stand before calls
    is_string: Callable[[str, bool], bool] = lambda text, is_marked: True
    """Whether a text can be a string in an argument, if tags are tokens or not."""


def value(rng: Random, is_string: Callable[[str], bool], depth: int = 2) -> Any:
    """Return what an argument may be."""
    kind = rng.randrange(9 if depth else 6)
    if kind < 3:
        noise = "".join(rng.choices("ab '\"\\,()[]{}:=\n", k=rng.randrange(1, 9)))
        said = f"{tag[0]}{_SAID}{tag[1:]}" if (tag := rng.choice(TAGS)) else ""
        text = rng.choice((*WORDS, *ODD, *NESTED, *(noise,) * 9, *(said,) * 6))
        return text if is_string(text) else "Rome"
    if kind == 3:
        return rng.choice((0, 7, -12, 10**20, 0.5, -2.5e-07, 1e22))
    if kind < 6:
        return rng.choice((True, False, None))
    if kind == 6:
        return [value(rng, is_string, depth - 1) for _ in range(rng.randrange(4))]
    keys = rng.sample((*KEYS, "b c", "é"), rng.randrange(4))
    return {key: value(rng, is_string, depth - 1) for key in keys}


def some_calls(rng: Random, is_string: Callable[[str], bool]) -> list[Call]:
    return [
        (
            rng.choice(NAMES),
            {key: value(rng, is_string) for key in rng.sample(KEYS, rng.randrange(4))},
        )
        for _ in range(rng.choice((1, 1, 1, 2, 3)))
    ]


def as_json(rng: Random, given: Any) -> str:
    separators = rng.choice((None, (",", ":"), (" ,\n", " : ")))
    is_ascii = rng.random() < 0.3
    return json.dumps(
        given, indent=rng.choice((None, None, 2)), ensure_ascii=is_ascii, separators=separators
    )


def json_call(rng: Random, call: Call, keys: tuple[str, ...] = ("arguments", "parameters")) -> str:
    """Return a call as a JSON object."""
    name, arguments = call
    source = as_json(rng, arguments)
    if not arguments and rng.random() < 0.3:
        source = rng.choice(("{}", "null", '""'))
    elif rng.random() < 0.1:
        source = json.dumps(source)
    members = [f'"name": {json.dumps(name)}', f'"{rng.choice(keys)}": {source}']
    if rng.random() < 0.15:
        members.reverse()
    if rng.random() < 0.15:
        members.insert(rng.randrange(3), '"type": "function"')
    source = rng.choice(("{%s}", "{ %s\n}")) % rng.choice((", ", ",")).join(members)
    return f'{{"type": "function", "function": {source}}}' if rng.random() < 0.05 else source


def json_calls(rng: Random, calls: list[Call]) -> str:
    """Return calls as JSON: in a list, or one behind the other."""
    sources = [json_call(rng, call) for call in calls]
    if rng.random() < 0.4:
        return f"[{rng.choice((',', ', ', chr(10))).join(sources)}{rng.choice(('', '', ','))}]"
    return rng.choice(("\n", "", ", ", ";", " ; ")).join(sources)


def split(rng: Random, calls: list[Call]) -> list[list[Call]]:
    """Return the calls in groups, or each in its own."""
    if rng.random() < 0.3:
        return [calls]
    return [[call] for call in calls]


def repeated(rng: Random, tag: str) -> str:
    return tag * rng.choice((1, 1, 1, 1, 2)) + rng.choice(("", "", "\n"))


def hermes(rng: Random, calls: list[Call]) -> str:
    blocks = []
    for group in split(rng, calls):
        closing = rng.choice(
            ("</tool_call>",) * 5 + ("}</tool_call>", "</tool_call>\n</tool_call>")
        )
        blocks.append(f"{repeated(rng, '<tool_call>')}{json_calls(rng, group)}\n{closing}")
    return rng.choice(("\n", "")).join(blocks)


def llama(rng: Random, calls: list[Call]) -> str:
    return rng.choice(("", "<|python_tag|>")) + json_calls(rng, calls)


def mistral(rng: Random, calls: list[Call]) -> str:
    if rng.random() < 0.5:
        return f"{repeated(rng, '[TOOL_CALLS]')}{rng.choice(('', ' '))}{json_calls(rng, calls)}"
    text = ""
    for name, arguments in calls:
        call_id = rng.choice(("", "", "[CALL_ID]abcDEF123"))
        opening = repeated(rng, "[TOOL_CALLS]")
        text += f"{opening}{name}{call_id}{repeated(rng, '[ARGS]')}{as_json(rng, arguments)}"
        text += rng.choice(("", "\n"))
    return text


def gemma_value(rng: Random, given: Any) -> str:
    quote = '<|"|>'
    match given:
        case str():
            is_plain = given.replace(" ", "").isalnum()
            quote = rng.choice((quote, quote, "'")) if is_plain else quote
            return f"{quote}{given}{quote}"
        case dict():
            members = (gemma_member(rng, key, item) for key, item in given.items())
            return f"{{{','.join(members)}}}"
        case list():
            return f"[{rng.choice((',', ', ')).join(gemma_value(rng, item) for item in given)}]"
    return json.dumps(given)


def gemma_member(rng: Random, key: str, item: Any) -> str:
    quote = rng.choice(("", "", '<|"|>', '"'))
    return f"{quote}{key}{quote}{rng.choice((':', ':', ': '))}{gemma_value(rng, item)}"


def gemma(rng: Random, calls: list[Call]) -> str:
    text = ""
    for name, arguments in calls:
        begin = rng.choice(("call:", "call:", "call:", ":"))
        closing = repeated(rng, "<tool_call|>")
        source = gemma_value(rng, arguments)
        text += f"{repeated(rng, '<|tool_call>')}{begin}{name}{source}{closing}"
    return text


def python_string(rng: Random, text: str, *, is_argument: bool = False) -> str:
    """Return a string as Python has it, or with quotes that should be escaped."""
    plain = "\\" not in text and "\n" not in text
    if text in NESTED and (is_argument or "," not in text) and rng.random() < 0.6:
        return f"'{text}'"
    if plain and rng.random() < 0.1 and text[-1:] not in ("'", '"'):
        return rng.choice(("'''%s'''", '"""%s"""')) % text
    if rng.random() < 0.3:
        return json.dumps(text, ensure_ascii=False)
    return repr(text)


def python_value(rng: Random, given: Any, *, is_argument: bool = False) -> str:
    match given:
        case str():
            return python_string(rng, given, is_argument=is_argument)
        case dict():
            members = (
                f"{python_string(rng, key)}: {python_value(rng, item)}"
                for key, item in given.items()
            )
            return f"{{{', '.join(members)}}}"
        case list():
            items = [python_value(rng, item) for item in given]
            pair = rng.choice(("[]", "[]", "()")) if given else "[]"
            end = rng.choice(("", "", ",")) if items else ""
            if pair == "()" and len(items) == 1:
                end = ","
            return f"{pair[0]}{', '.join(items)}{end}{pair[1]}"
    return rng.choice((repr(given), json.dumps(given)))


def python_calls(rng: Random, calls: list[Call]) -> list[str]:
    sources = []
    for name, given in calls:
        assign = rng.choice(("=", "=", " = "))
        values = ((key, python_value(rng, item, is_argument=True)) for key, item in given.items())
        sources.append(f"{name}({', '.join(f'{key}{assign}{value}' for key, value in values)})")
    return sources


def pythonic(rng: Random, calls: list[Call]) -> str:
    blocks = []
    for group in split(rng, calls):
        if rng.random() < 0.1:
            source = ", ".join(json_call(rng, call) for call in group)
        else:
            source = ", ".join(python_calls(rng, group))
        blocks.append(f"<|tool_call_start|>[{source}]<|tool_call_end|>")
    return rng.choice(("\n", "")).join(blocks)


def written(item: Any) -> str:
    """Return a value as it stands in tags."""
    return item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)


def tagged(rng: Random, calls: list[Call]) -> str:
    blocks = []
    for group in split(rng, calls):
        source = ""
        for name, arguments in group:
            quote = rng.choice(("", "", "", '"'))
            source += f"<function={quote}{name}{quote}>\n"
            if arguments and rng.random() < 0.1:
                source += f"{as_json(rng, arguments)}\n</function>\n"
                continue
            for key, item in arguments.items():
                is_python = isinstance(item, bool | None) and rng.random() < 0.5
                value_text = str(item) if is_python else written(item)
                closing = rng.choice(("</parameter>\n", "</parameter>\n", ""))
                source += f"<parameter={quote}{key}{quote}>\n{value_text}\n{closing}"
            source += "</function>\n"
        opening = rng.choice(("<tool_call>\n", "<tool_call>\n", "<tool_call><tool_call>", ""))
        blocks.append(f"{opening}{source}{'</tool_call>' if opening else ''}")
    return rng.choice(("\n", "")).join(blocks)


def renamed(write: Callable[[Random, list[Call]], str], tags: dict[str, str]) -> Any:
    """Return what writes as `write` does, with other tags."""

    def write_renamed(rng: Random, calls: list[Call]) -> str:
        text = write(rng, calls)
        for tag, other in tags.items():
            text = text.replace(tag, other)
        return text

    return write_renamed


def granite(rng: Random, calls: list[Call]) -> str:
    opening = rng.choice(("<|tool_call|>", "<|tool_call|><tool_call>", "<tool_call>"))
    return f"{opening}{json_calls(rng, calls)}"


def phi(rng: Random, calls: list[Call]) -> str:
    if rng.random() < 0.5:
        return f"functools[{', '.join(json_call(rng, call) for call in calls)}]"
    return f"<|tool_call|>{json_calls(rng, calls)}<|/tool_call|>"


def hunyuan(rng: Random, calls: list[Call]) -> str:
    if rng.random() < 0.3:
        return f"<tool_calls>{json_calls(rng, calls)}</tool_calls>"
    blocks = []
    for name, arguments in calls:
        source = as_json(rng, arguments)
        source = rng.choice((f"```json\n{source}\n```", source))
        blocks.append(f"<tool_call>{name}\n{source}{rng.choice(('', chr(10)))}</tool_call>")
    text = "\n".join(blocks)
    return rng.choice((f"<tool_calls>\n{text}\n</tool_calls>", text))


def glm(rng: Random, calls: list[Call]) -> str:
    blocks = []
    for name, arguments in calls:
        if rng.random() < 0.1:
            blocks.append(f"<tool_call>{json_call(rng, (name, arguments))}</tool_call>")
            continue
        line = rng.choice(("\n", "\n", ""))
        source = f"{repeated(rng, '<tool_call>')}{name}{line}"
        for key, item in arguments.items():
            source += f"<arg_key>{key}</arg_key>{line}<arg_value>{written(item)}</arg_value>{line}"
        blocks.append(f"{source}</tool_call>")
    return rng.choice(("\n", "")).join(blocks)


def minimax(rng: Random, calls: list[Call]) -> str:
    blocks = []
    for group in split(rng, calls):
        source = ""
        for name, arguments in group:
            source += f'<invoke name="{name}">\n'
            for key, item in arguments.items():
                source += f'<parameter name="{key}">{written(item)}</parameter>\n'
            source += "</invoke>\n"
        opening = rng.choice(("<minimax:tool_call>\n", "<minimax:tool_call>\n", ""))
        blocks.append(f"{opening}{source}{'</minimax:tool_call>' if opening else ''}")
    return rng.choice(("\n", "")).join(blocks)


def section(
    rng: Random, calls: list[Call], tags: tuple[str, ...], header: str, fence: tuple[str, str]
) -> str:
    """Return calls in a section that may have its tags: each a header and its arguments."""
    blocks = []
    for index, (name, arguments) in enumerate(calls):
        source = as_json(rng, arguments).join(fence)
        blocks.append(f"{tags[2]}{header.format(name, index)}{source}{tags[3]}")
    text = rng.choice(("\n", "")).join(blocks)
    return rng.choice((f"{tags[0]}{text}{tags[1]}", text))


def deepseek(rng: Random, calls: list[Call]) -> str:
    header = rng.choice(("function<｜tool▁sep｜>{}\n", "{}<｜tool▁sep｜>"))
    fence = ("```json\n", "\n```") if header.endswith("\n") else ("", "")
    return section(rng, calls, DEEPSEEK31.tags, header, fence)


def kimi(rng: Random, calls: list[Call]) -> str:
    header = rng.choice(("functions.{}:{}", "functions.{}:{}", "{}"))
    return section(rng, calls, KIMI.tags, f"{header}<|tool_call_argument_begin|>", ("", ""))


def cohere(rng: Random, calls: list[Call]) -> str:
    sources = [
        f'{{"tool_call_id": "{index}", "tool_name": "{name}", "parameters": {as_json(rng, given)}}}'
        for index, (name, given) in enumerate(calls)
    ]
    return f"<|START_ACTION|>[\n    {f',{chr(10)}    '.join(sources)}\n]<|END_ACTION|>"


def nemotron(rng: Random, calls: list[Call]) -> str:
    return f"{repeated(rng, '<TOOLCALL>')}{json_calls(rng, calls)}</TOOLCALL>"


def minicpm(rng: Random, calls: list[Call]) -> str:
    lines = ("```python", *python_calls(rng, calls), "```")
    return "\n".join(("<|tool_call_start|>", *lines, "<|tool_call_end|>"))


def llama_pythonic(rng: Random, calls: list[Call]) -> str:
    return f"{rng.choice(('', '<|python_tag|>'))}[{', '.join(python_calls(rng, calls))}]"


def olmo(rng: Random, calls: list[Call]) -> str:
    return "\n".join(("<function_calls>", *python_calls(rng, calls), "</function_calls>"))


def schema_of(rng: Random, arguments: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a schema of which arguments have the types, in one of the forms of such a schema."""
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object"}
    kinds |= {list: "array", type(None): "null"}
    types: dict[str, set[str]] = {}
    for given in arguments:
        for key, item in given.items():
            types.setdefault(key, set()).add(kinds[type(item)])
    properties: dict[str, Any] = {}
    defs: dict[str, Any] = {}
    for key, found in types.items():
        part: Any = {"type": sorted(found) if len(found) > 1 else min(found)}
        match rng.randrange(5):
            case 0:
                part = {"anyOf": [{"type": kind} for kind in sorted(found)]}
            case 1:
                defs[key] = part
                part = {"$ref": f"#/$defs/{key}"}
            case 2:
                part = {"allOf": [{"description": "x"}, part]}
        properties[key] = part
    root = {"type": "object", "properties": properties}
    match rng.randrange(4):
        case 0:
            defs["Root"] = root
            return {"$ref": "#/$defs/Root", "$defs": defs}
        case 1:
            return {"allOf": [{"properties": {}}, root], "$defs": defs}
        case 2:
            patterns = {f"^{key}$": part for key, part in properties.items()}
            return {"type": "object", "patternProperties": patterns, "$defs": defs}
    return {**root, "$defs": defs}


def is_same_in_each_type(calls: list[Call]) -> bool:
    """Whether no string among the arguments reads like a value of another type."""
    for _, arguments in calls:
        for item in arguments.values():
            if isinstance(item, str) and item.strip().lower() in ("7", "null", "", "[", "{"):
                return False
    return True


TAGGED = {"is_string": lambda text, is_marked: "<" not in text or "</parameter>" in text}
FAMILIES = {
    "hermes": Family(
        hermes, THINK, ("<tool_call> is a tag.", '<tool_call>{"a": 1}', "<tool_calls>")
    ),
    "qwen3_coder": Family(
        tagged, THINK, ("<tool_call> is a tag.", "<function=>", "<functions>"), **TAGGED
    ),
    "llama3_json": Family(
        llama,
        near_calls=('{"name": "Ann"}', "[1, 2]", '[{"name": "Ann", "age": 3}]'),
        has_tag=False,
    ),
    "mistral": Family(mistral, MISTRAL, ("[TOOL_CALLS] is a tag.", "[TOOL_CALL")),
    "gemma4": Family(
        *(gemma, GEMMA4, ("<|tool_call> is a tag.", "<|tool")),
        is_string=lambda text, is_marked: is_marked or "channel" not in text,
    ),
    "lfm2": Family(pythonic, THINK, ("<|tool_call_start|>[1 + 2]", "<|tool_call_start|>[f('x')]")),
    "openai": Family(thought=HARMONY, has_tag=False),
    "muse_glimmer": Family(thought=MUSE, has_tag=False),
    "granite": Family(granite, THINK),
    "phi4_mini_json": Family(phi, near_calls=("from functools import cache", "functools[1]")),
    "hunyuan_a13b": Family(hunyuan, THINK, ("<tool_calls> none", "<tool_call> is a tag")),
    "seed_oss": Family(renamed(tagged, {"tool_call>": "seed:tool_call>"}), SEED, **TAGGED),
    "functiongemma": Family(
        renamed(gemma, dict(zip(GEMMA_TAGS, FUNCTION_GEMMA.tags, strict=True)))
    ),
    "pythonic": Family(
        llama_pythonic, near_calls=("[1, 2]", "[f('x')]"), has_tag=False, begins_answer=True
    ),
    "olmo3": Family(olmo, THINK, ("<function_calls> none", "<function_calls>\nf('x')")),
    "glm45": Family(
        glm, THINK, ("<tool_call> is a tag.", "<tool_call>f", "<arg_key>a</arg_key>"), **TAGGED
    ),
    "minimax_m2": Family(
        *(minimax, THINK, ("<minimax:tool_call> none", '<invoke name="')),
        is_string=lambda text, is_marked: "<" not in text,
    ),
    "deepseek_v3": Family(
        deepseek, THINK, ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "<｜tool▁calls▁begin｜>[]")
    ),
    "kimi_k2": Family(
        kimi, THINK, ("<|tool_call_begin|>functions.f:0", "<|tool_calls_section_begin|> no")
    ),
    "cohere_command3": Family(
        cohere, COHERE, ("<|START_ACTION|>[]", '<|START_ACTION|>[{"tool": 1}]')
    ),
    "nemotron_json": Family(nemotron, THINK, ("<TOOLCALL> none", "<TOOLCALL>[]</TOOLCALL>")),
    "minicpm3": Family(minicpm, MINICPM3, ("<|tool_call_start|>```python\n1 + 2\n```",)),
}
"""By the names of their formats of tool calls."""


def tool_tags(name: str) -> tuple[str, ...]:
    """Return the tags of a format of calls; for Mistral's those of newer templates."""
    return MISTRAL_ARGS.tags if name == "mistral" else TOOL_FORMATS[name].tags


def harmony_answer(rng: Random) -> Answer:
    """Return an answer of gpt-oss: messages in channels."""
    start, message, end, call_end, _, channel, constrain = HARMONY_TAGS
    tags = HARMONY_TAGS if rng.random() < 0.5 else ()
    calls = (
        some_calls(rng, lambda text: bool(tags) or "<|" not in text) if rng.random() < 0.8 else []
    )
    thoughts = rng.sample(("Hm.", "I look\n\nat it: a < b.", "[1] {x}"), rng.randrange(3))
    started = bool(thoughts) and rng.random() < 0.3
    messages = [f"{channel}analysis{message}{text}{end}" for text in thoughts]
    if started:
        messages[0] = f"{thoughts[0]}{end}"
    said = rng.sample(TEXTS, rng.randrange(2))
    messages += [f"{channel}commentary{message}{text}{end}" for text in said]
    for name, arguments in calls:
        to = rng.choice(("to=functions.", "to=")) + name
        header = rng.choice(
            (
                f"{channel}commentary {to} {constrain}json{message}",
                f" {to}{channel}commentary json{message}",
                f"{channel}commentary {to}{message}",
                f"{channel}analysis {to} code{message}",
            )
        )
        messages.append(f"{header}{as_json(rng, arguments)}{rng.choice((end, call_end))}")
    if not calls or rng.random() < 0.3:
        text = rng.choice(TEXTS)
        said.append(text)
        messages.append(f"{channel}final{message}{text}{rng.choice(('', end))}")
    text = without_marks(marked_text(f"{start}assistant".join(messages), tags))
    calls = plain(calls)
    return Answer(text, started, tags, [], "\n".join(thoughts), "\n".join(said), calls)


def muse_answer(rng: Random) -> Answer:
    """Return an answer of Muse Glimmer: messages to recipients."""
    start, message, end, end_of_turn = MUSE_TAGS
    tags = MUSE_TAGS if rng.random() < 0.5 else ()
    calls = some_calls(rng, lambda text: "<" not in text) if rng.random() < 0.8 else []
    if not is_same_in_each_type(calls):
        calls = []
    thoughts = rng.sample(("Hm.", "I look\n\nat it: a < b.", "[1] {x}"), rng.randrange(3))
    started = bool(thoughts) and rng.random() < 0.3
    messages = [f" to=self{message}{text}{end}" for text in thoughts]
    if started:
        messages[0] = f"{thoughts[0]}{end}"
    said = rng.sample(TEXTS, rng.randrange(2) if calls else 1)
    messages += [f" to=user{message}{text}{end}" for text in said]
    for name, arguments in calls:
        source = ""
        for key, item in arguments.items():
            source += f'<atem:parameter name="{key}">{written(item)}</atem:parameter>\n'
        source = f'<atem:invoke name="{name}">\n{source}</atem:invoke>'
        source = f"<atem:function_calls>\n{source}\n</atem:function_calls>"
        messages.append(f" to={name}{message}{source}{rng.choice((end, end_of_turn))}")
    text = without_marks(marked_text(f"{start}assistant".join(messages), tags))
    calls = plain(calls)
    return Answer(
        text, started, tags, functions_of(rng, calls), "\n".join(thoughts), "".join(said), calls
    )


def answer(name: str, rng: Random) -> Answer:
    """Return an answer of a family."""
    family = FAMILIES[name]
    if family.thought is HARMONY:
        return harmony_answer(rng)
    if family.thought is MUSE:
        return muse_answer(rng)
    tags = tuple(filter(None, tool_tags(name))) if rng.random() < 0.5 else ()
    if tags and family.thought is not None:
        tags = (*tags, family.thought.opening, family.thought.closing)
    calls = []
    if rng.random() < 0.85:
        calls = some_calls(rng, lambda text: family.is_string(text, bool(tags)))
    if name in UNTYPED and not is_same_in_each_type(calls):
        calls = []
    before = rng.choice(("", "", *TEXTS)) if not (calls and family.begins_answer) else ""
    after = rng.choice(("", "", "", *TEXTS)) if calls else ""
    said = before + after
    text = before
    if calls:
        source = marked_text(family.write(rng, calls), tags)
        space = "\n" if before and not family.has_tag else rng.choice(("", "\n", "\n\n"))
        text += f"{space}{source}" + (f"\n{after}" if after else "")
    elif rng.random() < 0.5 and family.near_calls:
        said = text = f"{before}\n{rng.choice(family.near_calls)}".lstrip("\n")
    functions = functions_of(rng, calls)
    reasoning, started = "", False
    if family.thought is not None and rng.random() < 0.6:
        # In an argument the closing tag is taken for one.
        is_closed = bool(before or not calls) or family.thought.closing in without_marks(text)
        reasoning, started, begin = thought(family, rng, tags, is_closed=is_closed)
        text = begin + text.lstrip("\n") if begin.endswith("\n") else begin + text
    calls = plain(calls)
    text, reasoning = map(without_marks, (text, reasoning))
    return Answer(text, started, tags, functions, reasoning, said, calls)


def plain(calls: list[Call]) -> list[Call]:
    meant = json.loads(without_marks(json.dumps(calls, ensure_ascii=False)))
    return [(name, arguments) for name, arguments in meant]


def functions_of(rng: Random, calls: list[Call]) -> list[Tool]:
    """Return the functions that are called, with schemas that the arguments fit."""
    functions = []
    for name in sorted({name for name, _ in calls}):
        schema = schema_of(rng, [given for other, given in calls if other == name])
        functions.append(Tool.model_construct(name=name, parameters=schema))
    return functions


def without_marks(text: str) -> str:
    return re.sub(rf"{_SAID}|\\*u{ord(_SAID):x}", "", text)


def thought(
    family: Family, rng: Random, tags: tuple[str, ...], *, is_closed: bool
) -> tuple[str, bool, str]:
    """Return reasoning, whether the prompt opens it, and what an answer begins with.

    Args:
        is_closed: whether it has to be; if not, a call has to follow.
    """
    assert family.thought is not None
    form = family.thought
    reasoning = rng.choice(("Hm.", "I look\n\nat it: a < b.", "They said [1] </x>."))
    is_closed |= rng.random() < 0.6
    source = reasoning
    if is_closed and rng.random() < 0.3:
        call = family.write(rng, some_calls(rng, lambda text: text in WORDS))
        reasoning = f"{reasoning}\n{call}\nmaybe."
        source = marked_text(reasoning, tags)
    started = rng.random() < 0.5
    label = rng.choice((form.label, form.label, "")) if form.label else ""
    opening = "" if started else f"{marked_text(form.opening, tags)}{label}"
    if label or not started:
        opening += "\n" if label else rng.choice(("", "\n"))
    closing = f"\n{marked_text(form.closing, tags)}\n\n" if is_closed else ""
    return reasoning, started, f"{opening if not started else ''}{source}{closing}"
