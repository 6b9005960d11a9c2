"""Reads tool calls of families whose formats are those of others between other tags.

    <|tool_call|>[{"name": "f", "arguments": {...}}]                    Granite 3
    functools[{"name": "f", "arguments": {...}}]                        Phi-4-mini
    <tool_calls><tool_call>f ```json {...} ```</tool_call></tool_calls> HunYuan
    <seed:tool_call><function=f><parameter=key>value</parameter></function></seed:tool_call>
    <start_function_call>call:f{key:<escape>value<escape>}<end_function_call>
    [f(key='value'), g()]                                               Llama 3.2, by a template
    <function_calls> f(key='value') g() </function_calls>               Olmo 3

Pure text: knows no requests and no tokens.
"""

import re
from collections.abc import Collection, Sequence

from nanovllm.server.answers.call_arguments import Function, NotACall
from nanovllm.server.answers.json_calls import HermesParser
from nanovllm.server.answers.literal_calls import Gemma4Parser
from nanovllm.server.answers.pythonic_calls import PythonicParser
from nanovllm.server.answers.tagged_calls import TaggedParser
from nanovllm.server.answers.text_reader import Steps

FUNCTOOLS = "functools["
ESCAPE = "<escape>"
_CALL = "<tool_call>"
_CALL_END = "</tool_call>"
_FENCE = "```"
_NAME = re.compile(r"[^\s`{}<>\[\]]")


class GraniteParser(HermesParser):
    """<|tool_call|>[{"name": "f", "arguments": {...}}]; Granite 3.

    Version 3.1 also writes <tool_call> behind the tag, or in its place.
    """

    tag = "<|tool_call|>"
    closing = _CALL_END

    def __init__(self, marked: Collection[str] = (), functions: Sequence[Function] = ()) -> None:
        super().__init__(marked, functions)
        self._openings = (self._opening, self._tag(_CALL))

    def _calls(self) -> Steps[None]:
        yield from self._skip_tags(self._tag(_CALL))
        yield from super()._calls()


class Phi4Parser(HermesParser):
    """functools[{"name": "f", "arguments": {...}}], or the list between tags; Phi-4-mini."""

    tag = "<|tool_call|>"
    closing = "<|/tool_call|>"

    def __init__(self, marked: Collection[str] = (), functions: Sequence[Function] = ()) -> None:
        super().__init__(marked, functions)
        self._openings = (self._opening, FUNCTOOLS)

    def _calls(self) -> Steps[None]:
        if self._text[: self._pos].endswith(FUNCTOOLS):
            self._pos -= 1  # the bracket belongs to the list
        yield from super()._calls()


class HunYuanParser(HermesParser):
    """Calls in <tool_calls>, as a JSON list or each in <tool_call>; HunYuan, Apriel.

    A call is its name, and its arguments as a block of Markdown. Models forget the outer tags.
    """

    tag = "<tool_calls>"
    closing = "</tool_calls>"

    def __init__(self, marked: Collection[str] = (), functions: Sequence[Function] = ()) -> None:
        super().__init__(marked, functions)
        self._call_tag, self._call_end = self._tag(_CALL), self._tag(_CALL_END)
        self._openings = (self._opening, self._call_tag)

    def _calls(self) -> Steps[None]:
        is_tagged = self._text[: self._pos].endswith(self._call_tag)
        if not is_tagged:
            yield from self._skip_space()
            is_tagged = yield from self._accept(self._call_tag)
        if not is_tagged:
            yield from super()._calls()
            return
        while is_tagged:
            yield from self._tagged_call()
            is_tagged = yield from self._accept(self._call_tag)

    def _tagged_call(self) -> Steps[None]:
        """Read a call behind its tag, up to the tag that closes it."""
        yield from self._skip_space()
        if (yield from self._peek()) == "{":
            yield from self._call()
        else:
            name = yield from self._word(_NAME)
            yield from self._skip_space()
            yield from self._accept(_FENCE)
            yield from self._accept("json")
            yield from self._skip_space()
            if not name or (yield from self._peek()) != "{":
                raise NotACall
            yield from self._named_call(name)
            yield from self._skip_space()
            yield from self._accept(_FENCE)
        yield from self._skip_tags(self._call_end)


class SeedParser(TaggedParser):
    """Qwen 3 Coder's format between tags of its own; Seed-OSS."""

    tag = "<seed:tool_call>"
    closing = "</seed:tool_call>"


class FunctionGemmaParser(Gemma4Parser):
    """Gemma 4's format with other tags; FunctionGemma."""

    tag = "<start_function_call>"
    closing = "<end_function_call>"
    quote_tag = ESCAPE


class LlamaPythonicParser(PythonicParser):
    """[f(key=value), g()] at the start of an answer; Llama 3.2 with a template that asks for it."""

    tag = "<|python_tag|>"
    closing = ""
    only_known_keys = True

    def _find(self) -> tuple[int, int] | None:
        start = "" if self._has_sent_text else r"|\A\s*(?=\[)"
        match = re.search(rf"{re.escape(self._opening)}{start}", self._text)
        return None if match is None else match.span()


class OlmoParser(PythonicParser):
    """Calls in lines of their own between tags; Olmo 3."""

    tag = "<function_calls>"
    closing = "</function_calls>"
    in_lines = True
