"""The formats of gpt-oss, Gemma 4 and Mistral, from tokens to answers, where tags are tokens."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

pytest.importorskip("fastapi")

from nanovllm import LLM, AsyncLLM, SamplingParams, demo_model
from nanovllm.apps.server.output_parsers.answer_format import AnswerFormat, find_answer_format
from nanovllm.apps.server.output_parsers.channels import HARMONY_TAGS, MUSE_TAGS
from nanovllm.apps.server.output_parsers.parts import Part
from nanovllm.apps.server.output_parsers.tool_formats import GEMMA4
from nanovllm.apps.server.protocol import Tool
from nanovllm.features.structured.grammar import GrammarCompiler
from nanovllm.options.structured_outputs import structured_outputs
from tests.checkpoints import copy_checkpoint, read_json, write_json
from tests.server.conftest import running
from tests.server.output_parsers.helpers import Split, split

_, CLOSING, QUOTE = GEMMA4.tags
GEMMA_TAGS = (*GEMMA4.tags, "<|channel>", "<channel|>", "<|tool_response>")
MISTRAL_TAGS = ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]")
TAGS = tuple(dict.fromkeys((*HARMONY_TAGS, *MUSE_TAGS, *GEMMA_TAGS, *MISTRAL_TAGS)))
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|> #}"
)
GEMMA = "{% if tools %}<|tool_call>{% endif %}{{ m.reasoning_content }}<|channel>thought<channel|>"
MUSE = "{% if tools %}<atem:function_calls>{% endif %} to=self<|message|>"
MISTRAL = "{% if tools %}[TOOL_CALLS]f[ARGS]{% endif %}[THINK]{{ block['thinking'] }}[/THINK]"
TOOLS = [Tool(name="f", parameters={"properties": {"a": {"enum": ["x", "<|end|>"]}}})]
TOOL: Any = {"type": "function", "function": TOOLS[0].model_dump(exclude_none=True)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The shipped model, whose last tokens are the tags; gpt-oss's end an answer."""
    path = tmp_path_factory.mktemp("families") / "model"
    generation = read_json(Path(demo_model.MODEL) / "generation_config.json")
    tokenizer = read_json(Path(demo_model.MODEL) / "tokenizer.json")
    vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    first = len(vocab) - len(TAGS)
    tokenizer["model"]["vocab"] = {text: i for text, i in vocab.items() if i < first}
    tokenizer["model"]["merges"] = merges[: -len(TAGS)]
    shape = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tags = [{"id": first + i, "content": t, **shape, "special": True} for i, t in enumerate(TAGS)]
    tokenizer["added_tokens"] = [*tags, *tokenizer["added_tokens"]]
    ends = [tag["id"] for tag in tags if tag["content"] in HARMONY_TAGS[3:5]]
    generation["eos_token_id"] = [*ends, *generation["eos_token_id"]]
    copied = copy_checkpoint(demo_model.MODEL, path, generation_config=generation)
    write_json(path / "tokenizer.json", tokenizer)
    (path / "chat_template.jinja").write_text(HARMONY)
    return copied


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    llm = LLM(model, max_model_len=256)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def client(front: str, model: str) -> Iterator[OpenAI]:
    llm = AsyncLLM(model, max_model_len=512)
    with running(llm) as server:
        yield server.client()
    llm.shutdown()


def format_of(llm: LLM, template: str) -> AnswerFormat:
    tokenizer: Any = llm.get_tokenizer()
    return find_answer_format(template, "auto", "auto", tokenizer.added_tokens_decoder)


def encode(llm: LLM, *texts: str) -> list[int]:
    """Return tokens: a text that is a tag is its token, in all others tags are text."""
    tokenizer: Any = llm.get_tokenizer()
    pieces = [piece for text in texts for piece in ([text] if text in TAGS else text)]
    return [i for piece in pieces for i in tokenizer.encode(piece, add_special_tokens=False)]


def saying(ids: list[int]) -> Callable[[list[int], Any], Any]:
    """Return a logits processor that makes the answer these tokens."""

    def force(output: list[int], logits: Any) -> Any:
        logits[ids[len(output)]] = 1e4
        return logits

    return force


def answers(llm: LLM, found: AnswerFormat, ids: list[int]) -> Iterator[tuple[Split, Any]]:
    """Yield the answer that these tokens make, and how it ended: whole, then streamed."""
    given = SamplingParams(
        temperature=0, max_tokens=len(ids), logits_processors=[saying([*ids, 0])]
    )
    params = found.params(given, "", TOOLS, "auto")
    (whole,) = llm.generate(["Hi"], params, use_tqdm=False)
    for outputs in ([whole], list(llm.stream("Hi", params))):
        parser = found.parser("", TOOLS)
        parts: list[Part] = []
        for output in outputs:
            parts += parser.feed(output.outputs[0].text)
        end = outputs[-1].outputs[0].finish_reason
        yield split(parts + parser.finish(cut=end != "stop")), end


