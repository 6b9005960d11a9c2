"""How models write tool calls: what to look for, and the grammars that enforce it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from nanovllm.apps.server.output_parsers import harmony, muse
from nanovllm.apps.server.output_parsers.channels import ChannelsParser
from nanovllm.apps.server.output_parsers.json_calls import (
    CohereParser,
    DeepSeekParser,
    GraniteParser,
    HermesParser,
    HunYuanParser,
    KimiParser,
    LlamaParser,
    MistralParser,
    NemotronParser,
    Phi4Parser,
)
from nanovllm.apps.server.output_parsers.literal_calls import (
    CLOSING,
    ESCAPE,
    QUOTE,
    FunctionGemmaParser,
    Gemma4Parser,
)
from nanovllm.apps.server.output_parsers.parameter_types import Function
from nanovllm.apps.server.output_parsers.pythonic_calls import (
    CALLS_END,
    CALLS_START,
    LlamaPythonicParser,
    MiniCpmParser,
    OlmoParser,
    PythonicParser,
)
from nanovllm.apps.server.output_parsers.tagged_calls import (
    GlmParser,
    InvokeParser,
    SeedParser,
    TaggedParser,
)
from nanovllm.apps.server.output_parsers.tool_calls import MAX_CALLS, ToolCallParser
from nanovllm.errors import InvalidRequestError
from nanovllm.options.json_schema import X_GUIDANCE, grammar_schema
from nanovllm.options.structured_outputs import MAX_CHARS

_COHERE_ID = '{"tool_call_id": "'
_MORE = f"{{0,{MAX_CALLS - 1}}}"
"""How often a call may follow the first one in a grammar."""


class ToolFormat:
    """How a model writes tool calls."""

    parser: ClassVar[type[ToolCallParser]]
    tags: ClassVar[tuple[str, ...]]
    """Strings of the format that are tokens in some vocabularies."""
    ends: ClassVar[tuple[str, ...]] = ()
    """Tokens after calls that end the answer, also where the checkpoint does not list them."""
    arguments_key: ClassVar[str] = "arguments"
    calls: ClassVar[tuple[str, str]] = ("", "")
    """What stands before all calls and after them in a grammar; {0} is the first of the tags."""
    block: ClassVar[str] = "call"
    """A call and what is around each, likewise."""
    separator: ClassVar[str] = ""
    """What stands between calls."""
    holds_strict: ClassVar[bool] = False
    """Whether a grammar may stand over calls that the model makes of itself: it has them as the
    model writes them, after a tag that is a token."""
    channels: ClassVar[type[ChannelsParser] | None] = None
    """What reads the whole answer, in a format whose messages go to channels or recipients."""

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
        rules = [self._calls_rule(several, tag_ids)]
        rules += ["call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
        for index, function in enumerate(functions):
            before, after = self._around_arguments(function.name, tag_ids)
            rules.append(f"call_{index}: {before} arguments_{index} {after}")
            schema = json.dumps(arguments_schema(function.parameters))
            rules.append(f"arguments_{index}: %json {schema} // {json.dumps(function.name)}")
        text = "\n".join(rules) + "\n"
        if len(text) > MAX_CHARS:
            raise InvalidRequestError(
                f"tools: their grammar has {len(text)} characters without descriptions; the limit "
                f"is {MAX_CHARS}: send fewer tools, simpler ones, or tool_choice='auto'"
            )
        return text

    def _calls_rule(self, several: bool, tag_ids: Mapping[str, int]) -> str:
        """Return the rule `calls`, made of `call`."""
        tags = [tag_literal(tag, tag_ids) for tag in self.tags]
        before, after = (part.format(*tags) for part in self.calls)
        block = self.block.format(*tags)
        more = f"({self.separator} {block}){_MORE}" if several else ""
        return f"calls: {before} {block} {more} {after}"

    def _around_arguments(self, name: str, tag_ids: Mapping[str, int]) -> tuple[str, str]:
        """Return what stands before and after the arguments in a call of `name`."""
        opening = f'{{"name": {json.dumps(name)}, "{self.arguments_key}": '
        return quoted(opening), quoted("}")


class Hermes(ToolFormat):
    parser = HermesParser
    holds_strict = True
    tags: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    block = r'{0} "\n" call "\n" {1}'
    separator = r'"\n"'


class Tagged(Hermes):
    """A grammar has the model write JSON as in the Hermes format, which the parser takes too."""

    parser = TaggedParser
    holds_strict = False


class Llama(ToolFormat):
    parser = LlamaParser
    tags: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    arguments_key = "parameters"
    separator = '"; "'


class Mistral(ToolFormat):
    parser = MistralParser
    holds_strict = True
    tags: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]",)
    calls = ('{0} "["', '"]"')
    separator = '", "'


class MistralArgs(Mistral):
    """The newer form, of templates with [ARGS]."""

    tags: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    calls = ("", "")
    separator = ""

    def _around_arguments(self, name: str, tag_ids: Mapping[str, int]) -> tuple[str, str]:
        opening, _, arguments = (tag_literal(tag, tag_ids) for tag in self.tags)
        return f"{opening} {quoted(name)} {arguments}", ""


class Pythonic(ToolFormat):
    """A grammar has the model write JSON, which the parser takes too."""

    parser = PythonicParser
    tags: ClassVar[tuple[str, ...]] = (CALLS_START, CALLS_END)
    calls = ('{0} "["', '"]" {1}')
    separator = '", "'


class Gemma4(ToolFormat):
    parser = Gemma4Parser
    tags: ClassVar[tuple[str, ...]] = ("<|tool_call>", CLOSING, QUOTE)
    ends: ClassVar[tuple[str, ...]] = ("<|tool_response>",)
    block = "{0} call {1}"

    def _around_arguments(self, name: str, tag_ids: Mapping[str, int]) -> tuple[str, str]:
        """The arguments are JSON, which the parser takes too: a grammar enforces their schema."""
        return quoted(f"call:{name}"), ""


class Harmony(ToolFormat):
    """Calls end the answer, so it has one."""

    channels = harmony.HarmonyParser
    tags: ClassVar[tuple[str, ...]] = harmony.TAGS
    ends: ClassVar[tuple[str, ...]] = harmony.ENDS_OF_ANSWER

    def _calls_rule(self, several: bool, tag_ids: Mapping[str, int]) -> str:
        return "calls: call"

    def _around_arguments(self, name: str, tag_ids: Mapping[str, int]) -> tuple[str, str]:
        tags = (harmony.CHANNEL, harmony.CONSTRAIN, harmony.MESSAGE)
        channel, constrain, message = (tag_literal(tag, tag_ids) for tag in tags)
        header = quoted(f"commentary to=functions.{name} ")
        return f'{channel} {header} {constrain} "json" {message}', ""


class MuseGlimmer(ToolFormat):
    """A grammar has the arguments be JSON, which `MuseParser` takes too."""

    channels = muse.MuseParser
    tags: ClassVar[tuple[str, ...]] = muse.TAGS
    ends: ClassVar[tuple[str, ...]] = muse.ENDS_OF_ANSWER

    def _calls_rule(self, several: bool, tag_ids: Mapping[str, int]) -> str:
        start, end = (tag_literal(tag, tag_ids) for tag in (muse.START, muse.END))
        return "calls: call" + (f' ({end} {start} "assistant" call){_MORE}' if several else "")

    def _around_arguments(self, name: str, tag_ids: Mapping[str, int]) -> tuple[str, str]:
        opening = f'{muse.CALLS}\n{muse.INVOKE}{name}">\n'
        message = tag_literal(muse.MESSAGE, tag_ids)
        closing = quoted(f"\n{muse.INVOKE_END}\n{muse.CALLS_END}")
        return f"{quoted(f' to={name}')} {message} {quoted(opening)}", closing


class Granite(ToolFormat):
    parser = GraniteParser
    holds_strict = True
    tags: ClassVar[tuple[str, ...]] = ("<|tool_call|>",)
    calls = ('{0} "["', '"]"')
    separator = '", "'


class Phi4Mini(ToolFormat):
    parser = Phi4Parser
    tags: ClassVar[tuple[str, ...]] = ("<|tool_call|>", "<|/tool_call|>")
    calls = ('"functools["', '"]"')
    separator = '", "'


class Phi4MiniTags(Phi4Mini):
    """The form of the checkpoint's own template."""

    calls = ('{0} "["', '"]" {1}')


