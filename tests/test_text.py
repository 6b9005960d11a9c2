"""The text of an output: stop tokens, special tokens, cut characters and bad words."""

import dataclasses
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.errors import InvalidRequestError
from tests.glossary import ANSWER_TO, GREEDY, MULTI_BYTE, QUESTION
from tests.helpers import Joined, end_of, generate, join

pytestmark = pytest.mark.usefixtures("idle_afterwards", "no_endless_wait")


@pytest.fixture
def llm(demo_llm: LLM) -> LLM:
    return demo_llm


@pytest.mark.parametrize("include", [False, True])
def test_stop_token_ends_the_text(llm: LLM, include: bool) -> None:
    free = generate(llm, QUESTION).token_ids
    decode = llm.get_tokenizer().decode
    for token in sorted(set(free[3:30:9])):
        params = dataclasses.replace(
            GREEDY, stop_token_ids=[token, 1000], include_stop_str_in_output=include
        )
        (completion,) = generate(llm, QUESTION, params).outputs
        assert completion.token_ids == free[: free.index(token) + 1]
        assert end_of(completion) == ("stop", token)
        assert completion.text == decode(completion.token_ids[: None if include else -1])
        assert join(llm.stream(QUESTION, params)) == [
            Joined(completion.text, completion.token_ids, [], "stop", token)
        ]


@pytest.mark.parametrize(
    ("skip_special_tokens", "include", "end"),
    [(True, False, ""), (False, False, ""), (True, True, ""), (False, True, "<|im_end|>")],
)
def test_end_of_sequence_is_text_only_if_asked_for(
    llm: LLM, skip_special_tokens: bool, include: bool, end: str
) -> None:
    params = dataclasses.replace(
        GREEDY, skip_special_tokens=skip_special_tokens, include_stop_str_in_output=include
    )
    question = [{"role": "user", "content": QUESTION}]
    (output,) = llm.chat(question, params, use_tqdm=False)
    assert output.text == ANSWER_TO[QUESTION] + end
    assert end_of(output.outputs[0]) == ("stop", None)
    assert output.token_ids[-1] == llm.get_tokenizer().eos_token_id


def test_special_tokens_are_skipped_in_the_text(llm: LLM) -> None:
    params = dataclasses.replace(GREEDY, ignore_eos=True, max_tokens=90)
    plain = generate(llm, QUESTION, params)
    full = generate(llm, QUESTION, dataclasses.replace(params, skip_special_tokens=False))
    assert plain.token_ids == full.token_ids
    tokenizer = llm.get_tokenizer()
    assert plain.text == tokenizer.decode(plain.token_ids, skip_special_tokens=True)
    assert full.text == tokenizer.decode(full.token_ids)
    special = tokenizer.all_special_tokens
    assert any(token in full.text for token in special)
    assert not any(token in plain.text for token in special)
    (generated,) = {*full.token_ids} & {*tokenizer.all_special_ids}
    for kept, text in ([generated], full.text), ([generated + 1, 2**20], plain.text):
        params = dataclasses.replace(params, kept_token_ids=kept)
        assert generate(llm, QUESTION, params).text == text


def test_min_tokens_puts_off_the_end_of_sequence(llm: LLM) -> None:
    free = generate(llm, QUESTION).token_ids
    assert len(free) < 60
    params = dataclasses.replace(GREEDY, min_tokens=60)
    later = generate(llm, QUESTION, params).token_ids
    assert len(later) >= 60
    assert later[: len(free) - 1] == free[:-1]
    assert llm.get_tokenizer().eos_token_id not in later[:60]


def test_cut_character_ends_as_one_replacement(llm: LLM) -> None:
    """A character cut by max_tokens becomes one U+FFFD, in the last piece only."""
    decode = llm.get_tokenizer().decode
    num_broken = 0
    for question in MULTI_BYTE:
        free = generate(llm, question).token_ids
        first = next(i for i in range(len(free)) if decode(free[:i]).endswith("\ufffd"))
        for max_tokens in range(first - 1, first + 5):
            params = dataclasses.replace(GREEDY, max_tokens=max_tokens)
            (output,) = generate(llm, question, params).outputs
            assert end_of(output) == ("length", None)
            assert output.text == decode(free[:max_tokens])
            pieces = list(llm.stream(question, params))
            assert "".join(piece.text for piece in pieces) == output.text
            assert not any("\ufffd" in piece.text for piece in pieces[:-1])
            num_broken += output.text.endswith("\ufffd")
    assert num_broken >= 4


@pytest.mark.parametrize("fewer", [0, 1])
def test_bad_words_are_left_out(make_llm: Any, fewer: int) -> None:
    """Symptom: " prefix", one token, is not forbidden with "prefix", which has four.

    Args:
        fewer: how many tokens fewer the word has with a space before it.
    """
    llm = make_llm(demo_model.MODEL)
    encode = llm.get_tokenizer().encode
    question, answer = next(
        (question, answer)
        for question, answer in demo_model.entries()
        if len(encode(f" {answer.split()[1]}")) + fewer == len(encode(answer.split()[1])) > 1
    )
    word = answer.split()[1]
    texts = []
    for bad_words in ([], [word]):
        params = SamplingParams(temperature=0, max_tokens=60, bad_words=bad_words)
        texts.append(llm.generate(question, params, use_tqdm=False)[0].text)
    assert f" {word}" in texts[0]
    assert f" {word}" not in texts[1]


def test_seeds_have_a_sign(make_llm: Any) -> None:
    """Symptom: a negative seed, which OpenAI's API has, is refused."""
    llm = make_llm(demo_model.MODEL)
    request = llm.engine.input_processor.make_request
    for seed, seeds in ((-2, [-2, -1, 0]), (2**63 - 1, [2**63 - 1, -(2**63), 1 - 2**63])):
        made = request([1], SamplingParams(seed=seed, n=3)).sequences
        assert [sequence.seed for sequence in made] == seeds
    drawn = SamplingParams(temperature=99.0, max_tokens=20, ignore_eos=True)
    texts = [
        llm.generate("A", drawn.clone(seed=seed), use_tqdm=False)[0].text
        for seed in (-(2**53) + 1, -(2**53) + 1, 2**53 - 1, -(2**63), 0)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 4


def test_bad_words_may_be_white_space(make_llm: Any) -> None:
    """Symptom: a bad word of white space is ignored without an error."""
    llm = make_llm(demo_model.MODEL)
    question = demo_model.entries()[0][0]
    decode = llm.get_tokenizer().decode
    for word in (" ", "\n"):
        params = SamplingParams(bad_words=[word])
        request = llm.engine.input_processor.make_request(question, params)
        tokens, *_ = request.sequences[0].bad_words
        assert decode(tokens) == word
    (forbidden,) = llm.get_tokenizer().encode("\n")
    only = SamplingParams(allowed_token_ids=[forbidden, forbidden + 1], max_tokens=9, seed=1)
    barred = dataclasses.replace(only, bad_words=["\n"])
    free, without = (llm.generate(question, p, use_tqdm=False)[0].token_ids for p in (only, barred))
    assert forbidden in free
    assert forbidden not in without
    with pytest.raises(InvalidRequestError, match="bad_words is not valid Unicode"):
        llm.engine.input_processor.make_request(question, SamplingParams(bad_words=["\ud800"]))
