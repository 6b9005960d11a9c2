"""Structured outputs: values, and outputs of the demo model that have the form asked for."""

import contextlib
import itertools
import json
import pickle
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from nanovllm import LLM, NanoVLLMError, SamplingParams, StructuredOutputsParams, demo_model
from nanovllm.errors import InvalidRequestError
from nanovllm.factory import make_engine
from nanovllm.options.config import Config
from nanovllm.options.structured_outputs import structured_outputs
from tests.gguf_files import make_gguf
from tests.glossary import QUESTIONS
from tests.helpers import (
    COMPACT,
    PERSON,
    Request,
    assert_idle,
    generate_all,
    generate_in_random_order,
)
from tests.random_schemas import check_schemas
from tests.speculation.proposers.drafting import allow_all

SUM = 'start: term (" + " term)~1..3\nterm: NUMBER | "(" start ")"\nNUMBER: /[1-9][0-9]?/'


@pytest.mark.parametrize(
    ("given", "form", "text"),
    [
        ({"json": {"type": "object", "title": "ß"}}, "json", '{"type": "object", "title": "ß"}'),
        ({"json": '{"type": "object"}'}, "json", '{"type": "object"}'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["yes", "no"]}, "choice", '["yes", "no"]'),
        ({"grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"json_object": True, "regex": None}, "json_object", "true"),
        ({"regex": "a", "json_object": False, "disable_any_whitespace": False}, "regex", "a"),
    ],
)
def test_values_are_frozen_hashable_and_picklable(
    given: dict[str, Any], form: str, text: str
) -> None:
    value = structured_outputs(given)
    assert value == StructuredOutputsParams(**given) == structured_outputs(value)
    assert (value.form, value.text) == (form, text)
    params = SamplingParams(structured_outputs=given)
    assert params.structured_outputs == value
    assert len({params, SamplingParams(structured_outputs=value)}) == 1
    assert pickle.loads(pickle.dumps(params)) == params


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "must have one of json, regex, choice, grammar, json_object, got none"),
        ({"json_object": False}, "got none"),
        ({"regex": "a", "choice": ["b"]}, "got regex and choice"),
        ({"jsn": {}}, "has no field 'jsn'; did you mean 'json'?"),
        ({"structural_tag": "{}"}, "structural_tag='{}' is not supported: use grammar"),
        ({"choice": []}, "choice must be a list of strings, not empty, got []"),
        ({"choice": "yes"}, "choice must be a list of strings, not empty, got 'yes'"),
        ({"choice": ["a", 5]}, "each has a character at least, got 5"),
        ({"choice": ["a", ""]}, "each has a character at least, got ''"),
        ({"regex": 5}, "structured_outputs.regex must be a string that is not empty, got 5"),
        ({"grammar": ""}, "structured_outputs.grammar must be a string that is not empty, got ''"),
        ({"json": 5}, "json must be a JSON schema, as a text or a dictionary, got 5"),
        ({"json": {"const": {1}}}, "Object of type set is not JSON serializable, got {'const'"),
        ({"json": {"const": float("nan")}}, "Out of range float values"),
        ({"json_object": 1}, "json_object must be True or False, got 1"),
        ({"json": {}, "disable_any_whitespace": "no"}, "disable_any_whitespace must be True or"),
        ("json", "must be StructuredOutputsParams or a dictionary such as"),
        ([("json", {})], "must be StructuredOutputsParams or a dictionary such as"),
        ({5: {}}, "must be StructuredOutputsParams or a dictionary such as"),
    ],
)
def test_bad_values_are_refused(given: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(message)):
        SamplingParams(structured_outputs=given)


def test_deep_dictionary_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequestError, match=r"^structured_outputs\.json must be"):
        SamplingParams(structured_outputs={"json": schema})


