"""How models write tool calls: what reads each format, the grammars that enforce it, and which one
a chat template shows.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm.apps.server.output_parsers import channels, json_calls, literal_calls, tagged_calls
from nanovllm.apps.server.output_parsers.channels import ChannelsParser
from nanovllm.apps.server.output_parsers.parameter_types import Function
from nanovllm.apps.server.output_parsers.parts import ToolCallStart
from nanovllm.apps.server.output_parsers.tool_calls import MAX_CALLS, ToolCallParser, quoted
from nanovllm.chat.template_shape import CALLED, TemplateShape
from nanovllm.chat.tool_messages import is_harmony, knows_tools, shows_pythonic_calls
from nanovllm.errors import InvalidRequestError
from nanovllm.options.json_schema import X_GUIDANCE, grammar_schema
from nanovllm.options.structured_outputs import MAX_CHARS

_MORE = f"{{0,{MAX_CALLS - 1}}}"  # how often a call may follow the first one in a grammar
_JSON = r'"{{\"name\": \"NAME\", \"arguments\": " ARGUMENTS "}}"'
_NUMBER = "/[0-9]{{1,3}}/"
_BLOCK = r'"NAME\n```json\n" ARGUMENTS "\n```"'


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How a model writes tool calls.

    The rules of the grammar have {0} for the first of the tags, and so on. Names of functions need
    no quoting in them: see `ToolName`.
    """

    parser: type[ToolCallParser] | None = None  # what reads calls
    channels: type[ChannelsParser] | None = None
    """What reads whole answers, in a format whose messages go to channels or recipients."""
    tags: tuple[str, ...]
    """Strings of the format that are tokens in some vocabularies; those that the parser takes."""
    ends: tuple[str, ...] = ()
    """Tokens after calls that end the answer, also where the checkpoint does not list them."""
    calls: tuple[str, str] = ("", "")  # what stands before all calls and after them in a grammar
    call: str = _JSON  # a call of the function NAME, with ARGUMENTS
    block: str = "call"  # a call and what is around each
    separator: str = ""  # what stands between calls
    takes_several: bool = True  # whether an answer may have several calls
    holds_strict: bool = False
    """Whether a grammar may stand over calls that the model makes of itself: it has them as the
    model writes them, after a tag that is a token."""

    def is_like(self, other: "ToolFormat") -> bool:
        """Whether this is a form of the other; formats with tagged calls are forms of Hermes'."""
        is_hermes = other.parser is json_calls.HermesParser
        base = tagged_calls.TaggedParser if is_hermes else other.parser
        return bool(self.parser and base and issubclass(self.parser, base))

    def grammar(
        self,
        functions: Sequence[Function],
        *,
        several: bool,
        tag_ids: Mapping[str, int],
        only_strict: bool = False,
    ) -> str:
        """Return rules in llguidance's Lark, of which `calls` is one call or more.

        Args:
            several: whether more than one call may be made: `MAX_CALLS` at most.
            tag_ids: ids of the tags that are tokens.
            only_strict: whether functions that are not strict take any arguments.

        Raises:
            InvalidRequestError: the rules are too long.
        """
        tags = [tag_literal(tag, tag_ids) for tag in self.tags]
        before, after = (part.format(*tags) for part in self.calls)
        block = self.block.format(*tags)
        more = ""
        if several and self.takes_several:
            more = f"({self.separator.format(*tags)} {block}){_MORE}"
        rules = [f"calls: {before} {block} {more} {after}"]
        rules += ["call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
        call = self.call.format(*tags)
        for index, function in enumerate(functions):
            made = call.replace("ARGUMENTS", f"arguments_{index}").replace("NAME", function.name)
            rules.append(f"call_{index}: {made}")
            takes_any = only_strict and not function.strict
            parameters = {"additionalProperties": True} if takes_any else function.parameters
            schema = json.dumps(arguments_schema(parameters))
            rules.append(f"arguments_{index}: %json {schema} // {json.dumps(function.name)}")
        text = "\n".join(rules) + "\n"
        if len(text) > MAX_CHARS:
            raise InvalidRequestError(
                f"tools: their grammar has {len(text)} characters without descriptions; the limit "
                f"is {MAX_CHARS}: send fewer tools, simpler ones, or tool_choice='auto'"
            )
        return text


HERMES = ToolFormat(
    parser=json_calls.HermesParser,
    tags=("<tool_call>", "</tool_call>"),
    block=r'{0} "\n" call "\n" {1}',
    separator=r'"\n"',
    holds_strict=True,
)
# Grammars of these have the model write JSON as in the Hermes format, which the parsers take too.
TAGGED = dataclasses.replace(HERMES, parser=tagged_calls.TaggedParser, holds_strict=False)
SEED_OSS = dataclasses.replace(TAGGED, tags=("<seed:tool_call>", "</seed:tool_call>"))
MINIMAX = dataclasses.replace(
    TAGGED, parser=tagged_calls.InvokeParser, tags=("<minimax:tool_call>", "</minimax:tool_call>")
)
GLM = dataclasses.replace(
    TAGGED,
    parser=tagged_calls.GlmParser,
    tags=(*HERMES.tags, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
LLAMA = ToolFormat(
    parser=json_calls.LlamaParser,
    tags=("<|python_tag|>", ""),
    call=_JSON.replace("arguments", "parameters"),
    separator='"; "',
)
MISTRAL = ToolFormat(
    parser=json_calls.MistralParser,
    tags=("[TOOL_CALLS]", ""),
    calls=('{0} "["', '"]"'),
    separator='", "',
    holds_strict=True,
)
MISTRAL_ARGS = ToolFormat(  # of newer templates
    parser=json_calls.MistralParser,
    tags=("[TOOL_CALLS]", "", "[CALL_ID]", "[ARGS]"),
    call='{0} "NAME" {3} ARGUMENTS',
    holds_strict=True,
)
GRANITE = dataclasses.replace(
    MISTRAL, parser=json_calls.GraniteParser, tags=("<|tool_call|>", "</tool_call>")
)
NEMOTRON = ToolFormat(
    parser=json_calls.HermesParser,
    tags=("<TOOLCALL>", "</TOOLCALL>"),
    calls=('{0} "["', '"]" {1}'),
    separator='", "',
)
PHI4_MINI_TAGS = dataclasses.replace(
    NEMOTRON, parser=json_calls.Phi4Parser, tags=("<|tool_call|>", "<|/tool_call|>")
)
PHI4_MINI = dataclasses.replace(PHI4_MINI_TAGS, calls=('"functools["', '"]"'))
COHERE = dataclasses.replace(
    NEMOTRON,
    parser=json_calls.CohereParser,
    tags=("<|START_ACTION|>", "<|END_ACTION|>"),
    call=rf'"{{{{\"tool_call_id\": \"" {_NUMBER} '
    r'"\", \"tool_name\": \"NAME\", \"parameters\": " ARGUMENTS "}}"',
    separator=r'",\n"',
)
HUNYUAN_LIST = dataclasses.replace(
    NEMOTRON, parser=json_calls.SectionParser, tags=("<tool_calls>", "</tool_calls>", *HERMES.tags)
)
HUNYUAN = dataclasses.replace(  # of the dense models
    HUNYUAN_LIST, calls=("{0}", "{1}"), call=_BLOCK, block="{2} call {3}", separator=r'"\n"'
)
KIMI = ToolFormat(
    parser=json_calls.KimiParser,
    tags=(
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        *("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"),
    ),
    calls=("{0}", "{1}"),
    call=f'"functions.NAME:" {_NUMBER} {{4}} ARGUMENTS',
    block="{2} call {3}",
    holds_strict=True,
)
DEEPSEEK31 = dataclasses.replace(
    KIMI,
    parser=json_calls.DeepSeekParser,
    tags=(
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    ),
    call='"NAME" {4} ARGUMENTS',
)
DEEPSEEK3 = dataclasses.replace(  # the older form: with the type of the call, and a block of JSON
    DEEPSEEK31, call=f'"function" {{4}} {_BLOCK}', separator=r'"\n"'
)
# Grammars of the next ones have the model write JSON, too.
PYTHONIC = dataclasses.replace(
    NEMOTRON, parser=literal_calls.PythonicParser, tags=("<|tool_call_start|>", "<|tool_call_end|>")
)
MINICPM3 = dataclasses.replace(PYTHONIC, parser=literal_calls.MiniCpmParser)
LLAMA_PYTHONIC = dataclasses.replace(
    PYTHONIC,
    parser=literal_calls.LlamaPythonicParser,
    tags=("<|python_tag|>", ""),
    calls=('"["', '"]"'),
)
OLMO3 = dataclasses.replace(
    PYTHONIC,
    parser=literal_calls.OlmoParser,
    tags=("<function_calls>", "</function_calls>"),
    calls=(r'{0} "\n"', r'"\n" {1}'),
    separator=r'"\n"',
)
GEMMA4 = ToolFormat(
    parser=literal_calls.GemmaParser,
    tags=("<|tool_call>", "<tool_call|>", '<|"|>'),
    ends=("<|tool_response>",),
    call='"call:NAME" ARGUMENTS',
    block="{0} call {1}",
)
FUNCTION_GEMMA = dataclasses.replace(
    GEMMA4,
    tags=("<start_function_call>", "<end_function_call>", "<escape>"),
    ends=("<start_function_response>",),
)
HARMONY = ToolFormat(
    channels=channels.HarmonyParser,
    tags=channels.HARMONY_TAGS,
    ends=channels.HARMONY_TAGS[3:5],
    call='{5} "commentary to=functions.NAME " {6} "json" {1} ARGUMENTS',
    takes_several=False,  # calls end the answer
)
MUSE_GLIMMER = ToolFormat(
    channels=channels.MuseParser,
    tags=channels.MUSE_TAGS,
    ends=channels.MUSE_TAGS[3:],
    call=r'" to=NAME" {1} "<atem:function_calls>\n<atem:invoke name=\"NAME\">\n" ARGUMENTS '
    r'"\n</atem:invoke>\n</atem:function_calls>"',
    separator='{2} {0} "assistant"',
)

TOOL_FORMATS: dict[str, ToolFormat] = {
    **dict.fromkeys(("hermes", "granite4", "ernie45"), HERMES),
    **dict.fromkeys(("qwen3_coder", "qwen3_xml"), TAGGED),
    **dict.fromkeys(("glm45", "glm47", "ling3", "poolside_v1"), GLM),
    "lfm2": PYTHONIC,
    "llama3_json": LLAMA,
    "mistral": MISTRAL,
    "gemma4": GEMMA4,
    "openai": HARMONY,
    "muse_glimmer": MUSE_GLIMMER,
    "granite": GRANITE,
    "phi4_mini_json": PHI4_MINI,
    "hunyuan_a13b": HUNYUAN_LIST,
    "seed_oss": SEED_OSS,
    "functiongemma": FUNCTION_GEMMA,
    "pythonic": LLAMA_PYTHONIC,
    "olmo3": OLMO3,
    "minimax_m2": MINIMAX,
    "kimi_k2": KIMI,
    "deepseek_v3": DEEPSEEK3,
    "deepseek_v31": DEEPSEEK31,
    "cohere_command3": COHERE,
    "nemotron_json": NEMOTRON,
    "minicpm3": MINICPM3,
}
"""By the names that vLLM gives its tool parsers."""
_BY_MARKS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("<atem:",), MUSE_GLIMMER),
    (("<seed:tool_call>",), SEED_OSS),
    (("<minimax:tool_call>",), MINIMAX),
    (("<TOOLCALL>",), NEMOTRON),
    (("<|START_ACTION|>",), COHERE),
    (("<|tool_calls_section_begin|>",), KIMI),
    (("tool_declare<|im_middle|>",), KIMI),
    (("<｜tool▁calls▁begin｜>", "```json"), DEEPSEEK3),
    (("<｜tool▁calls▁begin｜>",), DEEPSEEK31),
    (("<|tool_call_start|>", "```python"), MINICPM3),
    (("<tool_call>", "<arg_key>"), GLM),
    (("<start_function_call>",), FUNCTION_GEMMA),
    (("<|tool_call>",), GEMMA4),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_ARGS),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<function_calls>",), OLMO3),
    (("functools[",), PHI4_MINI),
    (("<|/tool_call|>",), PHI4_MINI_TAGS),
    (("<|/tool|>",), PHI4_MINI_TAGS),
    (("<|tool_call|>",), GRANITE),
    (("<tool_calls>[",), HUNYUAN_LIST),
    (("<tool_calls>", "```json"), HUNYUAN),
    (("<|tool_call_start|>",), PYTHONIC),
    (("[func_name",), LLAMA_PYTHONIC),
)
"""What a template has that shows a format; the first whose marks it has all."""
_OTHER = ("<function=", "<parameter", "<tool_sep>", ">>>")
"""Marks of formats that are not known: functionary's, Hy 3's."""


