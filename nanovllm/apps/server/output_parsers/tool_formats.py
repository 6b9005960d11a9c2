"""How models write tool calls: what reads each format, and the grammars that enforce it."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm.apps.server.output_parsers import harmony, json_calls, muse, tagged_calls
from nanovllm.apps.server.output_parsers.channels import ChannelsParser
from nanovllm.apps.server.output_parsers.json_calls import DeepSeekParser, KimiParser
from nanovllm.apps.server.output_parsers.literal_calls import FunctionGemmaParser, Gemma4Parser
from nanovllm.apps.server.output_parsers.parameter_types import Function
from nanovllm.apps.server.output_parsers.pythonic_calls import (
    LlamaPythonicParser,
    MiniCpmParser,
    OlmoParser,
    PythonicParser,
)
from nanovllm.apps.server.output_parsers.tool_calls import MAX_CALLS, ToolCallParser
from nanovllm.errors import InvalidRequestError
from nanovllm.options.json_schema import X_GUIDANCE, grammar_schema
from nanovllm.options.structured_outputs import MAX_CHARS

_MORE = f"{{0,{MAX_CALLS - 1}}}"
"""How often a call may follow the first one in a grammar."""
_JSON = r'"{{\"name\": \"NAME\", \"arguments\": " ARGUMENTS "}}"'
_LIST = ('{0} "["', '"]"')
_NUMBER = "/[0-9]{{1,3}}/"
_BLOCK = r'"NAME\n```json\n" ARGUMENTS "\n```"'


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How a model writes tool calls.

    The rules of the grammar have {0} for the first of the tags, and so on. Names of functions need
    no quoting in them: see `ToolName`.
    """

    parser: type[ToolCallParser] | None = None
    """What reads calls."""
    channels: type[ChannelsParser] | None = None
    """What reads whole answers, in a format whose messages go to channels or recipients."""
    tags: tuple[str, ...]
    """Strings of the format that are tokens in some vocabularies."""
    ends: tuple[str, ...] = ()
    """Tokens after calls that end the answer, also where the checkpoint does not list them."""
    calls: tuple[str, str] = ("", "")
    """What stands before all calls and after them in a grammar."""
    call: str = _JSON
    """A call of the function NAME, with ARGUMENTS."""
    block: str = "call"
    """A call and what is around each."""
    separator: str = ""
    """What stands between calls."""
    takes_several: bool = True
    """Whether an answer may have several calls."""
    holds_strict: bool = False
    """Whether a grammar may stand over calls that the model makes of itself: it has them as the
    model writes them, after a tag that is a token."""

    def is_like(self, other: "ToolFormat") -> bool:
        """Whether this is a form of the other; formats with tagged calls are forms of Hermes'."""
        is_hermes = other.parser is json_calls.HermesParser
        base = tagged_calls.TaggedParser if is_hermes else other.parser
        return bool(self.parser and base and issubclass(self.parser, base))

    def grammar(
        self, functions: Sequence[Function], *, several: bool, tag_ids: Mapping[str, int]
    ) -> str:
        """Return rules in llguidance's Lark, of which `calls` is one call or more.

        Args:
            several: whether more than one call may be made: `MAX_CALLS` at most.
            tag_ids: ids of the tags that are tokens.

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
            schema = json.dumps(arguments_schema(function.parameters))
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
SEED_OSS = dataclasses.replace(
    TAGGED,
    parser=tagged_calls.SeedParser,
    tags=("<seed:tool_call>", "</seed:tool_call>"),
)
MINIMAX = dataclasses.replace(
    TAGGED,
    parser=tagged_calls.InvokeParser,
    tags=("<minimax:tool_call>", "</minimax:tool_call>"),
)
GLM = dataclasses.replace(
    TAGGED,
    parser=tagged_calls.GlmParser,
    tags=(*HERMES.tags, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
LLAMA = ToolFormat(
    parser=json_calls.LlamaParser,
    tags=("<|python_tag|>",),
    call=_JSON.replace("arguments", "parameters"),
    separator='"; "',
)
MISTRAL = ToolFormat(
    parser=json_calls.MistralParser,
    tags=("[TOOL_CALLS]",),
    calls=_LIST,
    separator='", "',
    holds_strict=True,
)
MISTRAL_ARGS = ToolFormat(  # of newer templates
    parser=json_calls.MistralParser,
    tags=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    call='{0} "NAME" {2} ARGUMENTS',
    holds_strict=True,
)
GRANITE = dataclasses.replace(MISTRAL, parser=json_calls.GraniteParser, tags=("<|tool_call|>",))
PHI4_MINI = ToolFormat(
    parser=json_calls.Phi4Parser,
    tags=("<|tool_call|>", "<|/tool_call|>"),
    calls=('"functools["', '"]"'),
    separator='", "',
)
PHI4_MINI_TAGS = dataclasses.replace(PHI4_MINI, calls=('{0} "["', '"]" {1}'))  # its own template's
NEMOTRON = ToolFormat(
    parser=json_calls.NemotronParser,
    tags=("<TOOLCALL>", "</TOOLCALL>"),
    calls=('{0} "["', '"]" {1}'),
    separator='", "',
)
COHERE = dataclasses.replace(
    NEMOTRON,
    parser=json_calls.CohereParser,
    tags=("<|START_ACTION|>", "<|END_ACTION|>"),
    call=rf'"{{{{\"tool_call_id\": \"" {_NUMBER} '
    r'"\", \"tool_name\": \"NAME\", \"parameters\": " ARGUMENTS "}}"',
    separator=r'",\n"',
)
HUNYUAN_LIST = dataclasses.replace(
    NEMOTRON, parser=json_calls.HunYuanParser, tags=("<tool_calls>", "</tool_calls>")
)
HUNYUAN = ToolFormat(  # of the dense models
    parser=json_calls.HunYuanParser,
    tags=(*HUNYUAN_LIST.tags, *HERMES.tags),
    calls=("{0}", "{1}"),
    call=_BLOCK,
    block="{2} call {3}",
    separator=r'"\n"',
)
KIMI = ToolFormat(
    parser=KimiParser,
    tags=(KimiParser.tag, KimiParser.closing, *KimiParser.call_tags, KimiParser.separator),
    calls=("{0}", "{1}"),
    call=f'"functions.NAME:" {_NUMBER} {{4}} ARGUMENTS',
    block="{2} call {3}",
    holds_strict=True,
)
DEEPSEEK31 = dataclasses.replace(
    KIMI,
    parser=DeepSeekParser,
    tags=(
        *(DeepSeekParser.tag, DeepSeekParser.closing, *DeepSeekParser.call_tags),
        DeepSeekParser.separator,
    ),
    call='"NAME" {4} ARGUMENTS',
)
DEEPSEEK3 = dataclasses.replace(  # the older form: with the type of the call, and a block of JSON
    DEEPSEEK31, call=f'"function" {{4}} {_BLOCK}', separator=r'"\n"'
)
# Grammars of the next ones have the model write JSON, too.
PYTHONIC = dataclasses.replace(
    NEMOTRON, parser=PythonicParser, tags=(PythonicParser.tag, PythonicParser.closing)
)
MINICPM3 = dataclasses.replace(PYTHONIC, parser=MiniCpmParser)
LLAMA_PYTHONIC = dataclasses.replace(
    PYTHONIC, parser=LlamaPythonicParser, tags=("<|python_tag|>",), calls=('"["', '"]"')
)
OLMO3 = dataclasses.replace(
    PYTHONIC,
    parser=OlmoParser,
    tags=(OlmoParser.tag, OlmoParser.closing),
    calls=(r'{0} "\n"', r'"\n" {1}'),
    separator=r'"\n"',
)
GEMMA4 = ToolFormat(
    parser=Gemma4Parser,
    tags=(Gemma4Parser.tag, Gemma4Parser.closing, Gemma4Parser.quote_tag),
    ends=("<|tool_response>",),
    call='"call:NAME" ARGUMENTS',
    block="{0} call {1}",
)
FUNCTION_GEMMA = dataclasses.replace(
    GEMMA4,
    parser=FunctionGemmaParser,
    tags=(FunctionGemmaParser.tag, FunctionGemmaParser.closing, FunctionGemmaParser.quote_tag),
    ends=("<start_function_response>",),
)
HARMONY = ToolFormat(
    channels=harmony.HarmonyParser,
    tags=harmony.TAGS,
    ends=harmony.ENDS_OF_ANSWER,
    call='{1} "commentary to=functions.NAME " {2} "json" {3} ARGUMENTS',
    takes_several=False,  # calls end the answer
)
MUSE_GLIMMER = ToolFormat(
    channels=muse.MuseParser,
    tags=muse.TAGS,
    ends=muse.ENDS_OF_ANSWER,
    call=r'" to=NAME" {1} "<atem:function_calls>\n<atem:invoke name=\"NAME\">\n" ARGUMENTS '
    r'"\n</atem:invoke>\n</atem:function_calls>"',
    separator='{2} {0} "assistant"',
)

TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": HERMES,
    "qwen3_coder": TAGGED,
    "qwen3_xml": TAGGED,
    "lfm2": PYTHONIC,
    "llama3_json": LLAMA,
    "mistral": MISTRAL,
    "gemma4": GEMMA4,
    "openai": HARMONY,
    "muse_glimmer": MUSE_GLIMMER,
    "granite": GRANITE,
    "granite4": HERMES,
    "phi4_mini_json": PHI4_MINI,
    "hunyuan_a13b": HUNYUAN_LIST,
    "seed_oss": SEED_OSS,
    "functiongemma": FUNCTION_GEMMA,
    "pythonic": LLAMA_PYTHONIC,
    "olmo3": OLMO3,
    "ernie45": HERMES,
    "glm45": GLM,
    "glm47": GLM,
    "ling3": GLM,
    "poolside_v1": GLM,
    "minimax_m2": MINIMAX,
    "kimi_k2": KIMI,
    "deepseek_v3": DEEPSEEK3,
    "deepseek_v31": DEEPSEEK31,
    "cohere_command3": COHERE,
    "nemotron_json": NEMOTRON,
    "minicpm3": MINICPM3,
}
"""By the names that vLLM gives its tool parsers."""


def arguments_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the schema of a call's arguments: an object, as `grammar_schema` has it.

    A function that declares no properties takes no arguments.
    """
    schema: dict[str, Any] = {"type": "object", **(parameters or {})}
    if not schema.keys() & {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"}:
        schema = {"properties": {}, **schema}
    return {**grammar_schema(schema), "x-guidance": X_GUIDANCE}


def tag_literal(tag: str, tag_ids: Mapping[str, int]) -> str:
    """Return a tag as a grammar has it: by its id, if it is a token."""
    return f"<[{tag_ids[tag]}]>" if tag in tag_ids else quoted(tag)


def quoted(text: str) -> str:
    """Return a literal of a grammar."""
    return json.dumps(text, ensure_ascii=False)
