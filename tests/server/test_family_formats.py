"""What a model of a family must write where it must call a tool, and what is read of it."""

import pytest

from nanovllm import SamplingParams
from nanovllm.apps.server.output_parsers.answer_format import find_answer_format
from nanovllm.apps.server.output_parsers.parts import ReasoningDelta, TextDelta, ToolCallStart
from nanovllm.apps.server.protocol import FunctionName
from tests.server.output_parsers.test_answer_format import (
    CALLS,
    CITY,
    Grammar,
    answer_format,
    calls,
    parse,
)

JSON_CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'
JSON_CALLS = f'{JSON_CALL}, {{"name": "now", "arguments": {{}}}}'
TAGGED = '<tool_call>weather\n```json\n{"city": "Rome"}\n```</tool_call>'
SEED_CALL = f"<seed:tool_call>\n{JSON_CALL}\n</seed:tool_call>"
GEMMA_CALL = '<start_function_call>call:weather{"city": "Rome"}<end_function_call>'
MUSE_CALL = (
    ' to=weather<|message|><atem:function_calls>\n<atem:invoke name="weather">\n{"city": "Rome"}\n'
    "</atem:invoke>\n</atem:function_calls>"
)
MUSE_NEXT = "<|eom|><|start|>assistant"
MUSE_NOW = MUSE_CALL.replace("weather", "now").replace('"city": "Rome"', "")
MUSE = "<atem:function_calls> to=self<|message|>"
MINIMAX_CALL = f"<minimax:tool_call>\n{JSON_CALL}\n</minimax:tool_call>"
GLM_CALL = f"<tool_call>\n{JSON_CALL}\n</tool_call>"
DEEPSEEK_CALL = '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>'
DEEPSEEK_NOW = "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
BLOCK_CALL = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Rome"}\n```<｜tool▁call▁end｜>'
)
BLOCK_NOW = BLOCK_CALL.replace("weather", "now").replace('"city": "Rome"', "")
KIMI_CALL = (
    "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Rome"}<|tool_call_end|>'
)
KIMI_NOW = KIMI_CALL.replace("weather:0", "now:1").replace('"city": "Rome"', "")
COHERE_CALL = '{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Rome"}}'
COHERE_NOW = '{"tool_call_id": "1", "tool_name": "now", "parameters": {}}'
FORMATS = {
    "muse_glimmer": (MUSE, MUSE_CALL, f"{MUSE_CALL}{MUSE_NEXT}{MUSE_NOW}"),
    "granite": ("<|tool_call|>", f"<|tool_call|>[{JSON_CALL}]", f"<|tool_call|>[{JSON_CALLS}]"),
    "phi4_mini_json": ("functools[", f"functools[{JSON_CALL}]", f"functools[{JSON_CALLS}]"),
    "phi4_mini_json in tags": (
        "<|tool|><|/tool|>",
        f"<|tool_call|>[{JSON_CALL}]<|/tool_call|>",
        f"<|tool_call|>[{JSON_CALLS}]<|/tool_call|>",
    ),
    "hunyuan_a13b": (
        "<tool_calls>[",
        f"<tool_calls>[{JSON_CALL}]</tool_calls>",
        f"<tool_calls>[{JSON_CALLS}]</tool_calls>",
    ),
    "hunyuan_a13b, dense": (
        "<tool_calls> ```json",
        f"<tool_calls>{TAGGED}</tool_calls>",
        f"<tool_calls>{TAGGED}\n<tool_call>now\n```json\n{{}}\n```</tool_call></tool_calls>",
    ),
    "seed_oss": (
        "<seed:tool_call>",
        SEED_CALL,
        f'{SEED_CALL}\n<seed:tool_call>\n{{"name": "now", "arguments": {{}}}}\n</seed:tool_call>',
    ),
    "functiongemma": (
        "<start_function_call>",
        GEMMA_CALL,
        f"{GEMMA_CALL}<start_function_call>call:now{{}}<end_function_call>",
    ),
    "pythonic": ("[func_name1(", f"[{JSON_CALL}]", f"[{JSON_CALLS}]"),
    "olmo3": (
        "<function_calls>",
        f"<function_calls>\n{JSON_CALL}\n</function_calls>",
        f'<function_calls>\n{JSON_CALL}\n{{"name": "now", "arguments": {{}}}}\n</function_calls>',
    ),
}


DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
FORMATS |= {
    "minimax_m2": (
        "<minimax:tool_call>",
        MINIMAX_CALL,
        f'{MINIMAX_CALL}\n<minimax:tool_call>\n{{"name": "now", "arguments": {{}}}}\n'
        "</minimax:tool_call>",
    ),
    "glm45": (
        "<tool_call><arg_key>",
        GLM_CALL,
        f'{GLM_CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>',
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜>",
        DEEPSEEK_CALL.join(DEEPSEEK_SECTION),
        f"{DEEPSEEK_CALL}{DEEPSEEK_NOW}".join(DEEPSEEK_SECTION),
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜> ```json",
        BLOCK_CALL.join(DEEPSEEK_SECTION),
        f"{BLOCK_CALL}\n{BLOCK_NOW}".join(DEEPSEEK_SECTION),
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        f"<|tool_calls_section_begin|>{KIMI_CALL}<|tool_calls_section_end|>",
        f"<|tool_calls_section_begin|>{KIMI_CALL}{KIMI_NOW}<|tool_calls_section_end|>",
    ),
    "cohere_command3": (
        "<|START_ACTION|>",
        f"<|START_ACTION|>[{COHERE_CALL}]<|END_ACTION|>",
        f"<|START_ACTION|>[{COHERE_CALL},\n{COHERE_NOW}]<|END_ACTION|>",
    ),
    "nemotron_json": (
        "<TOOLCALL>",
        f"<TOOLCALL>[{JSON_CALL}]</TOOLCALL>",
        f"<TOOLCALL>[{JSON_CALLS}]</TOOLCALL>",
    ),
    "minicpm3": (
        "<|tool_call_start|>```python",
        f"<|tool_call_start|>[{JSON_CALL}]<|tool_call_end|>",
        f"<|tool_call_start|>[{JSON_CALLS}]<|tool_call_end|>",
    ),
}


CASES = [
    *(
        (template, one, two, "auto", special)
        for template, one, two in CALLS
        for special in (False, True)
    ),
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
    assert named.takes(one)
    assert not named.takes(two)
    single = calls(template, "required", special=special, parallel_tool_calls=False)
    assert single.takes(one)
    assert not single.takes(two)
    for found in (
        answer_format(template, special=special),
        find_answer_format(template, name, "auto"),
    ):
        for text, names in ((one, ["weather"]), (two, ["weather", "now"])):
            parts = parse(found, text)
            assert [part.name for part in parts if isinstance(part, ToolCallStart)] == names
            assert not any(isinstance(part, TextDelta) for part in parts)


def test_muse_glimmer_reasons_before_what_it_must_write() -> None:
    template = f"{{% if tools %}}{MUSE}{{% endif %}}"
    thought = f" to=self<|message|>Rome?{MUSE_NEXT}"
    required = calls(template, "required")
    assert required.takes(f"{thought}{thought}{MUSE_CALL}")
    assert not required.takes(thought)
    params = SamplingParams(structured_outputs={"json": CITY})
    form = Grammar(answer_format(template).params(params, "", [], "auto"))
    assert form.takes(f'{thought} to=user<|message|>{{"city": "Rome"}}')
    assert not form.takes('{"city": "Rome"}')
    parts = parse(answer_format(template), f"{thought} to=user<|message|>Yes.<|eot|>")
    assert parts == [ReasoningDelta("Rome?"), TextDelta("Yes.")]
