"""What users read: streams join to what `generate` returns, stop strings cut exactly whatever runs
beside them, conversations, and scripts written for vLLM and nano-vllm.
"""

import dataclasses
import gc
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence as Seq
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, RequestOutput, SamplingParams, demo_model
from nanovllm.config import Config
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import EngineDeadError, InvalidRequestError
from nanovllm.scheduler.scheduler import Scheduler
from tests.checkpoints import copy_checkpoint

ROOT = Path(__file__).parent.parent
ENTRIES = demo_model.entries()
QUESTIONS = [question for question, _ in ENTRIES]
ANSWER_TO = dict(ENTRIES)
QUESTION = "What is paged attention?"
MULTI_BYTE = [question for question, answer in ENTRIES if max(answer) > "\u2fff"]
GREEDY = SamplingParams(temperature=0, max_tokens=160)
SAMPLED = SamplingParams(temperature=1.3, seed=3, max_tokens=60)
OPTIONS = {"dtype": "float32", "max_model_len": 512, "num_kvcache_blocks": 2048}
TINY_POOL = {"num_kvcache_blocks": 32, "kvcache_block_size": 8, "max_model_len": 256}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Without a prefix cache, so that the same request is the same arithmetic each time."""
    llm = LLM(demo_model.MODEL, enable_prefix_caching=False, **OPTIONS)
    yield llm
    llm.shutdown()


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        was_idle = llm.engine.is_finished()
        while not llm.engine.is_finished():  # for the tests that follow
            llm.engine.step()
        assert was_idle
        assert_idle(llm)


@pytest.fixture(autouse=True)
def nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that waits for what does not come is an error, not a hang."""
    step, idle = LLMEngine.step, 0

    def guarded(self: LLMEngine) -> list[RequestOutput]:
        nonlocal idle
        idle = 0 if self.scheduler.num_unfinished else idle + 1
        assert idle < 200, "somebody waits for a request that is gone"
        return step(self)

    monkeypatch.setattr(LLMEngine, "step", guarded)


def assert_idle(llm: Any) -> None:
    engine = llm.engine
    assert engine.is_finished()
    engine.scheduler.check()
    assert engine.scheduler.block_manager.num_free_blocks == engine.cache_info.num_blocks


