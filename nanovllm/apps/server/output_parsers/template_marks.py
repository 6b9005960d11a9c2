"""Which formats of reasoning and of tool calls a chat template shows."""

from nanovllm.apps.server.output_parsers import reasoning, tool_formats as formats
from nanovllm.apps.server.output_parsers.parts import ToolCallStart
from nanovllm.apps.server.output_parsers.reasoning import ReasoningFormat
from nanovllm.apps.server.output_parsers.tool_formats import ToolFormat
from nanovllm.chat.template_shape import CALLED, TemplateShape
from nanovllm.chat.tool_messages import is_harmony, knows_tools, shows_pythonic_calls

_BY_MARKS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("<atem:",), formats.MUSE_GLIMMER),
    (("<seed:tool_call>",), formats.SEED_OSS),
    (("<minimax:tool_call>",), formats.MINIMAX),
    (("<TOOLCALL>",), formats.NEMOTRON),
    (("<|START_ACTION|>",), formats.COHERE),
    (("<|tool_calls_section_begin|>",), formats.KIMI),
    (("tool_declare<|im_middle|>",), formats.KIMI),
    (("<｜tool▁calls▁begin｜>", "```json"), formats.DEEPSEEK3),
    (("<｜tool▁calls▁begin｜>",), formats.DEEPSEEK31),
    (("<|tool_call_start|>", "```python"), formats.MINICPM3),
    (("<tool_call>", "<arg_key>"), formats.GLM),
    (("<start_function_call>",), formats.FUNCTION_GEMMA),
    (("<|tool_call>",), formats.GEMMA4),
    (("[TOOL_CALLS]", "[ARGS]"), formats.MISTRAL_ARGS),
    (("[TOOL_CALLS]",), formats.MISTRAL),
    (("<function_calls>",), formats.OLMO3),
    (("functools[",), formats.PHI4_MINI),
    (("<|/tool_call|>",), formats.PHI4_MINI_TAGS),
    (("<|/tool|>",), formats.PHI4_MINI_TAGS),
    (("<|tool_call|>",), formats.GRANITE),
    (("<tool_calls>[",), formats.HUNYUAN_LIST),
    (("<tool_calls>", "```json"), formats.HUNYUAN),
    (("<|tool_call_start|>",), formats.PYTHONIC),
    (("[func_name",), formats.LLAMA_PYTHONIC),
)
"""What a template has that shows a format; the first whose marks it has all."""
_OTHER = ("<function=", "<parameter", "<tool_sep>", ">>>")
"""Marks of formats that are not known: functionary's, Hy 3's."""


def find_reasoning_format(chat_template: str | None) -> ReasoningFormat | None:
    """Return the tags that a chat template has."""
    template = chat_template or ""
    if is_harmony(template):
        return reasoning.HARMONY
    if "to=self<|message|>" in template:
        return reasoning.MUSE
    if reasoning.COHERE.answer[0] in template:
        return reasoning.COHERE
    for tags in (reasoning.HUNYUAN, reasoning.ERNIE):
        has_results = "<response>" in tags.answer and "<minimax:" in template
        if all(tag in template for tag in (tags.closing, *tags.answer)) and not has_results:
            return tags
    known = (
        reasoning.THINK,
        reasoning.MISTRAL,
        reasoning.SEED,
        reasoning.GEMMA4,
        reasoning.COHERE,
        reasoning.MINICPM3,
    )
    return next((tags for tags in known if tags.closing in template), None)


def find_tool_format(
    chat_template: str | None, shape: TemplateShape | None = None
) -> ToolFormat | None:
    """Return the format that a chat template shows; None if it shows another one.

    Args:
        shape: how it takes tools, see `ChatTemplates.shape`: one that shows none is given them in
            the Hermes format, and where its words are not sure the parser must read the call that
            it writes. None is what its words say.
    """
    template = chat_template or ""
    if is_harmony(template):
        return formats.HARMONY
    if shape is not None and shape.tools is None:
        return formats.HERMES
    for marks, found in _BY_MARKS:
        if all(mark in template for mark in marks):
            return found
    suggested = _by_words(template)
    if suggested is None or suggested.parser is None or shape is None or not shape.written:
        return suggested
    parser = suggested.parser()
    parts = parser.feed(shape.written) + parser.finish(cut=False)
    is_read = any(isinstance(part, ToolCallStart) and part.name == CALLED for part in parts)
    return suggested if is_read else None


def _by_words(template: str) -> ToolFormat | None:
    """Return the format that words suggest which other formats use, too."""
    is_tagged = "<tool_call>" in template and "<function=" in template
    is_other = not is_tagged and any(mark in template for mark in _OTHER)
    has_header = "<|start_header_id|>" in template and '"parameters"' in template
    if not is_other and ("<|python_tag|>" in template or has_header):
        return formats.LLAMA
    if shows_pythonic_calls(template):
        return formats.PYTHONIC
    if not knows_tools(template):
        return formats.HERMES
    if is_tagged:
        return formats.TAGGED
    return formats.HERMES if "<tool_call>" in template and not is_other else None
