"""From a model's text to the parts of an answer: text, reasoning and tool calls."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

from tokenizers import AddedToken

from nanovllm.apps.server.output_parsers.answer_parser import AnswerParser
from nanovllm.apps.server.output_parsers.channels import ChannelsParser, HarmonyParser, MuseParser
from nanovllm.apps.server.output_parsers.parameter_types import Function
from nanovllm.apps.server.output_parsers.parts import PartsReader, marked_tag
from nanovllm.apps.server.output_parsers.reasoning import (
    REASONING_FORMATS,
    ReasoningFormat,
    ReasoningParser,
    find_reasoning_format,
)
from nanovllm.apps.server.output_parsers.tool_calls import quoted
from nanovllm.apps.server.output_parsers.tool_formats import (
    TOOL_FORMATS,
    ToolFormat,
    find_tool_format,
    tag_literal,
)
from nanovllm.chat.template_shape import TemplateShape
from nanovllm.errors import ConfigError, InvalidRequestError
from nanovllm.options.json_schema import X_GUIDANCE, grammar_schema
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.options.structured_outputs import (
    StructuredOutputsParams,
    made_grammar,
    structured_outputs,
)
from nanovllm.options.validation import shown

T = TypeVar("T")

_NO_REASONING = "start: answer\n"


class NamedTool(Protocol):
    """The tool that an answer must call."""

    @property
    def name(self) -> str: ...


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class AnswerFormat:
    """How a model marks reasoning and tool calls in its text. One per model.

    Args:
        reasoning: tags of the reasoning; None if it is not split off.
        tools: how calls are written; None if they are not looked for.
        added_tokens: the tokenizer's added tokens by id.
        may_reason: whether the model opens the reasoning itself, where the prompt does not.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        tools: ToolFormat | None,
        added_tokens: Mapping[int, AddedToken],
        *,
        may_reason: bool,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        # In a grammar no text matches a mark, so tags that are tokens stand there by their ids.
        self._tag_ids = {token.content: i for i, token in added_tokens.items()}
        self._special = {i for i, token in added_tokens.items() if token.special}
        self._may_reason = may_reason
        self._channels: type[ChannelsParser] | None = None
        """Reads whole answers in the format of the reasoning or of the calls."""
        for parser in (MuseParser, HarmonyParser):
            if reasoning is parser.reasoning or (tools is not None and tools.channels is parser):
                self._channels = parser

    def starts_in_reasoning(self, prompt: str) -> bool:
        """Whether a rendered prompt ends with the tag that opens the reasoning."""
        tags = self._reasoning if self._channels is None else self._channels.reasoning
        return tags is not None and prompt.rstrip().endswith(tags.begin)

    def starts_in_answer(self, prompt: str) -> bool:
        """Whether a rendered prompt ends with a tag that stands before the text."""
        tag = "" if self._reasoning is None else self._reasoning.answer[0]
        return tag != "" and prompt.rstrip().endswith(tag)

    def parser(
        self, prompt: str, tools: Sequence[Function], *, parallel_tool_calls: bool = True
    ) -> AnswerParser:
        """Return a parser for one answer.

        Args:
            prompt: the rendered conversation.
            tools: those that the model knows; without any, calls are not looked for. As in vLLM, a
                call of a tool that does not exist is a call.
            parallel_tool_calls: False drops the calls after the first.
        """
        has_tools = self._tools is not None and bool(tools)
        marked = self._marked_tags(has_tools=has_tools)
        reasoning: PartsReader | None = None
        calls = None
        if self._channels is not None:
            reasoning = self._channels(
                has_reasoning=self._reasoning is not None,
                has_calls=has_tools,
                started=self.starts_in_reasoning(prompt),
                marked=marked,
                functions=tools,
            )
        else:
            if self._reasoning is not None:
                reasoning = ReasoningParser(
                    self._reasoning,
                    started=self.starts_in_reasoning(prompt),
                    answer_started=self.starts_in_answer(prompt),
                    marked=marked,
                )
            if self._tools is not None and self._tools.parser is not None and has_tools:
                tags = [marked_tag(tag, marked) for tag in self._tools.tags]
                calls = self._tools.parser(tags, tools)
        return AnswerParser(reasoning, calls, several=parallel_tool_calls)

    def _marked_tags(self, *, has_tools: bool) -> frozenset[str]:
        """Return the tags that are special tokens: kept in the text, and marked there."""
        tags: list[str] = []
        if self._channels is not None:
            tags += self._channels.tags
        else:
            if self._reasoning is not None:
                tags += (self._reasoning.opening, self._reasoning.closing)
            if self._tools is not None and has_tools:
                tags += self._tools.tags
        return frozenset(tag for tag in tags if self._tag_ids.get(tag) in self._special)

    def params(
        self,
        params: SamplingParams,
        prompt: str,
        tools: Sequence[Function],
        tool_choice: ToolChoice,
        *,
        parallel_tool_calls: bool = True,
    ) -> SamplingParams:
        """Return the parameters with which a request runs.

        What the answer must be, calls or a form of the text, comes after the reasoning. Where the
        text must be JSON and the model may call tools, the answer is either of them. Tags that are
        special tokens stay in the text, marked for the parser. Tokens after calls end the answer.
        The arguments of strict tools fit their schemas also in calls that the model makes of its
        own accord, if the format allows it.

        Args:
            prompt: the rendered conversation.

        Raises:
            InvalidRequestError: as for `tool_grammar`; or the form cannot come after reasoning.
        """
        form = self.tool_grammar(
            tools, tool_choice, parallel_tool_calls=parallel_tool_calls, prompt=prompt
        )
        changes: dict[str, Any] = {}
        if form is None and params.structured_outputs is not None:
            given = structured_outputs(params.structured_outputs)
            calls = ""
            is_json = given.form in ("json", "json_object")
            if is_json and tools and tool_choice == "auto" and self._tools is not None:
                calls = self._tools.grammar(
                    tools, several=parallel_tool_calls, tag_ids=self._tag_ids
                )
            form = self._after_reasoning(given, prompt, calls)
        elif form is None and tool_choice == "auto" and any(tool.strict for tool in tools):
            form = self._strict_calls(tools, prompt, several=parallel_tool_calls)
        if form is not None:
            changes["structured_outputs"] = form
        kept = self._marked_tags(has_tools=bool(tools) and tool_choice != "none")
        if kept:
            changes["kept_token_ids"] = sorted(self._tag_ids[tag] for tag in kept)
            changes["marks_kept_tokens"] = True
        ends = () if self._tools is None or params.ignore_eos else self._tools.ends
        ids = [self._tag_ids[tag] for tag in ends if self._tag_ids.get(tag) in self._special]
        if ids:
            changes["stop_token_ids"] = (*params.stop_token_ids, *ids)
        return params.clone(**changes) if changes else params

    def tool_grammar(
        self,
        tools: Sequence[Function],
        tool_choice: ToolChoice,
        *,
        parallel_tool_calls: bool = True,
        prompt: str = "",
    ) -> StructuredOutputsParams | None:
        """Return what makes an answer call tools, after its reasoning; None where it need not.

        "required" makes one call or more, a named tool exactly one. Arguments fit the schema of
        their tool; properties that it does not declare come only with "additionalProperties".

        Raises:
            InvalidRequestError: there is no such tool, or the model's format is not known.
        """
        if tool_choice in ("none", "auto"):
            return None
        if self._tools is None:
            raise InvalidRequestError(
                f"tool_choice={shown(tool_choice)} needs a known format of tool calls: start the "
                f"server with tool_call_parser set to one of {', '.join(TOOL_FORMATS)}"
            )
        if not isinstance(tool_choice, str):
            tools = [tool for tool in tools if tool.name == tool_choice.name][:1]
            parallel_tool_calls = False
        if not tools:
            name = "" if isinstance(tool_choice, str) else f" named {shown(tool_choice.name)}"
            raise InvalidRequestError(f"tool_choice needs a tool{name}, but tools has none")
        rules = self._tools.grammar(tools, several=parallel_tool_calls, tag_ids=self._tag_ids)
        return made_grammar(f"{self._start(prompt)}answer: calls\n{rules}", "tools")

    def _strict_calls(
        self, tools: Sequence[Function], prompt: str, *, several: bool
    ) -> StructuredOutputsParams | None:
        """Return the form of a text with calls at its end; None if calls cannot be told from it."""
        known = self._tools
        if known is None or not known.holds_strict or known.tags[0] not in self._tag_ids:
            return None
        start = self._start(prompt)
        closes = self._reasoning is not None and prompt.rstrip().endswith(self._reasoning.closing)
        if self._reasoning is not None and start == _NO_REASONING and not closes:
            return None  # it may reason all the same
        rules = known.grammar(tools, several=several, tag_ids=self._tag_ids, only_strict=True)
        text = f"{start}answer: TEXT? calls?\nTEXT: /(?s:.+)/\n{rules}"
        return made_grammar(text, "strict tools")

    def _after_reasoning(
        self, form: StructuredOutputsParams, prompt: str, calls: str
    ) -> StructuredOutputsParams:
        """Return a form whose text may follow reasoning, or must if the prompt opens it.

        `calls` are rules of the calls that may come instead; "" for none.
        """
        start = self._start(prompt)
        if start == _NO_REASONING and not calls:
            return form
        if form.form in ("json", "json_object"):
            try:
                schema = json.loads(form.text) if form.form == "json" else {"type": "object"}
                schema = grammar_schema(schema)
                if isinstance(schema, dict):
                    schema = {"x-guidance": X_GUIDANCE, **schema}
                rule = f"%json {json.dumps(schema)}"
            except (ValueError, RecursionError):
                return form  # it is refused where it is compiled
        elif form.choice is not None:
            rule = " | ".join(map(quoted, form.choice))
        elif form.regex is not None:
            rule = "/{}/".format(re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\/", form.regex))
        else:
            if not form.is_lark:
                raise InvalidRequestError(
                    "structured_outputs.grammar must be in Lark's notation, with a rule named "
                    "start, because this model reasons before it answers"
                )
            rule = f"%lark {{\n{form.text}\n}}"  # its rules have separate names
        if self._channels is not None:
            opening = self._channels.text_opening.format(*map(self._literal, self._channels.tags))
            rule = f"{opening} body\nbody: {rule}"
        either = f"answer: form | calls\n{calls}" if calls else "answer: form\n"
        source = f"{form.source} next to tools" if calls else form.source
        return made_grammar(f"{start}{either}form: {rule}\n", source)

    def _start(self, prompt: str) -> str:
        """Return the rule `start` of a grammar: `answer`, with reasoning before."""
        inside = self.starts_in_reasoning(prompt)
        if self._channels is not None:
            return self._channels.answer_rules(self._literal, self._tag_ids, inside=inside)
        if self._reasoning is None or not (inside or self._may_reason):
            return _NO_REASONING
        opening, closing = map(self._literal, self._reasoning[:2])
        if label := self._reasoning.label:
            opening = f"{opening} {quoted(label)}"
        if prompt.rstrip().endswith(self._reasoning.closing):
            return _NO_REASONING
        if self._reasoning.closing in self._tag_ids:
            thought = f"thought: THOUGHT {closing} LINES?\n"
        else:
            thought = f"thought: closed LINES?\nclosed[suffix={closing}]: THOUGHT\n"
        begin = "thought" if inside else f"({opening} thought)?"
        return f"start: {begin} answer\n{thought}THOUGHT: /(?s:.*)/\nLINES: /\\n{{1,2}}/\n"

    def _literal(self, tag: str) -> str:
        return tag_literal(tag, self._tag_ids)


def find_answer_format(
    chat_template: str | None,
    tool_call_parser: str,
    reasoning_parser: str,
    added_tokens: Mapping[int, AddedToken] | None = None,
    shape: TemplateShape | None = None,
) -> AnswerFormat:
    """Return the format that a chat template shows, or the named one.

    Args:
        tool_call_parser, reasoning_parser: "auto" for what the template shows, "none", or a name.
        added_tokens: the tokenizer's, by id; some of them may be tags.
        shape: as for `find_tool_format`.

    Raises:
        ConfigError: a name is not known.
    """
    tools = find_tool_format(chat_template, shape)
    if tool_call_parser != "auto":
        named = _named("tool_call_parser", tool_call_parser, TOOL_FORMATS)
        # A template that shows the newer form of a format knows better which it is.
        if tools is None or named is None or not tools.is_like(named):
            tools = named
    reasoning = find_reasoning_format(chat_template)
    if reasoning_parser != "auto":
        reasoning = _named("reasoning_parser", reasoning_parser, REASONING_FORMATS)
    added_tokens = added_tokens or {}
    # Templates of models that reason unasked take the reasoning of earlier turns out of the text.
    shows = reasoning_parser != "auto" or re.search(
        r"reasoning_content|tool_plan|split\(['\"](</think>|\[/THINK\])|\[['\"]thinking['\"]\]",
        chat_template or "",
    )
    has_tag = reasoning and any(t.content == reasoning.opening for t in added_tokens.values())
    return AnswerFormat(reasoning, tools, added_tokens, may_reason=bool(shows and has_tag))


def _named(field: str, name: str, known: Mapping[str, T]) -> T | None:
    if name != "none" and name not in known:
        names = ", ".join(("auto", "none", *known))
        raise ConfigError(f"{field} must be one of {names}, got {shown(name)}")
    return known.get(name)
