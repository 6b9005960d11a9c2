"""Which formats of reasoning and of tool calls a chat template shows."""

from nanovllm.apps.server.answers.parts import ToolCallStart
from nanovllm.apps.server.answers.reasoning import (
    GEMMA4,
    HARMONY,
    HUNYUAN,
    MISTRAL,
    MUSE,
    SEED,
    THINK,
    ReasoningFormat,
)
from nanovllm.apps.server.answers.tool_formats import (
    FunctionGemma,
    Gemma4,
    Granite,
    Harmony,
    Hermes,
    HunYuan,
    HunYuanList,
    Llama,
    LlamaPythonic,
    Mistral,
    MistralArgs,
    MuseGlimmer,
    Olmo3,
    Phi4Mini,
    Phi4MiniTags,
    Pythonic,
    SeedOss,
    Tagged,
    ToolFormat,
)
from nanovllm.chat.template_shape import CALLED, TemplateShape
from nanovllm.chat.tool_messages import is_harmony, knows_tools, shows_pythonic_calls

_BY_MARKS: tuple[tuple[tuple[str, ...], type[ToolFormat]], ...] = (
    (("<atem:",), MuseGlimmer),
    (("<seed:tool_call>",), SeedOss),
    (("<start_function_call>",), FunctionGemma),
    (("<|tool_call>",), Gemma4),
    (("[TOOL_CALLS]", "[ARGS]"), MistralArgs),
    (("[TOOL_CALLS]",), Mistral),
    (("<function_calls>",), Olmo3),
    (("functools[",), Phi4Mini),
    (("<|/tool_call|>",), Phi4MiniTags),
    (("<|/tool|>",), Phi4MiniTags),
    (("<|tool_call|>",), Granite),
    (("<tool_calls>[",), HunYuanList),
    (("<tool_calls>", "```json"), HunYuan),
    (("[func_name",), LlamaPythonic),
)
"""What a template has that shows a format; the first whose marks it has all."""
_OTHER = ("<function=", "<arg_key>", "<parameter", "<tool_sep>", ">>>")
"""Marks of formats that are not known: GLM's, functionary's, Hy 3's."""


def find_reasoning_format(chat_template: str | None) -> ReasoningFormat | None:
    """Return the tags that a chat template has."""
    template = chat_template or ""
    if is_harmony(template):
        return HARMONY
    if "to=self<|message|>" in template:
        return MUSE
    if all(tag in template for tag in (HUNYUAN.closing, *HUNYUAN.answer)):
        return HUNYUAN
    return next((tags for tags in (THINK, MISTRAL, SEED, GEMMA4) if tags.closing in template), None)


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
        return Harmony()
    if shape is not None and shape.tools is None:
        return Hermes()
    for marks, kind in _BY_MARKS:
        if all(mark in template for mark in marks):
            return kind()
    found = _by_words(template)
    if found is None or shape is None or not shape.written:
        return found
    parser = found.parser()
    parts = parser.feed(shape.written) + parser.finish(cut=False)
    is_read = any(isinstance(part, ToolCallStart) and part.name == CALLED for part in parts)
    return found if is_read else None


def _by_words(template: str) -> ToolFormat | None:
    """Return the format that words suggest which other formats use, too."""
    is_tagged = "<tool_call>" in template and "<function=" in template
    is_other = not is_tagged and any(mark in template for mark in _OTHER)
    has_header = "<|start_header_id|>" in template and '"parameters"' in template
    if not is_other and ("<|python_tag|>" in template or has_header):
        return Llama()
    if shows_pythonic_calls(template):
        return Pythonic()
    if not knows_tools(template):
        return Hermes()
    if is_tagged:
        return Tagged()
    return Hermes() if "<tool_call>" in template and not is_other else None
