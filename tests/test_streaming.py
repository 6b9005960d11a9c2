"""Streams: their pieces join to what `generate` returns, whatever the order of reading.

An unfinished stream leaves nothing in the engine.
"""

import dataclasses
import gc
import random
from collections.abc import Iterator, Sequence as Seq
from typing import Any

import pytest

from nanovllm import LLM, RequestOutput, SamplingParams, demo_model
from nanovllm.errors import EngineDeadError, InvalidRequestError
from tests.glossary import (
    ANSWER_TO,
    GREEDY,
    MULTI_BYTE,
    OPTIONS,
    QUESTION,
    QUESTIONS,
    SAMPLED,
    TINY_POOL,
)
from tests.helpers import assert_idle, cut, generate, join, whole

pytestmark = pytest.mark.usefixtures("idle_afterwards", "no_endless_wait")

ENDLESS = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@pytest.fixture
def llm(demo_llm: LLM) -> LLM:
    return demo_llm


def read_in_turns(streams: Seq[Iterator[RequestOutput]], seed: int) -> list[list[RequestOutput]]:
    """Read all streams to the end, each piece from a randomly chosen stream."""
    rng = random.Random(seed)
    pieces: list[list[RequestOutput]] = [[] for _ in streams]
    left = list(range(len(streams)))
    while left:
        index = rng.choice(left)
        try:
            pieces[index].append(next(streams[index]))
        except StopIteration:
            left.remove(index)
    return pieces


STREAMS = {
    "greedy": {},
    "sampled": {"temperature": 1.3, "seed": 5, "top_p": 0.9},
    "stop-within-a-token": {"stop": ["ach"]},
    "stop-across-tokens": {"stop": ["ache is", "ks th", "KV cache,"]},
    "stop-of-one-character": {"stop": "."},
    "stop-that-never-comes": {"stop": ["never in any answer", "z" * 30]},
    "stops-that-overlap": {"stop": ["the", "th", "e", " the "]},
    "stop-included": {"stop": ["block", "token"], "include_stop_str_in_output": True},
    "stop-multi-byte": {"stop": ["你好 may", "👋 I"]},
    "stop-at-half-a-character": {"stop": ["\ufffd"], "max_tokens": 8},
    "several": {"n": 2, "temperature": 1.3, "seed": 3},
    "several-with-stop": {"n": 3, "temperature": 1.3, "seed": 3, "stop": ["token", "blocks"]},
    "special-tokens": {"skip_special_tokens": False, "ignore_eos": True, "max_tokens": 70},
    "special-tokens-skipped": {"ignore_eos": True, "max_tokens": 70},
    "stop-token-included": {"include_stop_str_in_output": True, "skip_special_tokens": False},
    "no-text": {"detokenize": False},
    "min-tokens-with-stop": {"min_tokens": 12, "stop": ["e", "a"]},
    "min-tokens-beyond-the-answer": {"min_tokens": 60, "max_tokens": 80},
    "cut-at-8": {"max_tokens": 8},
    "cut-at-32": {"max_tokens": 32, "stop": ["never"]},
    "one-token": {"max_tokens": 1},
    "logprobs-of-the-token": {"logprobs": 0},
    "logprobs-with-stop": {"logprobs": 3, "stop": ["cache", "token"]},
    "logprobs-of-several": {"logprobs": 2, "n": 2, "temperature": 1.3, "seed": 3},
    "prompt-logprobs": {"logprobs": 1, "prompt_logprobs": 2, "n": 2},
}


@pytest.mark.parametrize("case", STREAMS)
def test_stream_joins_to_what_generate_returns(llm: LLM, case: str) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 160, **STREAMS[case]}
    params = SamplingParams(**options)
    for question in (MULTI_BYTE[0], QUESTION):
        expected = generate(llm, question, params)
        pieces = list(llm.stream(question, params))
        assert join(pieces) == whole(expected)
        assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert len(pieces) >= min(len(c.token_ids) for c in expected.outputs)
        assert {piece.prompt for piece in pieces} == {question}
        assert all(piece.prompt_token_ids == expected.prompt_token_ids for piece in pieces)
        assert len({piece.request_id for piece in pieces}) == 1
        assert pieces[0].prompt_logprobs == expected.prompt_logprobs
        assert all(piece.prompt_logprobs is None for piece in pieces[1:])
        assert pieces[-1].metrics.num_output_tokens == expected.metrics.num_output_tokens


def test_text_comes_as_it_is_generated(llm: LLM) -> None:
    """The only text held back is an incomplete character or a possible start of a stop string."""
    longest = len("never in any answer")
    for stop, num_held_back in (([], 0), (["never in any answer", "zz"], longest - 1)):
        text, expected = "", " " + ANSWER_TO[QUESTION]
        tokens: list[int] = []
        for piece in llm.stream(QUESTION, dataclasses.replace(GREEDY, stop=stop)):
            text += piece.text
            tokens += piece.token_ids
            generated = llm.get_tokenizer().decode(tokens, skip_special_tokens=True)
            assert len(text) >= len(generated) - num_held_back
        assert text == expected


@pytest.mark.parametrize("options", [{}, TINY_POOL, {"max_num_batched_tokens": 16}])
@pytest.mark.parametrize("stop", [(), ("token", "block", "request", ". ")])
def test_streams_may_be_read_in_any_order(
    make_llm: Any, options: dict[str, Any], stop: tuple[str, ...]
) -> None:
    llm = make_llm(demo_model.MODEL, **{**OPTIONS, **options})
    params = dataclasses.replace(GREEDY, stop=stop)
    questions = QUESTIONS[:12]
    streams = [llm.stream(question, params) for question in questions]
    for question, pieces in zip(questions, read_in_turns(streams, seed=len(stop)), strict=True):
        (joined,) = join(pieces)
        text, stop_string = cut(" " + ANSWER_TO[question], stop)
        assert (joined.text, joined.stop_reason) == (text, stop_string)
        assert joined.finish_reason == "stop"
    assert_idle(llm)