@pytest.mark.parametrize(
    ("options", "forces"),
    [
        ({}, True),
        (
            {"logit_bias": {3: 100.0}, "presence_penalty": 1.0, "stop": "a", "ignore_eos": True},
            True,
        ),
        ({"prompt_logprobs": 2, "n": 3}, True),
        ({"logprobs": 0}, False),
        ({"bad_words": ["a"]}, False),
        ({"min_tokens": 1}, False),
        ({"allowed_token_ids": [3]}, False),
        ({"logits_processors": [lambda token_ids, logits: logits]}, False),
        ({"structured_outputs": None}, False),
    ],
)
def test_tokens_are_forced_where_no_other_rule_can_forbid_them(
    options: dict[str, Any], forces: bool
) -> None:
    assert SamplingParams(**{"structured_outputs": COMPACT, **options}).can_jump_forward is forces


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(demo_model.MODEL, max_model_len=512, kvcache_block_size=32, num_kvcache_blocks=256)
    yield llm
    llm.shutdown()


def outputs_of(llm: LLM, grammar: Any, num: int = 8, **options: Any) -> list[Any]:
    """Return completions at several temperatures; check that they leave nothing behind."""
    params = [
        SamplingParams(
            **{"temperature": 0.8 * (i % 4), "seed": i, "max_tokens": 200, **options},
            structured_outputs=grammar,
        )
        for i in range(num)
    ]
    outputs = llm.generate(QUESTIONS[:num], params, use_tqdm=False)
    assert_idle(llm)
    return [output.outputs[0] for output in outputs]


def check_person(text: str) -> None:
    Draft202012Validator(PERSON).validate(json.loads(text))


def check_sum(text: str) -> None:
    assert eval(text, {"__builtins__": {}}) >= 2


def check_object(text: str) -> None:
    assert isinstance(json.loads(text), dict)


CASES: dict[str, tuple[Any, Callable[[str], object]]] = {
    "choice": ({"choice": ["red", "green", "reddish", "grün 🌱"]}, lambda text: None),
    "marks": ({"choice": ["ends <|im_end|> so", "a <think>", "<|im_end|>"]}, lambda text: None),
    "regex": ({"regex": r"[A-Z][a-z]{2,5}, \d+\."}, lambda text: None),
    "json": ({"json": PERSON}, check_person),
    "compact json": (COMPACT, check_person),
    "json as text": ({"json": json.dumps(PERSON)}, check_person),
    "json_object": ({"json_object": True, "disable_any_whitespace": True}, check_object),
    "lark": ({"grammar": SUM}, check_sum),
    "gbnf": ({"grammar": 'root ::= "1" (" + 1" | " + 23")'}, check_sum),
}


@pytest.mark.parametrize("case", CASES)
def test_finished_outputs_have_the_form(llm: LLM, case: str) -> None:
    grammar, check = CASES[case]
    completions = outputs_of(llm, grammar)
    finished = [c for c in completions if c.finish_reason == "stop"]
    assert len(finished) >= 4
    for completion in finished:
        check(completion.text)
        assert completion.stop_reason is None
        if "choice" in grammar:
            assert completion.text in grammar["choice"]
        if "regex" in grammar:
            assert re.fullmatch(grammar["regex"], completion.text)
    for completion in completions:
        assert completion.finish_reason in ("stop", "length")


def test_random_json_schemas(llm: LLM) -> None:
    num_finished, wrong = check_schemas(llm, 25, seed=1)
    assert num_finished >= 20
    assert wrong == []


