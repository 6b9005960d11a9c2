"""lm_eval's tasks on the engine beside lm_eval's own `hf`, on the shipped model."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from examples.lm_eval_model import NanoVLLM
from nanovllm import demo_model
from nanovllm.errors import InvalidRequestError
from tests.glossary import QUESTIONS

CONTEXT = "A KV cache stores the keys and values of every token that was processed so far."
CHOICES = [" It grows with the text.", " No", " A block", " A block table maps blocks"]


@pytest.fixture(scope="module")
def nano() -> Iterator[NanoVLLM]:
    options = {"dtype": "float32", "max_model_len": 98, "device": "cuda:0", "batch_size": 1}
    model = get_model("nanovllm")(pretrained=demo_model.MODEL, **options)
    yield model
    model.llm.shutdown()


@pytest.fixture(scope="module")
def hf() -> Any:
    options = {"dtype": "float32", "max_length": 96, "device": "cpu", "batch_size": 2}
    return get_model("hf")(pretrained=demo_model.MODEL, **options)


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def test_scores_are_those_of_transformers(nano: NanoVLLM, hf: Any) -> None:
    """Also without a context, with one that is too long, and with one-token continuations."""
    pairs = [(context, choice) for context in (CONTEXT, CONTEXT * 12) for choice in CHOICES]
    pairs += [("", CONTEXT), ("A", " token"), (CONTEXT + " ", "It"), *pairs[:1]]
    given = requests("loglikelihood", pairs)
    before = nano.llm.engine.stats.num_cached_tokens
    found = nano.loglikelihood(given, disable_tqdm=True)
    assert nano.llm.engine.stats.num_cached_tokens > before
    for (total, greedy), expected in zip(found, hf.loglikelihood(given, True), strict=True):
        assert total == pytest.approx(expected[0], abs=1e-3)
        assert greedy == expected[1]
    texts = [(CONTEXT,), (" ".join([CONTEXT, *QUESTIONS] * 3),), ("",)]
    given = requests("loglikelihood_rolling", texts)
    expected = hf.loglikelihood_rolling(given, True)
    assert nano.loglikelihood_rolling(given, True) == pytest.approx(expected, abs=5e-3)


def test_generated_texts_are_those_of_transformers(nano: NanoVLLM, hf: Any) -> None:
    kinds = [
        {"until": ["."], "max_gen_toks": 30},
        {"until": ["\n"], "max_gen_toks": 9, "do_sample": False, "temperature": 0.7},
        {"max_gen_toks": 20, "until": [" the", "block"]},
        {"max_new_tokens": 5},
    ]
    given = requests("generate_until", [(CONTEXT, kind) for kind in kinds])
    given += requests("generate_until", [(CONTEXT * 9, kinds[1])])
    assert nano.generate_until(given, True) == hf.generate_until(given, True)
    turns = [{"role": "user", "content": QUESTIONS[0]}, {"role": "assistant", "content": "It is"}]
    for history, goes_on in ((turns[:1], True), (turns, False)):
        text = nano.apply_chat_template(history, add_generation_prompt=goes_on)
        assert text == hf.apply_chat_template(history, add_generation_prompt=goes_on)
        assert nano.tok_encode(text) == hf.tok_encode(text)


def test_what_cannot_be_is_refused(nano: NanoVLLM) -> None:
    with pytest.raises(ValueError, match="make max_model_len larger"):
        nano.loglikelihood(requests("loglikelihood", [("A", CONTEXT * 20)]), True)
    with pytest.raises(InvalidRequestError, match="num_beams"):
        nano.generate_until(requests("generate_until", [("A", {"num_beams": 2})]), True)
