"""Which formats of reasoning and of tool calls a chat template shows."""

from nanovllm.apps.server.output_parsers.parts import ToolCallStart
from nanovllm.apps.server.output_parsers.reasoning import (
    COHERE,
    ERNIE,
    GEMMA4,
    HARMONY,
    HUNYUAN,
    MINICPM3,
    MISTRAL,
    MUSE,
    SEED,
    THINK,
    ReasoningFormat,
)
from nanovllm.apps.server.output_parsers.tool_formats import (
    Cohere,
    DeepSeek3,
    DeepSeek31,
    FunctionGemma,
    Gemma4,
    Glm,
    Granite,
    Harmony,
    Hermes,
    HunYuan,
    HunYuanList,
    Kimi,
    Llama,
    LlamaPythonic,
    MiniCpm3,
    MiniMax,
    Mistral,
    MistralArgs,
    MuseGlimmer,
    Nemotron,
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
    (("<minimax:tool_call>",), MiniMax),
    (("<TOOLCALL>",), Nemotron),
    (("<|START_ACTION|>",), Cohere),
    (("<|tool_calls_section_begin|>",), Kimi),
    (("tool_declare<|im_middle|>",), Kimi),
    (("<｜tool▁calls▁begin｜>", "```json"), DeepSeek3),
    (("<｜tool▁calls▁begin｜>",), DeepSeek31),
    (("<|tool_call_start|>", "```python"), MiniCpm3),
    (("<tool_call>", "<arg_key>"), Glm),
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
    (("<|tool_call_start|>",), Pythonic),
    (("[func_name",), LlamaPythonic),
)
"""What a template has that shows a format; the first whose marks it has all."""
_OTHER = ("<function=", "<parameter", "<tool_sep>", ">>>")
"""Marks of formats that are not known: functionary's, Hy 3's."""


def find_reasoning_format(chat_template: str | None) -> ReasoningFormat | None:
    """Return the tags that a chat template has."""
    template = chat_template or ""
    if is_harmony(template):
        return HARMONY
    if "to=self<|message|>" in template:
        return MUSE
    if COHERE.answer[0] in template:
        return COHERE
    for tags in (HUNYUAN, ERNIE):
        has_results = "<response>" in tags.answer and "<minimax:" in template
        if all(tag in template for tag in (tags.closing, *tags.answer)) and not has_results:
            return tags
    known = (THINK, MISTRAL, SEED, GEMMA4, COHERE, MINICPM3)
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