START, MESSAGE, END, CALL, RETURN, CHANNEL, CONSTRAIN = HARMONY_TAGS
MUSE_END, MUSE_END_OF_TURN = MUSE_TAGS[2:]
CALL_OF_F = (CHANNEL, "commentary to=functions.f ", CONSTRAIN, "json", MESSAGE)
TO_F = (
    *(START, "assistant to=f", MESSAGE),
    '<atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="a">',
)
CLOSED = ("</atem:parameter>\n</atem:invoke>\n</atem:function_calls>", MUSE_END_OF_TURN)
CALLED = ("f", '{"a": "<|call|>"}')
THOUGHT = (CHANNEL, "analysis", MESSAGE, "Hm <|end|> é", END, START, "assistant")


@pytest.mark.parametrize(
    ("template", "texts", "answer", "end"),
    [
        (
            HARMONY,
            (*THOUGHT, CHANNEL, "final", MESSAGE, "a <|return|> 🌧", RETURN),
            ("Hm <|end|> é", "a <|return|> 🌧", []),
            "stop",
        ),
        (HARMONY, (*CALL_OF_F, '{"a": "<|call|>"}', CALL), ("", "", [CALLED]), "stop"),
        (HARMONY, (*CALL_OF_F, '{"a'), ("", "", [("f", '{"a')]), "length"),
        (HARMONY, ("Hello <|channel|>",), ("", "Hello <|channel|>", []), "length"),
        (
            MUSE,
            (" to=self", MESSAGE, "Hm <|eom|> é", MUSE_END, *TO_F, "x <|eot|>", *CLOSED),
            ("Hm <|eom|> é", "", [("f", '{"a": "x <|eot|>"}')]),
            "stop",
        ),
        (
            GEMMA,
            (
                *("<|channel>", "thought\nHm <channel|>\n", "<channel|>", "So:", "<|tool_call>"),
                *("call:f{a:", QUOTE, f"{CLOSING} {QUOTE}", QUOTE, "}", CLOSING),
                "<|tool_response>",
            ),
            ("Hm <channel|>", "So:", [("f", json.dumps({"a": f"{CLOSING} {QUOTE}"}))]),
            "stop",
        ),
        (
            MISTRAL,
            (
                *("[THINK]", "Hm [/THINK] so", "[/THINK]", "[TOOL_CALLS] is a tag"),
                *("[TOOL_CALLS]", "f", "[ARGS]", '{"a": "[ARGS]"}'),
                *("[TOOL_CALLS]", "g", "[ARGS]", "{}", RETURN),
            ),
            ("Hm [/THINK] so", "[TOOL_CALLS] is a tag", [("f", '{"a": "[ARGS]"}'), ("g", "{}")]),
            "stop",
        ),
    ],
)
def test_from_tokens_to_answers(
    llm: LLM, template: str, texts: tuple[str, ...], answer: Split, end: str
) -> None:
    for found in answers(llm, format_of(llm, template), encode(llm, *texts)):
        assert found == (answer, end)


@pytest.mark.parametrize("tag", [CALL, "<|im_end|>"])
def test_chat_stops_at_every_token_that_ends_an_answer(llm: LLM, tag: str) -> None:
    tokenizer: Any = llm.get_tokenizer()
    ids = [*encode(llm, "a", END, "b"), tokenizer.convert_tokens_to_ids(tag), 0]
    params = SamplingParams(temperature=0, max_tokens=9, logits_processors=[saying(ids)])
    (output,) = llm.chat([{"role": "user", "content": "Hi"}], params, use_tqdm=False)
    assert output.outputs[0].token_ids == ids[:-1]
    assert (output.text, output.outputs[0].finish_reason) == ("ab", "stop")


def test_tokens_that_end_an_answer_need_not_be_in_the_checkpoint(llm: LLM) -> None:
    """Symptom: with an older generation_config.json gpt-oss goes on behind a call."""
    tokenizer: Any = llm.get_tokenizer()
    found = format_of(llm, HARMONY)
    params = found.params(SamplingParams(stop_token_ids=[1]), "", [], "auto")
    assert params.stop_token_ids == (1, *tokenizer.convert_tokens_to_ids([CALL, RETURN]))
    ignoring = found.params(SamplingParams(ignore_eos=True), "", [], "auto")
    assert ignoring.stop_token_ids == ()