def generate(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> RequestOutput:
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output


@dataclasses.dataclass
class Joined:
    """A continuation put together from a stream."""

    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[Any] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None


def join(pieces: Iterable[RequestOutput]) -> list[Joined]:
    """Put a stream's pieces together, by continuation."""
    joined: dict[int, Joined] = {}
    for piece in pieces:
        for completion in piece.outputs:
            whole = joined.setdefault(completion.index, Joined())
            assert whole.finish_reason is None, "news of a continuation that had ended"
            whole.text += completion.text
            whole.token_ids += completion.token_ids
            whole.logprobs += completion.logprobs or []
            whole.finish_reason = completion.finish_reason
            whole.stop_reason = completion.stop_reason
            whole.cumulative_logprob = completion.cumulative_logprob
    return [joined[index] for index in sorted(joined)]


def whole(output: RequestOutput) -> list[Joined]:
    return [
        Joined(c.text, c.token_ids, c.logprobs or [], *end_of(c), c.cumulative_logprob)
        for c in output.outputs
    ]


def end_of(completion: Any) -> tuple[str | None, int | str | None]:
    return completion.finish_reason, completion.stop_reason


def read_in_turns(streams: Seq[Iterator[RequestOutput]], seed: int) -> list[list[RequestOutput]]:
    """Take the streams' pieces one at a time from a random stream."""
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


def cut(text: str, stop: Seq[str], include: bool = False) -> tuple[str, str | None]:
    """Return the text up to the stop string that is complete first, and which one that is."""
    found = [
        (start + len(string), start, string) for string in stop if (start := text.find(string)) >= 0
    ]
    if not found:
        return text, None
    end, start, string = min(found)
    return text[: end if include else start], string


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
    for question in [*MULTI_BYTE, QUESTION]:
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
    """Nothing is held back but half a character, or what a stop string could still take."""
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
    questions = QUESTIONS[:60]
    streams = [llm.stream(question, params) for question in questions]
    for question, pieces in zip(questions, read_in_turns(streams, seed=len(stop)), strict=True):
        (joined,) = join(pieces)
        text, stop_string = cut(" " + ANSWER_TO[question], stop)
        assert (joined.text, joined.stop_reason) == (text, stop_string)
        assert joined.finish_reason == "stop"
    assert_idle(llm)


def test_two_streams_may_be_read_in_turns(llm: LLM) -> None:
    first, second = (llm.stream(question, GREEDY) for question in QUESTIONS[:2])
    texts = ["", ""]
    for pieces in itertools.zip_longest(first, second):
        for index, piece in enumerate(pieces):
            texts[index] += piece.text if piece else ""
    assert texts == [" " + ANSWER_TO[question] for question in QUESTIONS[:2]]


def test_stream_runs_beside_other_callers_requests(llm: LLM) -> None:
    """`generate` and requests queued by hand run beside a stream; each gets its own."""
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


@pytest.mark.parametrize("num_pieces", [0, 1, 5])
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
    """Closed right after its first piece, while the others' news of that step are not read."""
    streams: list[Any] = [llm.stream(question, GREEDY) for question in QUESTIONS[:4]]
    pieces: list[list[RequestOutput]] = [[] for _ in streams]
    next(streams[0])
    streams[0].close()
    pieces[2].append(next(streams[2]))
    streams[2].close()
    for index in (1, 3):
        assert join(streams[index])[0].text == " " + ANSWER_TO[QUESTIONS[index]]


def test_closed_stream_leaves_nothing_in_the_engine(llm: LLM) -> None:
    """Symptom: what another caller's steps put back for it is kept for ever."""
    stream: Any = llm.stream(QUESTION, GREEDY)
    next(stream)
    llm.generate(QUESTIONS[1], GREEDY, use_tqdm=False)
    stream.close()
    assert_idle(llm)


def test_pieces_share_the_prompt(llm: LLM) -> None:
    """Symptom: every piece of a stream copies a long prompt."""
    first, second, *_ = llm.stream(QUESTION, GREEDY)
    assert first.prompt_token_ids is second.prompt_token_ids
    assert first.prompt_token_ids == llm.get_tokenizer().encode(QUESTION)  # type: ignore[union-attr]


def test_error_in_a_step_ends_the_stream(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = llm.stream(QUESTION, GREEDY)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.executor, "execute", lambda schedule: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            next(stream)
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
        (["a"], GREEDY, "prompt token 0"),
        ([1] * 600, GREEDY, "600 tokens"),
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
    """Of a stream that holds back what may become a stop string, and of one that does not."""
    for stop in ((), ("never in any answer",)):
        params = dataclasses.replace(GREEDY, stop=stop)
        for num_pieces in (1, 4, 20):
            stream = llm.stream(QUESTION, params)
            pieces = [next(stream) for _ in range(num_pieces)]
            rest = llm.abort(pieces[0].request_id)
            assert rest is not None
            assert rest.finished
            (joined,) = join([*pieces, rest])
            assert joined.finish_reason == "abort"
            assert joined.text == llm.get_tokenizer().decode(joined.token_ids)
            assert len(joined.token_ids) == num_pieces
            assert llm.abort(pieces[0].request_id) is None


def test_abort_ends_the_stream(llm: LLM) -> None:
    stream, other = llm.stream(QUESTION, GREEDY), llm.stream(QUESTIONS[0], GREEDY)
    piece = next(stream)
    llm.abort(piece.request_id)
    assert list(stream) == []
    assert join(other)[0].text == " " + ANSWER_TO[QUESTIONS[0]]


def test_abort_accepts_finished_unknown_and_waiting_requests(llm: LLM) -> None:
    output = generate(llm, QUESTION)
    assert llm.abort(output.request_id) is None
    assert llm.abort(10**9) is None
    waiting = llm.engine.add_request(QUESTION, GREEDY)
    aborted = llm.abort(waiting)
    assert aborted is not None
    assert (aborted.text, aborted.token_ids, aborted.finish_reason) == ("", [], "abort")


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    "stop", ["ach", "ks th", ".", " ", ["blocks", "fixed"], ["attention keeps", "n k"], "frames."]
)
def test_stop_string_cuts_the_answer(llm: LLM, stop: Any, include: bool) -> None:
    params = dataclasses.replace(GREEDY, stop=stop, include_stop_str_in_output=include)
    (completion,) = generate(llm, QUESTION, params).outputs
    text, stop_string = cut(" " + ANSWER_TO[QUESTION], params.stop, include)
    assert stop_string
    assert completion.text == text
    assert end_of(completion) == ("stop", stop_string)
    decode = llm.get_tokenizer().decode
    assert stop_string in decode(completion.token_ids)
    assert stop_string not in decode(completion.token_ids[:-1])


def test_stop_string_that_never_comes_changes_nothing(llm: LLM) -> None:
    free = generate(llm, QUESTION)
    stopped = generate(llm, QUESTION, dataclasses.replace(GREEDY, stop=["paged?", "~"]))
    assert whole(stopped) == whole(free)
    assert end_of(stopped.outputs[0]) == ("stop", None)


def test_stop_string_counts_with_the_last_allowed_token(llm: LLM) -> None:
    for max_tokens in range(1, 12):
        params = dataclasses.replace(GREEDY, stop=["attention keep"], max_tokens=max_tokens)
        (completion,) = generate(llm, QUESTION, params).outputs
        text = llm.get_tokenizer().decode(completion.token_ids)
        if "attention keep" in text:
            assert end_of(completion) == ("stop", "attention keep")
            assert completion.text == " Paged "
        else:
            assert end_of(completion) == ("length", None)
            assert completion.text == text


@pytest.mark.parametrize("include", [False, True])
def test_stop_token_ends_the_text(llm: LLM, include: bool) -> None:
    free = generate(llm, QUESTION).token_ids
    decode = llm.get_tokenizer().decode
    for token in sorted(set(free[3:30:4])):
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


@pytest.mark.parametrize("min_tokens", [0, 1, 5, 9, 17, 30])
def test_stop_strings_count_from_min_tokens_on(llm: LLM, min_tokens: int) -> None:
    free = generate(llm, QUESTION).token_ids
    tokenizer = llm.get_tokenizer()
    params = dataclasses.replace(GREEDY, stop=["ed", " to "], min_tokens=min_tokens)
    (completion,) = generate(llm, QUESTION, params).outputs
    answer = " " + ANSWER_TO[QUESTION]
    unsearched = len(tokenizer.decode(free[: max(0, min_tokens - 1)]))
    _, start = min(
        (start + len(stop), start)
        for stop in params.stop
        for start in range(len(answer))
        if answer.startswith(stop, start) and start + len(stop) > unsearched
    )
    assert completion.text == answer[:start]
    assert completion.finish_reason == "stop"
    assert len(completion.token_ids) >= min_tokens


def test_min_tokens_puts_off_the_end_of_sequence(llm: LLM) -> None:
    free = generate(llm, QUESTION).token_ids
    assert len(free) < 60
    params = dataclasses.replace(GREEDY, min_tokens=60)
    later = generate(llm, QUESTION, params).token_ids
    assert len(later) >= 60
    assert later[: len(free) - 1] == free[:-1]
    assert llm.get_tokenizer().eos_token_id not in later[:60]


def test_cut_character_ends_as_one_replacement(llm: LLM) -> None:
    """The broken character comes once, at the end, as U+FFFD."""
    decode = llm.get_tokenizer().decode
    num_broken = 0
    for question in MULTI_BYTE:
        free = generate(llm, question).token_ids
        first = next(i for i in range(len(free)) if decode(free[:i]).endswith("\ufffd"))
        for max_tokens in range(first - 1, first + 8):
            params = dataclasses.replace(GREEDY, max_tokens=max_tokens)
            (output,) = generate(llm, question, params).outputs
            assert end_of(output) == ("length", None)
            assert output.text == decode(free[:max_tokens])
            pieces = list(llm.stream(question, params))
            assert "".join(piece.text for piece in pieces) == output.text
            assert not any("\ufffd" in piece.text for piece in pieces[:-1])
            num_broken += output.text.endswith("\ufffd")
    assert num_broken >= 7


def stops_of(index: int) -> list[str]:
    """A few stop strings: across words, inside words, one that never comes."""
    return [["ache", "never"], ["s to", "es th"], ["tion", " in "], [". "], ["zzz"]][index % 5]


def with_stops(include: bool = False) -> tuple[list[SamplingParams], list[tuple[str, str | None]]]:
    """Return parameters for the first questions, and (text, stop string) of their answers."""
    params, expected = [], []
    for index, question in enumerate(QUESTIONS[:40]):
        stop = stops_of(index)
        params.append(dataclasses.replace(GREEDY, stop=stop, include_stop_str_in_output=include))
        expected.append(cut(" " + ANSWER_TO[question], stop, include))
    return params, expected


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 64},
        {"max_num_batched_tokens": 7, "max_num_seqs": 5},
        {"kvcache_block_size": 3},
        TINY_POOL,
        {"tensor_parallel_size": 2},
    ],
)
def test_stop_strings_do_not_depend_on_the_batch(
    make_llm: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted = []
    preempt = Scheduler._preempt
    monkeypatch.setattr(
        Scheduler, "_preempt", lambda self, seq: (preempted.append(seq.seq_id), preempt(self, seq))
    )
    llm = make_llm(demo_model.MODEL, **{**OPTIONS, **options})
    params, expected = with_stops()
    outputs = llm.generate(QUESTIONS[:40], params, use_tqdm=False)
    assert [(o.text, o.outputs[0].stop_reason) for o in outputs] == expected
    assert {o.finish_reason for o in outputs} == {"stop"}
    assert bool(preempted) == (options is TINY_POOL)
    assert_idle(llm)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("queue_depth", [0, 1, 3])
def test_stop_strings_do_not_depend_on_steps_in_flight(queue_depth: int, include: bool) -> None:
    """With a queue, steps after the stop string have been launched when it is found."""
    engine = LLMEngine(Config(model=demo_model.MODEL, **OPTIONS), queue_depth=queue_depth)
    params, expected = with_stops(include)
    ids = [
        engine.add_request(question, param, stream=index % 2 == 1)
        for index, (question, param) in enumerate(zip(QUESTIONS[:40], params, strict=True))
    ]
    pieces: dict[int, list[RequestOutput]] = {request: [] for request in ids}
    while not engine.is_finished():
        for output in engine.step():
            pieces[output.request_id].append(output)
        engine.scheduler.check()
    joined = [join(pieces[request])[0] for request in ids]
    assert [(one.text, one.stop_reason) for one in joined] == expected
    free_blocks = engine.scheduler.block_manager.num_free_blocks
    assert free_blocks == engine.cache_info.num_blocks
    engine.shutdown()


def test_each_of_several_continuations_has_its_own_stop(llm: LLM) -> None:
    params = dataclasses.replace(SAMPLED, n=3, stop=["token", "end", "n the"])
    free = generate(llm, "What is the KV cache?", dataclasses.replace(params, stop=()))
    assert len({c.text for c in free.outputs}) > 1
    stopped = generate(llm, "What is the KV cache?", params)
    assert [c.index for c in stopped.outputs] == [0, 1, 2]
    found = [(c.text, c.stop_reason) for c in stopped.outputs]
    assert found == [cut(c.text, params.stop) for c in free.outputs]
    assert len({stop for _, stop in found}) > 1
    for index, completion in enumerate(stopped.outputs):
        length = len(completion.token_ids)
        assert completion.token_ids == free.outputs[index].token_ids[:length]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_chat_answers_one_conversation_or_many(llm: LLM) -> None:
    (one,) = llm.chat([user(QUESTION)], GREEDY, use_tqdm=False)
    assert one.text == ANSWER_TO[QUESTION]
    many = llm.chat([[user(question)] for question in QUESTIONS], GREEDY, use_tqdm=False)
    assert [output.text for output in many] == [ANSWER_TO[question] for question in QUESTIONS]


def test_chat_renders_system_message_and_earlier_turns(llm: LLM) -> None:
    conversation = [
        {"role": "system", "content": "Be brief."},
        user("Hello!"),
        {"role": "assistant", "content": ANSWER_TO["Hello!"]},
        user(QUESTION),
    ]
    (output,) = llm.chat(tuple(conversation), GREEDY, use_tqdm=False)
    assert output.text == ANSWER_TO[QUESTION]
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in conversation)
    decode = llm.get_tokenizer().decode
    assert decode(output.prompt_token_ids) == turns + "<|im_start|>assistant\n"
    open_ended = llm.render(conversation, add_generation_prompt=False)
    assert decode(open_ended) == turns