def test_forced_tokens_are_those_that_the_model_would_have_to_choose(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: an answer depends on whether its tokens are forced, or on log-probabilities."""
    steps = llm.engine.stats.step_sizes
    begin = steps.total()
    forced = [outputs_of(llm, grammar) for grammar, _ in CASES.values()]
    middle = steps.total()
    monkeypatch.setattr(SamplingParams, "can_jump_forward", property(lambda self: False))
    assert [outputs_of(llm, grammar) for grammar, _ in CASES.values()] == forced
    assert middle - begin < 0.8 * (steps.total() - middle)


@pytest.mark.parametrize("tied", [False, True])
def test_forced_tokens_of_a_gguf_file(
    tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokenizer is converted, and its quantised embedding may be the head, too."""
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    file, _ = make_gguf(tmp_path, "llama", "Q4_0", tokens=marks, tie_word_embeddings=tied)
    llm = LLM(file, max_model_len=128, num_kvcache_blocks=40)
    choice = [*marks, "a <|im_end|> b"]
    forced = outputs_of(llm, {"choice": choice})
    assert all(found.text in choice and found.finish_reason == "stop" for found in forced)
    forced += outputs_of(llm, {"regex": "[ab]{2}<[a-z]{3}>x"})
    monkeypatch.setattr(SamplingParams, "can_jump_forward", property(lambda self: False))
    chosen = outputs_of(llm, {"choice": choice})
    assert chosen + outputs_of(llm, {"regex": "[ab]{2}<[a-z]{3}>x"}) == forced
    llm.shutdown()


def test_logprobs_change_no_token(llm: LLM) -> None:
    with_logprobs = outputs_of(llm, COMPACT, logprobs=2)
    for found, expected in zip(with_logprobs, outputs_of(llm, COMPACT), strict=True):
        assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
        assert len(found.logprobs) == len(found.token_ids)


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 11])
def test_forced_tokens_stop_at_max_tokens(llm: LLM, max_tokens: int) -> None:
    whole = outputs_of(llm, COMPACT, num=2)
    for found, expected in zip(
        outputs_of(llm, COMPACT, num=2, max_tokens=max_tokens), whole, strict=True
    ):
        assert found.token_ids == expected.token_ids[:max_tokens]
        assert found.finish_reason == "length"


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_inside_forced_tokens(llm: LLM, include: bool) -> None:
    options = {"stop": ['me":', "gua"], "include_stop_str_in_output": include}
    for completion in outputs_of(llm, COMPACT, num=4, **options):
        assert completion.text == ('{"name":' if include else '{"na')
        assert (completion.finish_reason, completion.stop_reason) == ("stop", 'me":')


def test_stop_token_inside_forced_tokens(llm: LLM) -> None:
    (whole,) = outputs_of(llm, COMPACT, num=1)
    token = whole.token_ids[3]
    (found,) = outputs_of(llm, COMPACT, num=1, stop_token_ids=[token])
    end = whole.token_ids.index(token) + 1
    assert found.token_ids == whole.token_ids[:end]
    assert (found.finish_reason, found.stop_reason) == ("stop", token)


def test_stop_token_of_its_own_may_end_a_complete_output(llm: LLM) -> None:
    """No end-of-sequence token ends this request, and the grammar itself allows no "Z"."""
    token = llm.get_tokenizer().encode("Z")[0]
    for completion in outputs_of(
        llm, {"regex": "[ab]{2,4}"}, ignore_eos=True, stop_token_ids=[token]
    ):
        if completion.finish_reason == "stop":
            assert re.fullmatch("[ab]{2,4}", completion.text)
            assert completion.stop_reason == token


def test_ignore_eos_repeats_the_end(llm: LLM) -> None:
    (found,) = outputs_of(llm, {"choice": ["red"]}, num=1, ignore_eos=True, max_tokens=9)
    assert len(found.token_ids) == 9
    assert found.text == "red"
    assert found.finish_reason == "length"