class HunYuanList(ToolFormat):
    parser = HunYuanParser
    tags: ClassVar[tuple[str, ...]] = ("<tool_calls>", "</tool_calls>")
    calls = ('{0} "["', '"]" {1}')
    separator = '", "'


class HunYuan(HunYuanList):
    """The form of the dense models."""

    tags = (*HunYuanList.tags, "<tool_call>", "</tool_call>")
    calls = ("{0}", "{1}")
    block = "{2} call {3}"
    separator = r'"\n"'

    def _around_arguments(self, name: str, tag_ids: Mapping[str, int]) -> tuple[str, str]:
        return quoted(f"{name}\n```json\n"), quoted("\n```")


class SeedOss(Tagged):
    parser = SeedParser
    tags: ClassVar[tuple[str, ...]] = ("<seed:tool_call>", "</seed:tool_call>")


class MiniMax(Tagged):
    parser = InvokeParser
    tags: ClassVar[tuple[str, ...]] = ("<minimax:tool_call>", "</minimax:tool_call>")


class Glm(Tagged):
    parser = GlmParser
    tags = (*Hermes.tags, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


class Nemotron(ToolFormat):
    parser: ClassVar[type[ToolCallParser]] = NemotronParser
    tags: ClassVar[tuple[str, ...]] = ("<TOOLCALL>", "</TOOLCALL>")
    calls = ('{0} "["', '"]" {1}')
    separator = '", "'


class Cohere(Nemotron):
    parser = CohereParser
    tags: ClassVar[tuple[str, ...]] = ("<|START_ACTION|>", "<|END_ACTION|>")
    arguments_key = "parameters"
    separator = r'",\n"'

    def _around_arguments(self, name: str, tag_ids: Mapping[str, int]) -> tuple[str, str]:
        opening = f'", "tool_name": {json.dumps(name)}, "parameters": '
        return f"{quoted(_COHERE_ID)} /[0-9]{{1,3}}/ {quoted(opening)}", quoted("}")


class Kimi(ToolFormat):
    parser = KimiParser
    holds_strict = True
    tags: ClassVar[tuple[str, ...]] = (
        *(KimiParser.tag, KimiParser.closing, *KimiParser.call_tags, KimiParser.separator),
    )
    calls = ("{0}", "{1}")
    block = "{2} call {3}"

    def _around_arguments(self, name: str, tag_ids: Mapping[str, int]) -> tuple[str, str]:
        separator = tag_literal(KimiParser.separator, tag_ids)
        return f"{quoted(f'functions.{name}:')} /[0-9]{{1,3}}/ {separator}", ""


class DeepSeek31(ToolFormat):
    parser = DeepSeekParser
    holds_strict = True
    tags: ClassVar[tuple[str, ...]] = (
        *(DeepSeekParser.tag, DeepSeekParser.closing, *DeepSeekParser.call_tags),
        DeepSeekParser.separator,
    )
    calls = ("{0}", "{1}")
    block = "{2} call {3}"

    def _around_arguments(self, name: str, tag_ids: Mapping[str, int]) -> tuple[str, str]:
        return f"{quoted(name)} {tag_literal(DeepSeekParser.separator, tag_ids)}", ""


class DeepSeek3(DeepSeek31):
    """The older form: with the type of the call, and a block of JSON."""

    separator = r'"\n"'

    def _around_arguments(self, name: str, tag_ids: Mapping[str, int]) -> tuple[str, str]:
        separator = tag_literal(DeepSeekParser.separator, tag_ids)
        opening = quoted(f"{name}\n```json\n")
        return f'"function" {separator} {opening}', quoted("\n```")


class FunctionGemma(Gemma4):
    parser = FunctionGemmaParser
    tags: ClassVar[tuple[str, ...]] = ("<start_function_call>", "<end_function_call>", ESCAPE)
    ends: ClassVar[tuple[str, ...]] = ("<start_function_response>",)


class LlamaPythonic(Pythonic):
    parser = LlamaPythonicParser
    tags: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    calls = ('"["', '"]"')


class Olmo3(Pythonic):
    parser = OlmoParser
    tags: ClassVar[tuple[str, ...]] = ("<function_calls>", "</function_calls>")
    calls = (r'{0} "\n"', r'"\n" {1}')
    separator = r'"\n"'


class MiniCpm3(Pythonic):
    parser = MiniCpmParser


TOOL_FORMATS: dict[str, type[ToolFormat]] = {
    "hermes": Hermes,
    "qwen3_coder": Tagged,
    "qwen3_xml": Tagged,
    "lfm2": Pythonic,
    "llama3_json": Llama,
    "mistral": Mistral,
    "gemma4": Gemma4,
    "openai": Harmony,
    "muse_glimmer": MuseGlimmer,
    "granite": Granite,
    "granite4": Hermes,
    "phi4_mini_json": Phi4Mini,
    "hunyuan_a13b": HunYuanList,
    "seed_oss": SeedOss,
    "functiongemma": FunctionGemma,
    "pythonic": LlamaPythonic,
    "olmo3": Olmo3,
    "ernie45": Hermes,
    "glm45": Glm,
    "glm47": Glm,
    "ling3": Glm,
    "poolside_v1": Glm,
    "minimax_m2": MiniMax,
    "kimi_k2": Kimi,
    "deepseek_v3": DeepSeek3,
    "deepseek_v31": DeepSeek31,
    "cohere_command3": Cohere,
    "nemotron_json": Nemotron,
    "minicpm3": MiniCpm3,
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