def test_chat_passes_options_to_the_template(llm: LLM) -> None:
    options = {"enable_thinking": False}
    questions = QUESTIONS[:20]
    outputs = llm.chat(
        [[user(question)] for question in questions],
        GREEDY,
        use_tqdm=False,
        chat_template_kwargs=options,
    )
    decode = llm.get_tokenizer().decode
    for question, output in zip(questions, outputs, strict=True):
        assert decode(output.prompt_token_ids).endswith("assistant\n<think>\n\n</think>\n\n")
        assert output.text == ANSWER_TO[question]
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (output,) = llm.chat([user(QUESTION)], GREEDY, use_tqdm=False, chat_template=template)
    assert output.text == " " + ANSWER_TO[QUESTION]


@pytest.mark.parametrize(
    "messages",
    [
        None,
        7,
        "Hello!",
        [[]],
        [None],
        [5],
        ["Hello!"],
        [[5]],
        [user("Hello!"), 5],
        [[user("Hello!")], user("Hello!")],
        [{"role": "user"}],
        [{"content": "Hello!"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [user("Hello! " * 500)],
    ],
    ids=lambda messages: repr(messages)[:40],
)
def test_bad_messages_are_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequestError):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_template_that_does_not_parse_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="chat template"):
        llm.chat([user("Hello!")], GREEDY, use_tqdm=False, chat_template="{% for %}")