@pytest.mark.parametrize("options", [{}, {"logprobs": 1}, {"ignore_eos": True}, {"stop": ["x"]}])
def test_a_complete_output_ends_without_an_end_token(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Symptom: with a checkpoint that names no end-of-sequence token it ends as an error."""
    grammars = llm.engine.input_processor.grammars
    assert grammars is not None
    monkeypatch.setattr(grammars, "eos_token_ids", ())
    monkeypatch.setattr(llm.engine.scheduler, "eos_token_ids", frozenset())
    for found in outputs_of(llm, {"regex": "[ab]{2}"}, num=4, **options):
        assert re.fullmatch("[ab]{2}", found.text)
        assert (found.finish_reason, found.stop_reason) == ("stop", None)
        assert found.logprobs is None or len(found.logprobs) == len(found.token_ids)
    (token,) = llm.get_tokenizer().encode("Z")
    (found,) = outputs_of(llm, {"choice": ["red"]}, num=1, stop_token_ids=[token])
    assert (found.finish_reason, found.stop_reason) == ("stop", token)


def test_rules_that_leave_no_token_end_the_request(llm: LLM) -> None:
    """Only the end is allowed, and min_tokens forbids it; or no allowed token fits the grammar."""
    for options in ({"min_tokens": 9}, {"allowed_token_ids": [5, 6]}):
        (found,) = outputs_of(llm, {"choice": ["red"]}, num=1, **options)
        assert found.finish_reason == "error"
        assert "structured_outputs" in found.stop_reason
    (found,) = outputs_of(llm, {"choice": ["red"]}, num=1)
    assert found.text == "red"


def test_other_rules_choose_among_what_the_grammar_allows(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    (a,), (b,) = tokenizer.encode("a"), tokenizer.encode("b")
    grammar = {"regex": "[abc]{5}"}
    ids = [tokenizer.encode(letter)[0] for letter in "abc"]
    options: dict[str, Any] = {"allowed_token_ids": [*ids, *llm.engine.scheduler.eos_token_ids]}
    for more, expected in (
        ({"logit_bias": {b: 100.0}}, {"bbbbb"}),
        ({"logit_bias": {a: -100.0, b: -100.0}}, {"ccccc"}),
        ({"bad_words": ["a", "b"]}, {"ccccc"}),
        ({"logits_processors": [lambda token_ids, logits: logits * 0]}, None),
    ):
        texts = {c.text for c in outputs_of(llm, grammar, **options, **more)}
        assert all(re.fullmatch("[abc]{5}", text) for text in texts)
        assert expected is None or texts == expected


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "json that is none": ({"json": '{"type":'}, "EOF while parsing"),
    "deep schema": ({"json": '{"items":' * 5000 + "{}" + "}" * 5000}, "nested too deeply"),
    "surrogate": ({"regex": "\ud800"}, "surrogates not allowed"),
    "lark": ({"grammar": "start: a"}, "no rule or token named a"),
}


@pytest.mark.parametrize(
    "given", [{"grammar": "\n" * 10**6}, {"regex": "a" * 65_537}, {"choice": ["a" * 65_536]}]
)
def test_a_long_form_is_refused_when_made(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"structured_outputs\.\w+ has .* limit is 65536"):
        SamplingParams(structured_outputs=given)


@pytest.mark.parametrize("case", BAD)
def test_bad_grammars_are_refused_at_once(llm: LLM, case: str) -> None:
    given, reason = BAD[case]
    start = time.monotonic()
    form = next(iter(given))
    with pytest.raises(
        InvalidRequestError, match=rf"^prompt 0: structured_outputs\.{form} "
    ) as error:
        llm.generate("a", SamplingParams(structured_outputs=given), use_tqdm=False)
    assert reason in str(error.value)
    assert len(str(error.value)) < 600
    assert time.monotonic() - start < 1
    (found,) = outputs_of(llm, {"choice": ["red"]}, num=1)
    assert found.text == "red"


@pytest.mark.parametrize("regex", ["(a|aa)+b", "((a{1,100}){1,100}){1,100}", "(?:a?){5000}a{5000}"])
def test_catastrophic_expressions_take_no_longer(llm: LLM, regex: str) -> None:
    start = time.monotonic()
    with contextlib.suppress(InvalidRequestError):  # of a limit
        (found,) = outputs_of(llm, {"regex": regex}, num=1, max_tokens=20)
        assert found.finish_reason in ("stop", "length", "error")
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("options", [{}, {"logprobs": 0}])  # with forced tokens and without
def test_an_answer_that_leads_nowhere_ends_with_its_reason(
    llm: LLM, options: dict[str, Any]
) -> None:
    """Symptom: it is called too complex, and NoExtensionBias."""
    (found,) = outputs_of(llm, {"grammar": 'start: "abcd" x\nx: x "e"'}, num=1, **options)
    assert (found.text, found.finish_reason) == ("abcd", "error")
    assert re.fullmatch(
        r"the output cannot be finished: structured_outputs\.grammar '.*': after [1-4] tokens "
        "nothing can follow, and it is not complete",
        found.stop_reason,
    )


def test_without_llguidance_the_error_says_what_to_install(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    params = SamplingParams(structured_outputs={"regex": "this was not compiled before"})
    with pytest.raises(InvalidRequestError, match=r"pip install -e '\.\[structured\]'"):
        llm.generate("a", params, use_tqdm=False)


def test_without_a_tokenizer_they_are_refused(random_llm: LLM) -> None:
    params = SamplingParams(structured_outputs={"regex": "a"})
    with pytest.raises(NanoVLLMError, match="no tokenizer, so structured_outputs cannot be used"):
        random_llm.generate([[1, 2]], params, use_tqdm=False)


def make_requests() -> list[Request]:
    """Requests with and without grammars, at several temperatures, with other parameters."""
    special: list[dict[str, Any]] = [
        {"structured_outputs": COMPACT},
        {"structured_outputs": {"json": PERSON}, "top_p": 0.9},
        {},
        {"structured_outputs": {"choice": ["red", "green", "grün 🌱"]}, "n": 3},
        {"structured_outputs": COMPACT, "logprobs": 2, "presence_penalty": 0.5},
        {"structured_outputs": {"grammar": SUM}, "top_k": 9, "max_tokens": 11},
        {"structured_outputs": {"regex": "[a-z ]+"}, "min_tokens": 5, "logit_bias": {5: 2.0}},
        {"structured_outputs": COMPACT, "stop": ['":'], "include_stop_str_in_output": True},
        {"structured_outputs": {"json_object": True}, "prompt_logprobs": 1, "ignore_eos": True},
    ]
    wishes = itertools.product((0.0, 1.2), special)
    return [
        (
            QUESTIONS[index % 7],  # shared prefixes
            SamplingParams(
                **{"max_tokens": 40, "seed": index, "temperature": temperature, **options}
            ),
        )
        for index, (temperature, options) in enumerate(wishes)
    ]


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[Any]:
    """What the requests give one at a time."""
    return [generate_all(llm, [request])[0].outputs for request in make_requests()]


METHODS: dict[str, dict[str, Any]] = {
    "no drafts": {},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    "draft_model": {
        "speculative_config": {"model": demo_model.DRAFT_MODEL, "num_speculative_tokens": 4}
    },
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("method", "queue_depth"),
    [("no drafts", 0), ("no drafts", 3), ("ngram", 1), ("draft_model", 0), ("draft_model", 3)],
)
def test_outputs_do_not_depend_on_load(
    expected: list[Any],
    preempted: list[Any],
    method: str,
    queue_depth: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Arrival in random order, chunks, preemption, aborts, with and without speculation."""
    allow_all(monkeypatch)
    config = Config(
        model=demo_model.MODEL,
        max_model_len=192,
        kvcache_block_size=32,
        num_kvcache_blocks=6,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        **METHODS[method],
    )
    engine = make_engine(config, queue_depth=queue_depth)
    outputs = generate_in_random_order(engine, make_requests(), queue_depth)
    engine.shutdown()
    assert [output.outputs for output in outputs] == expected
    assert preempted
    assert method == "no drafts" or engine.scheduler.drafting.counts.num_accepted_tokens > 20


@pytest.mark.parametrize("max_num_seqs", [2, 64])
def test_outputs_do_not_depend_on_the_batch(
    make_llm: Any, expected: list[Any], max_num_seqs: int
) -> None:
    llm = make_llm(demo_model.MODEL, max_model_len=192, max_num_seqs=max_num_seqs)
    for _ in range(2 if max_num_seqs > 2 else 1):  # the second time, prompts hit the prefix cache
        assert [output.outputs for output in generate_all(llm, make_requests())] == expected
    assert_idle(llm)


@pytest.mark.long
def test_on_two_ranks(tensor_parallel_llm: Any, make_llm: Any) -> None:
    """Only the first rank has grammars; the others get the tokens that they force."""
    requests = make_requests()[::2]
    options = {"dtype": "float32", "max_model_len": 256}
    expected = generate_all(make_llm(demo_model.MODEL, **options), requests)
    llm = tensor_parallel_llm(demo_model.MODEL, 2)
    for found, alone in zip(generate_all(llm, requests), expected, strict=True):
        assert [c.token_ids for c in found.outputs] == [c.token_ids for c in alone.outputs]
    assert_idle(llm)