def test_stream_runs_beside_other_callers_requests(llm: LLM) -> None:
    """A stream runs beside `generate` and beside requests added to the engine directly."""
    by_hand = [llm.engine.add_request(question, GREEDY) for question in QUESTIONS[:3]]
    stream = llm.stream(QUESTION, GREEDY)
    pieces = [next(stream) for _ in range(3)]
    others = llm.generate(QUESTIONS[10:20], GREEDY, use_tqdm=False)
    assert [o.text for o in others] == [" " + ANSWER_TO[q] for q in QUESTIONS[10:20]]
    pieces += stream
    assert join(pieces)[0].text == " " + ANSWER_TO[QUESTION]
    found = {}
    while not llm.engine.is_finished():
        found.update({output.request_id: output.text for output in llm.engine.step()})
    assert found == dict(
        zip(by_hand, [" " + ANSWER_TO[question] for question in QUESTIONS[:3]], strict=True)
    )


@pytest.mark.parametrize("num_pieces", [0, 5])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("ends_by", ["close", "del", "exception"])
def test_unfinished_stream_is_aborted(llm: LLM, num_pieces: int, n: int, ends_by: str) -> None:
    params = dataclasses.replace(SAMPLED, n=n)
    stream: Any = llm.stream(QUESTION, params)
    for _ in range(num_pieces):
        next(stream)
    assert not llm.engine.is_finished()
    if ends_by == "close":
        stream.close()
    elif ends_by == "exception":
        with pytest.raises(ZeroDivisionError):
            stream.throw(ZeroDivisionError)
    del stream
    gc.collect()
    assert_idle(llm)


def test_closing_a_stream_keeps_the_others_whole(llm: LLM) -> None:
    """A stream is closed while pieces of other streams, from the same step, are still unread.

    Symptom: pieces that another caller's steps produced for the stream are never dropped.
    """
    streams: list[Any] = [llm.stream(question, GREEDY) for question in QUESTIONS[:4]]
    pieces: list[list[RequestOutput]] = [[] for _ in streams]
    next(streams[0])
    streams[0].close()
    pieces[2].append(next(streams[2]))
    streams[2].close()
    for index in (1, 3):
        assert join(streams[index])[0].text == " " + ANSWER_TO[QUESTIONS[index]]


def test_pieces_share_the_prompt(llm: LLM) -> None:
    """Symptom: every piece of a stream copies a long prompt."""
    first, second, *_ = llm.stream(QUESTION, GREEDY)
    assert first.prompt_token_ids is second.prompt_token_ids
    assert first.prompt_token_ids == llm.get_tokenizer().encode(QUESTION)  # type: ignore[union-attr]


def test_error_in_a_step_ends_the_stream(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = llm.stream(QUESTION, ENDLESS)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.executor, "execute", lambda schedule: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            list(stream)
    assert_idle(llm)
    assert join(llm.stream(QUESTION, GREEDY))[0].text == " " + ANSWER_TO[QUESTION]


def test_shutdown_ends_a_stream(make_llm: Any) -> None:
    llm = make_llm(demo_model.MODEL, **OPTIONS)
    stream = llm.stream(QUESTION, GREEDY)
    next(stream)
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        list(stream)
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.stream(QUESTION, GREEDY)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", GREEDY, "the prompt is empty"),
        ("x", SamplingParams(stop_token_ids=[5000]), "stop_token_ids holds token 5000"),
        ("x", {"temperature": 0}, "sampling_params must be SamplingParams"),
    ],
)
def test_bad_input_is_refused_before_the_first_piece(
    llm: LLM, prompt: Any, params: Any, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.stream(prompt, params)


def test_abort_returns_the_unsent_rest(llm: LLM) -> None:
    """With a stop string, the stream holds text back; without one, it does not."""
    for stop in ((), ("never in any answer",)):
        params = dataclasses.replace(ENDLESS, stop=stop)
        for num_pieces in (1, 4, 20):
            stream = llm.stream(QUESTION, params)
            pieces = [next(stream) for _ in range(num_pieces)]
            rest = llm.abort(pieces[0].request_id)
            assert rest is not None
            assert rest.finished
            pieces += stream  # what had been sent, and was not read
            (joined,) = join([*pieces, rest])
            assert joined.finish_reason == "abort"
            assert joined.text == llm.get_tokenizer().decode(
                joined.token_ids, skip_special_tokens=True
            )
            assert len(joined.token_ids) >= num_pieces
            assert llm.abort(pieces[0].request_id) is None


def test_abort_ends_the_stream(llm: LLM) -> None:
    stream, other = llm.stream(QUESTION, ENDLESS), llm.stream(QUESTIONS[0], GREEDY)
    piece = next(stream)
    llm.abort(piece.request_id)
    assert not any(unread.finished for unread in stream)
    assert join(other)[0].text == " " + ANSWER_TO[QUESTIONS[0]]


def test_abort_accepts_finished_unknown_and_waiting_requests(llm: LLM) -> None:
    output = generate(llm, QUESTION)
    assert llm.abort(output.request_id) is None
    assert llm.abort(10**9) is None
    waiting = llm.engine.add_request(QUESTION, GREEDY)
    aborted = llm.abort(waiting)
    assert aborted is not None
    assert (aborted.text, aborted.token_ids, aborted.finish_reason) == ("", [], "abort")