def test_chat_needs_a_tokenizer(make_llm: Any, random_model: str) -> None:
    llm = make_llm(random_model)
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        llm.chat([user("Hello!")], use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="no tokenizer.*stop_token_ids"):
        llm.stream([1, 2, 3], SamplingParams(stop=["x"]))
    pieces = list(llm.stream([1, 2, 3], SamplingParams(temperature=0, max_tokens=5)))
    assert {piece.text for piece in pieces} == {""}
    assert (
        join(pieces)[0].token_ids
        == generate(llm, [1, 2, 3], SamplingParams(temperature=0, max_tokens=5)).token_ids
    )


def test_default_sampling_params_come_from_generation_config(
    llm: LLM, make_llm: Any, tmp_path: Path
) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0)
    given = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1}
    more = {"repetition_penalty": 1.1, "max_new_tokens": 99, "eos_token_id": [1021, 1019]}
    recommended = {**given, **more, "transformers_version": "5.0"}
    model = copy_checkpoint(demo_model.MODEL, tmp_path, generation_config=recommended)
    assert make_llm(model, **OPTIONS).get_default_sampling_params() == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.1, max_tokens=99
    )
    (tmp_path / "generation_config.json").unlink()
    assert make_llm(model, **OPTIONS).get_default_sampling_params() == SamplingParams()


