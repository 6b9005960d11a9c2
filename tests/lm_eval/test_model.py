"""The model "nanovllm" of lm_eval beside lm_eval's own `hf`, on the shipped model.

Runs where lm_eval is installed.
"""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from nanovllm import demo_model
from nanovllm.apps.lm_eval.model import NanoVLLM
from nanovllm.errors import ConfigError, InvalidRequestError
from tests.glossary import QUESTIONS

CONTEXT = "A KV cache stores the keys and values of every token that was processed so far."
CHOICES = [" It grows with the text.", " No", " A block", " A block table maps blocks", ""]


@pytest.fixture(scope="module")
def nano() -> Iterator[NanoVLLM]:
    model = get_model("nanovllm")(
        pretrained=demo_model.MODEL,
        dtype="float32",
        max_length=96,
        max_num_batched_tokens=64,  # so that contexts are cached when their other texts come
        device="cuda:0",
        batch_size=1,
    )
    assert isinstance(model, NanoVLLM)
    yield model
    model.llm.shutdown()


@pytest.fixture(scope="module")
def hf() -> Any:
    return get_model("hf")(
        pretrained=demo_model.MODEL, dtype="float32", max_length=96, device="cpu", batch_size=2
    )


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def test_scores_are_those_of_transformers(nano: NanoVLLM, hf: Any) -> None:
    """Also without a context, with one that is too long, and with one-token continuations."""
    pairs = [(context, choice) for context in (CONTEXT, CONTEXT * 12) for choice in CHOICES[:4]]
    pairs += [("", CONTEXT), ("A", " token"), (CONTEXT + " ", "It"), *pairs[:1]]
    given = requests("loglikelihood", pairs)
    before = nano.llm.engine.stats.num_cached_tokens
    found = nano.loglikelihood(given, disable_tqdm=True)
    assert nano.llm.engine.stats.num_cached_tokens > before
    for (total, greedy), expected in zip(found, hf.loglikelihood(given, True), strict=True):
        assert total == pytest.approx(expected[0], abs=1e-3)
        assert greedy == expected[1]


def test_rolling_scores_are_those_of_transformers(nano: NanoVLLM, hf: Any) -> None:
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


def generated(model: NanoVLLM, context: str, **kwargs: Any) -> str:
    (answer,) = model.generate_until(requests("generate_until", [(context, kwargs)]), True)
    return answer


def test_sampling_and_thinking(nano: NanoVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = {"do_sample": True, "temperature": 1.5, "top_p": 0.95, "max_gen_toks": 12}
    given = requests("generate_until", [(CONTEXT, sampled)] * 3)
    assert len(set(nano.generate_until(given, True))) > 1
    with pytest.raises(InvalidRequestError, match="num_beams"):
        generated(nano, CONTEXT, num_beams=2, max_gen_toks=9)
    whole = generated(nano, CONTEXT, max_gen_toks=30)
    assert generated(nano, CONTEXT, until=[""], max_gen_toks=30) == whole  # it ends nothing
    stop, mark = whole.split()[1:4:2]
    monkeypatch.setattr(nano, "_think_end_token", mark)
    answer = generated(nano, CONTEXT, until=[stop], max_gen_toks=30)
    assert answer == whole.split(mark)[-1].lstrip().split(stop)[0]


def test_chat_templates_are_those_of_transformers(nano: NanoVLLM, hf: Any) -> None:
    turns = [{"role": "user", "content": QUESTIONS[0]}, {"role": "assistant", "content": "It is"}]
    for history, goes_on in ((turns[:1], True), (turns, False)):
        text = nano.apply_chat_template(history, add_generation_prompt=goes_on)
        assert text == hf.apply_chat_template(history, add_generation_prompt=goes_on)
        assert nano.tok_encode(text) == hf.tok_encode(text)
    assert nano.chat_template(True) == hf.chat_template(True)
    assert "/" not in nano.tokenizer_name


def test_what_cannot_be_is_refused(nano: NanoVLLM) -> None:
    with pytest.raises(ConfigError, match="max_length and max_model_len"):
        NanoVLLM(demo_model.MODEL, max_length=10, max_model_len=12)
    with pytest.raises(ConfigError, match="quantisation.*quantization"):
        NanoVLLM(demo_model.MODEL, quantisation="int8")
    with pytest.raises(ValueError, match=r"may have 96, after 1 .* make max_length larger"):
        nano.loglikelihood(requests("loglikelihood", [("A", CONTEXT * 20)]), True)
    with pytest.raises(ValueError, match="max_gen_toks 96 must be above 0 and below max_length"):
        generated(nano, "A", max_gen_toks=96)
    assert nano.loglikelihood([], True) == []
    assert nano.generate_until([], True) == []