def arguments_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the schema of a call's arguments; one that declares no properties allows none."""
    schema: dict[str, Any] = {"type": "object", **(parameters or {})}
    if not schema.keys() & {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"}:
        schema = {"properties": {}, **schema}
    return {**grammar_schema(schema), "x-guidance": X_GUIDANCE}


def tag_literal(tag: str, tag_ids: Mapping[str, int]) -> str:
    """Return a tag as a grammar has it: by its id, if it is a token."""
    return f"<[{tag_ids[tag]}]>" if tag in tag_ids else quoted(tag)


def find_tool_format(
    chat_template: str | None, shape: TemplateShape | None = None
) -> ToolFormat | None:
    """Return the format that a chat template shows; None if it shows another one.

    Its `shape` tells more than its words: a template that shows no tools gets them in the Hermes
    format, and where words are not sure the parser must read the call that the template writes.
    """
    template = chat_template or ""
    if is_harmony(template):
        return HARMONY
    if shape is not None and shape.tools is None:
        return HERMES
    for marks, found in _BY_MARKS:
        if all(mark in template for mark in marks):
            return found
    suggested = _by_words(template)
    if suggested is None or suggested.parser is None or shape is None or not shape.written:
        return suggested
    parser = suggested.parser(suggested.tags)
    parts = parser.feed(shape.written) + parser.finish(cut=False)
    is_read = any(isinstance(part, ToolCallStart) and part.name == CALLED for part in parts)
    return suggested if is_read else None


def _by_words(template: str) -> ToolFormat | None:
    """Return the format that words suggest which other formats use, too."""
    is_tagged = "<tool_call>" in template and "<function=" in template
    is_other = not is_tagged and any(mark in template for mark in _OTHER)
    has_header = "<|start_header_id|>" in template and '"parameters"' in template
    if not is_other and ("<|python_tag|>" in template or has_header):
        return LLAMA
    if shows_pythonic_calls(template):
        return PYTHONIC
    if not knows_tools(template):
        return HERMES
    if is_tagged:
        return TAGGED
    return HERMES if "<tool_call>" in template and not is_other else None