VLLM_EXAMPLE = """
from nanovllm import LLM, SamplingParams

# Sample prompts.
prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
# Create a sampling params object.
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)


def main():
    # Create an LLM.
    llm = LLM(model=MODEL)
    # Generate texts from the prompts.
    # The output is a list of RequestOutput objects
    # that contain the prompt, generated text, and other information.
    outputs = llm.generate(prompts, sampling_params)
    # Print the outputs.
    print("\\nGenerated Outputs:\\n" + "-" * 60)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt:    {prompt!r}")
        print(f"Output:    {generated_text!r}")
        print("-" * 60)


if __name__ == "__main__":
    main()
"""

NANO_VLLM_EXAMPLE = """
import os
from nanovllm import LLM, SamplingParams
from transformers import AutoTokenizer


def main():
    path = os.path.expanduser(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(path)
    llm = LLM(path, enforce_eager=True, tensor_parallel_size=1)

    sampling_params = SamplingParams(temperature=0.6, max_tokens=256)
    prompts = [
        "introduce yourself",
        "list all prime numbers within 100",
    ]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for prompt in prompts
    ]
    outputs = llm.generate(prompts, sampling_params)

    for prompt, output in zip(prompts, outputs):
        print("\\n")
        print(f"Prompt: {prompt!r}")
        print(f"Completion: {output['text']!r}")


if __name__ == "__main__":
    main()
"""


def run_script(path: Path, text: str) -> str:
    path.write_text(text.replace("MODEL", repr(demo_model.MODEL)))
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_script_written_for_vllm_runs(make_llm: Any, tmp_path: Path) -> None:
    """The seed of an engine is fixed, so another engine generates the same."""
    prompts = ["Hello, my name is", "The president of the United States is"]
    prompts += ["The capital of France is", "The future of AI is"]
    params = SamplingParams(temperature=0.8, top_p=0.95)
    outputs = make_llm(demo_model.MODEL).generate(prompts, params, use_tqdm=False)
    assert all(output.text for output in outputs)
    rule = "-" * 60 + "\n"
    expected = "\nGenerated Outputs:\n" + rule
    for prompt, output in zip(prompts, outputs, strict=True):
        expected += f"Prompt:    {prompt!r}\nOutput:    {output.text!r}\n" + rule
    assert run_script(tmp_path / "basic.py", VLLM_EXAMPLE) == expected


def test_script_written_for_nano_vllm_runs(make_llm: Any, tmp_path: Path) -> None:
    questions = ["introduce yourself", "list all prime numbers within 100"]
    params = SamplingParams(temperature=0.6, max_tokens=256)
    prompts = [f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in questions]
    outputs = make_llm(demo_model.MODEL).generate(prompts, params, use_tqdm=False)
    assert all(output.text for output in outputs)
    expected = "".join(
        f"\n\nPrompt: {prompt!r}\nCompletion: {output.text!r}\n"
        for prompt, output in zip(prompts, outputs, strict=True)
    )
    assert run_script(tmp_path / "example.py", NANO_VLLM_EXAMPLE) == expected