def takes(llm: LLM, params: SamplingParams, *texts: str) -> bool:
    """Whether a grammar takes an answer as whole."""
    tokenizer: Any = llm.get_tokenizer()
    end = tokenizer.eos_token_id
    compiler = GrammarCompiler(tokenizer.backend_tokenizer.to_str, 1024, (end,))
    matcher = compiler.matcher(structured_outputs(params.structured_outputs))
    ids = encode(llm, *texts)
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


def test_grammars_of_harmony(llm: LLM) -> None:
    found, prompt = format_of(llm, HARMONY), "<|start|>assistant"
    final = (CHANNEL, "final", MESSAGE)
    choice = SamplingParams(structured_outputs={"choice": ["yes", "no"]})
    form = found.params(choice, prompt, [], "auto")
    assert takes(llm, form, *final, "yes")
    assert takes(llm, form, *THOUGHT, *THOUGHT, *final, "no")
    for wrong in (("yes",), (*THOUGHT, "yes"), (*final, "maybe"), (*CALL_OF_F, "{}")):
        assert not takes(llm, form, *wrong)
    inside = found.params(choice, f"{prompt}{CHANNEL}analysis{MESSAGE}", [], "auto")
    assert takes(llm, inside, "Hm", END, START, "assistant", *final, "yes")
    calls = found.params(SamplingParams(), prompt, TOOLS, "required")
    assert takes(llm, calls, *THOUGHT, *CALL_OF_F, '{"a": "<|end|>"}')
    assert not takes(llm, calls, *CALL_OF_F, '{"a": "y"}')
    assert not takes(llm, calls, *final, "yes")
    json_or_call = SamplingParams(structured_outputs={"json_object": True})
    either = found.params(json_or_call, prompt, TOOLS, "auto")
    assert takes(llm, either, *final, '{"b": 1}')
    assert takes(llm, either, *CALL_OF_F, '{"a": "x"}')


def test_grammars_of_gemma(llm: LLM) -> None:
    found = format_of(llm, GEMMA)
    params = found.params(SamplingParams(), "", TOOLS, "required")
    one = ("<|tool_call>", 'call:f{"a": "x"}', CLOSING)
    thought = ("<|channel>", "thought\nHm", "<channel|>")
    assert takes(llm, params, *one)
    assert takes(llm, params, *thought, "\n", *one, *one)
    assert not takes(llm, params, "<|tool_call>", 'call:f{"a": "y"}', CLOSING)
    assert not takes(llm, params, "<|tool_call>", 'call:g{"a": "x"}', CLOSING)
    single = found.params(SamplingParams(), "", TOOLS, "required", parallel_tool_calls=False)
    assert not takes(llm, single, *one, *one)
    assert found.starts_in_reasoning("<|turn>model\n<|channel>thought\n")
    behind = found.params(SamplingParams(), "<|channel>thought\n<channel|>", TOOLS, "required")
    assert not takes(llm, behind, *thought, *one)


def test_a_mistral_model_that_reasons_may_do_so_before_a_call(llm: LLM) -> None:
    found = format_of(llm, MISTRAL)
    params = found.params(SamplingParams(), "[/INST]", TOOLS, "required")
    call = ("[TOOL_CALLS]", "f", "[ARGS]", '{"a": "x"}')
    assert takes(llm, params, *call, *call)
    assert takes(llm, params, "[THINK]", "Hm", "[/THINK]", *call)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_over_http(llm: LLM, client: OpenAI, stream: bool) -> None:
    """A call that the grammar enforces ends with the finish reason of calls."""
    given: dict[str, Any] = {"model": "model", "max_tokens": 200, "tools": [TOOL]}
    given |= {"messages": [{"role": "user", "content": "Hi"}], "tool_choice": "required"}
    # The shipped model would never end its reasoning, so it begins none.
    tokenizer: Any = llm.get_tokenizer()
    forbidden = [i for t, i in tokenizer.get_vocab().items() if "analysis".startswith(t)]
    given["logit_bias"] = {str(i): -100 for i in (*forbidden, *encode(llm, MESSAGE))}
    if stream:
        with client.chat.completions.stream(**given) as events:
            (choice,) = events.get_final_completion().choices
    else:
        (choice,) = client.chat.completions.create(**given).choices
    (call,) = choice.message.tool_calls or ()
    assert call.function.name == "f"
    assert json.loads(call.function.arguments).get("a", "x") in ("x", "<|end|>")
    assert choice.finish_reason == "tool_calls"
