"""Many asyncio tasks share one engine: each gets its own text, and none waits forever.

A failure reaches only the requests concerned, and a cancelled request leaves nothing behind.
"""

import asyncio
import contextlib
import gc
import inspect
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from nanovllm import LLM, AsyncLLM, SamplingParams, demo_model
from nanovllm.errors import EngineDeadError, InvalidRequestError
from nanovllm.options.sampling_params import RequestOutputKind
from nanovllm.outputs import RequestOutput
from nanovllm.testing.invariants import check_scheduler
from tests.forked_ranks import forked_ranks
from tests.glossary import ANSWER_TO, GREEDY, QUESTIONS
from tests.helpers import in_threads

ENDLESS = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 4096,
    "num_kvcache_blocks": 2048,
    "max_num_seqs": 64,
}


@pytest.fixture(scope="module")
def shared() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(demo_model.MODEL, **OPTIONS)
    yield llm
    llm.shutdown()


@pytest.fixture
def llm(shared: AsyncLLM) -> Iterator[AsyncLLM]:
    """The shared engine; check that it is idle before the test and after it."""
    wait_until_idle(shared)
    yield shared
    wait_until_idle(shared)


@pytest.fixture
def own_llm() -> Iterator[AsyncLLM]:
    """An engine of the test's own, which it may shut down."""
    llm = AsyncLLM(demo_model.MODEL, **OPTIONS)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def sync_llm() -> Iterator[LLM]:
    llm = LLM(demo_model.MODEL, **OPTIONS)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def alone(sync_llm: LLM) -> Callable[[str, int], str]:
    """Return the text of the first tokens of an answer, generated without asyncio."""
    outputs = sync_llm.generate(QUESTIONS, GREEDY, use_tqdm=False)
    tokenizer = sync_llm.get_tokenizer()
    assert tokenizer is not None
    token_ids = {output.prompt: output.token_ids for output in outputs}

    def text(question: str, max_tokens: int) -> str:
        found: str = tokenizer.decode(token_ids[question][:max_tokens], skip_special_tokens=True)
        return found

    return text


def run(coroutine: Coroutine[Any, Any, Any], seconds: float = 60) -> Any:
    """Run a coroutine to its end; fail if that takes longer than `seconds`."""
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


def on_engine_thread(llm: AsyncLLM, call: Callable[[], Any]) -> Any:
    """Call `call` on the engine's thread, between two steps, and return its result."""
    answer: Future[Any] = Future()

    def command() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    llm._thread.inbox.put(command)
    return answer.result(timeout=20)


def wait_until_idle(llm: AsyncLLM) -> None:
    deadline = time.monotonic() + 5
    while not on_engine_thread(llm, llm.engine.is_finished):
        assert time.monotonic() < deadline, "requests without a reader are still running"
        time.sleep(0.02)
    on_engine_thread(llm, lambda: check_scheduler(llm.engine.scheduler))
    free_blocks = llm.engine.scheduler.block_manager.num_free_blocks
    assert free_blocks == llm.engine.worker_info.num_blocks
    assert not llm._thread.readers


async def read(llm: AsyncLLM, prompt: Any, params: SamplingParams = GREEDY) -> str:
    text, finished = "", False
    async for piece in llm.stream(prompt, params):
        assert not finished
        text += piece.outputs[0].text
        finished = piece.finished
    assert finished
    return text


async def read_some(llm: AsyncLLM, question: str, num_pieces: int) -> str:
    """Read a few pieces, close the iterator, and return the text read."""
    stream = llm.stream(question, GREEDY)
    async with contextlib.aclosing(stream):
        return "".join([(await anext(stream)).text for _ in range(num_pieces)])


def test_each_of_many_streams_is_right_while_a_third_is_cancelled(
    llm: AsyncLLM, alone: Callable[[str, int], str]
) -> None:
    rng = random.Random(0)
    requests = []
    for index in range(120):
        max_tokens = rng.choice([1, 5, 20, 160])
        requests.append((rng.choice(QUESTIONS), max_tokens, index % 6))

    async def one(question: str, max_tokens: int, way: int) -> str | None:
        if way == 0:
            text = await read_some(llm, question, num_pieces=rng.randint(1, 4))
            assert alone(question, 160).startswith(text)
            return None
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        return await read(llm, question, params)

    async def main() -> list[Any]:
        tasks = [asyncio.create_task(one(*request)) for request in requests]
        for task, (_, _, way) in zip(tasks, requests, strict=True):
            if way == 1:
                asyncio.get_running_loop().call_later(rng.uniform(0, 0.4), task.cancel)
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = run(main(), 100)
    num_cancelled = 0
    for (question, max_tokens, way), result in zip(requests, results, strict=True):
        if way == 0:
            assert result is None
        elif way == 1 and isinstance(result, asyncio.CancelledError):
            num_cancelled += 1
        else:
            assert result == alone(question, max_tokens)
    assert num_cancelled


def test_generate_and_chat_answer_exactly(llm: AsyncLLM) -> None:
    async def main() -> list[Any]:
        messages = [[{"role": "user", "content": question}] for question in QUESTIONS[:8]]
        no_thinking = {"enable_thinking": False}
        return await asyncio.gather(
            *(llm.generate(question, GREEDY) for question in QUESTIONS[:8]),
            *(llm.chat(message, GREEDY) for message in messages),
            *(llm.chat(m, GREEDY, chat_template_kwargs=no_thinking) for m in messages),
        )

    outputs = run(main())
    answers = [ANSWER_TO[question] for question in QUESTIONS[:8]]
    assert [o.text for o in outputs] == [" " + answer for answer in answers] + 2 * answers
    assert all(output.finished for output in outputs)
    assert all(output.finish_reason == "stop" for output in outputs)


PLAIN_TEMPLATE = (
    "{{ tools | tojson }}{% for message in messages %}{{ message.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": False, "enable_thinking": False},
        {"chat_template": PLAIN_TEMPLATE, "tools": [{"type": "function"}]},
    ],
    ids=" ".join,
)
def test_chat_takes_the_template_options_of_llm_chat(
    llm: AsyncLLM, sync_llm: LLM, options: dict[str, Any]
) -> None:
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    known = {name: options[name] for name in options if name != "enable_thinking"}
    others = {name: options[name] for name in options if name == "enable_thinking"}
    output = run(llm.chat(messages, GREEDY, chat_template_kwargs=others, **known))
    expected = sync_llm.render(messages, **{"add_generation_prompt": True, **options})
    assert output.prompt_token_ids == expected
    (same,) = sync_llm.chat(messages, GREEDY, False, chat_template_kwargs=others, **known)
    assert (same.prompt_token_ids, same.token_ids) == (expected, output.token_ids)


def test_chat_takes_priorities(llm: AsyncLLM, sync_llm: LLM) -> None:
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    with pytest.raises(InvalidRequestError, match="1 prompts but 2 priority"):
        sync_llm.chat(messages, GREEDY, priority=[0, 1])
    with pytest.raises(InvalidRequestError, match="priority must be an integer"):
        run(llm.chat(messages, GREEDY, priority="high"))  # type: ignore[arg-type]
    for priority in (None, [None], [2]):  # None is 0, as in vLLM
        (output,) = sync_llm.chat(messages, GREEDY, False, priority=priority)
        assert output.text == ANSWER_TO[QUESTIONS[0]]


def test_chat_has_the_arguments_of_llm_chat() -> None:
    theirs, ours = (inspect.signature(owner.chat).parameters for owner in (LLM, AsyncLLM))
    assert theirs.keys() - ours.keys() == {"use_tqdm"}
    assert ours.keys() - theirs.keys() == {"request_id", "user"}
    both = theirs.keys() & ours.keys()
    assert all(ours[name].default == theirs[name].default for name in both)


def test_stream_joins_to_what_generate_returns(llm: AsyncLLM) -> None:
    params = SamplingParams(
        temperature=1.3, seed=3, n=3, max_tokens=60, stop=["token", "keys and v"], logprobs=1
    )

    async def main() -> None:
        whole = await llm.generate("What is the KV cache?", params)
        texts, tokens = [""] * 3, [[], [], []]  # type: tuple[list[str], list[list[int]]]
        ends = {}
        async for piece in llm.stream("What is the KV cache?", params):
            for completion in piece.outputs:
                texts[completion.index] += completion.text
                tokens[completion.index] += completion.token_ids
                assert completion.logprobs is not None
                assert len(completion.logprobs) == len(completion.token_ids)
                if completion.finish_reason:
                    ends[completion.index] = (completion.finish_reason, completion.stop_reason)
        assert texts == [completion.text for completion in whole.outputs]
        assert tokens == [completion.token_ids for completion in whole.outputs]
        assert ends == {c.index: (c.finish_reason, c.stop_reason) for c in whole.outputs}

    run(main())


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_pieces_that_nobody_reads_are_one(llm: AsyncLLM, kind: RequestOutputKind) -> None:
    params = SamplingParams(
        temperature=1.3, seed=3, n=3, max_tokens=60, stop=["token"], logprobs=1, output_kind=kind
    )
    whole_params = params.clone(output_kind=RequestOutputKind.DELTA)

    async def main() -> None:
        whole = await llm.generate("What is the KV cache?", whole_params)
        first, rest = [], []
        async for piece in llm.stream("What is the KV cache?", params):
            if not first:
                first.append(piece)
                await asyncio.to_thread(wait_until_idle, llm)
            else:
                rest.append(piece)
        (last,) = rest
        assert last.finished
        for completion in whole.outputs:
            pieces = [c for p in (*first, last) for c in p.outputs if c.index == completion.index]
            if kind is RequestOutputKind.CUMULATIVE:
                assert pieces[-1] == completion
                continue
            assert "".join(piece.text for piece in pieces) == completion.text
            tokens = [token for piece in pieces for token in piece.token_ids]
            logprobs = [found for piece in pieces for found in piece.logprobs or ()]
            assert (tokens, logprobs) == (completion.token_ids, completion.logprobs)
            assert pieces[-1].cumulative_logprob == completion.cumulative_logprob
            assert pieces[-1].finish_reason == completion.finish_reason
            assert pieces[-1].stop_reason == completion.stop_reason

    run(main())


class Gate:
    """Holds up the tokenizing of one prompt, like a very long one, until it is opened."""

    PROMPT = "a long prompt"

    def __init__(self, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open, self.is_reached = threading.Event(), threading.Event()
        encode = llm.engine.input_processor.encode

        def wait_and_encode(prompt: str, *, rendered: bool) -> list[int]:
            if prompt == self.PROMPT:
                self.is_reached.set()
                assert self.is_open.wait(20)
            return encode(prompt, rendered=rendered)

        monkeypatch.setattr(llm.engine.input_processor, "encode", wait_and_encode)


def test_long_prompt_holds_up_neither_steps_nor_the_event_loop(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(llm, monkeypatch)

    async def main() -> None:
        running = llm.stream(QUESTIONS[0], ENDLESS)
        await anext(running)
        long = asyncio.create_task(llm.generate(gate.PROMPT, GREEDY))
        behind = asyncio.create_task(llm.generate(QUESTIONS[1], GREEDY))
        await asyncio.to_thread(gate.is_reached.wait, 20)
        for _ in range(20):
            await anext(running)
        assert not any(task.done() for task in (long, behind))
        gate.is_open.set()
        first, second = await asyncio.gather(long, behind)
        assert first.request_id < second.request_id
        assert second.text == " " + ANSWER_TO[QUESTIONS[1]]
        await running.aclose()  # type: ignore[attr-defined]

    run(main())


def test_cancelled_while_it_is_tokenized(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(llm, monkeypatch)
    num_tokens = llm.engine.stats.num_prompt_tokens

    async def main() -> None:
        tasks = [asyncio.create_task(llm.generate(gate.PROMPT, GREEDY)) for _ in range(3)]
        await asyncio.to_thread(gate.is_reached.wait, 20)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        gate.is_open.set()
        await llm.abort(["nobody's", "other"])  # runs after the three
        assert llm.engine.stats.num_prompt_tokens == num_tokens
        assert llm.engine.is_finished()

    run(main())


def test_aborted_while_it_is_tokenized(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(llm, monkeypatch)

    async def main() -> RequestOutput:
        task = asyncio.create_task(llm.generate(gate.PROMPT, ENDLESS, "mine"))
        await asyncio.to_thread(gate.is_reached.wait, 20)
        abort = asyncio.create_task(llm.abort("mine"))
        await asyncio.sleep(0)
        gate.is_open.set()
        await abort
        return await task

    output = run(main())
    assert (output.finish_reason, output.finished) == ("abort", True)


def test_shutdown_while_a_prompt_is_tokenized(
    own_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(own_llm, monkeypatch)

    async def main() -> None:
        tasks = [
            asyncio.create_task(own_llm.generate(prompt, GREEDY)) for prompt in (gate.PROMPT, "Hi")
        ]
        await asyncio.to_thread(gate.is_reached.wait, 20)
        await asyncio.to_thread(own_llm.shutdown)
        gate.is_open.set()
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, EngineDeadError)

    run(main())


def test_one_user_with_many_requests_does_not_hold_up_another(llm: AsyncLLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    finished: list[str] = []

    async def one(user: str) -> None:
        await llm.generate(QUESTIONS[0], params, user=user)
        finished.append(user)

    async def main() -> None:
        many = [asyncio.create_task(one("many")) for _ in range(100)]
        await asyncio.sleep(0)  # they begin
        await llm.abort("nobody's")  # runs behind them, so they are queued
        await one("one")
        assert finished.index("one") < 90
        await asyncio.gather(*many)
        with pytest.raises(InvalidRequestError, match="user must be a string or None, got 5"):
            await llm.generate("Hi", params, user=5)  # type: ignore[arg-type]

    run(main())


def test_salts_separate_cached_prefixes_and_metrics_count_them(llm: AsyncLLM) -> None:
    prompt = [random.Random(7).randrange(1000) for _ in range(200)]

    async def num_cached(salt: str | None) -> int:
        before = {metric.name: metric for metric in await llm.get_metrics()}
        output = await llm.generate({"prompt_token_ids": prompt, "cache_salt": salt}, GREEDY)
        change = {
            metric.name.removeprefix("vllm:"): getattr(metric, "value", 0)
            - getattr(before[metric.name], "value", 0)
            for metric in await llm.get_metrics()
        }
        assert change["prompt_tokens"] == change["prefix_cache_queries"] == len(prompt)
        assert change["prefix_cache_hits"] == output.num_cached_tokens
        return output.num_cached_tokens

    async def main() -> list[Any]:
        return [await num_cached(salt) for salt in (None, "a", None, "a", "b", "b")]

    first, *others = run(main())
    assert first == 0
    block = llm.engine.worker_info.block_size
    full = (len(prompt) - 1) // block * block
    assert others == [0, full, full, 0, full]


@pytest.mark.parametrize("delay", [None, 0.05])
@pytest.mark.parametrize("streams", [True, False])
def test_cancelled_request_is_aborted(llm: AsyncLLM, delay: float | None, streams: bool) -> None:
    async def main() -> None:
        request = read(llm, QUESTIONS[0], ENDLESS) if streams else llm.generate("Hi", ENDLESS)
        task = asyncio.create_task(request)
        if delay is not None:
            await asyncio.sleep(delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(wait_until_idle, llm)  # while the loop still runs

    run(main())


def test_request_of_a_dropped_iterator_is_aborted(llm: AsyncLLM) -> None:
    async def main() -> None:
        async for piece in llm.stream(QUESTIONS[0], ENDLESS):
            assert not piece.finished
            break
        await asyncio.sleep(0)
        await asyncio.to_thread(wait_until_idle, llm)

    run(main())


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", GREEDY, "the prompt is empty"),
        ([1] * 5000, GREEDY, "5000 tokens"),
        ("x", {"temperature": 0}, "sampling_params must be SamplingParams"),
    ],
)
def test_bad_input_raises_only_in_its_caller(
    llm: AsyncLLM, prompt: Any, params: Any, message: str
) -> None:
    async def main() -> list[Any]:
        return await asyncio.gather(
            read(llm, QUESTIONS[0]),
            read(llm, prompt, params),
            read(llm, QUESTIONS[1]),
            llm.generate(prompt, params),
            return_exceptions=True,
        )

    first, bad_stream, second, bad_whole = run(main())
    assert [first, second] == [" " + ANSWER_TO[question] for question in QUESTIONS[:2]]
    for error in (bad_stream, bad_whole):
        assert isinstance(error, InvalidRequestError)
        assert message in str(error)


class Panic(BaseException):
    """As Rust's panics reach Python: no `Exception`."""


def test_a_panic_ends_the_requests_and_no_thread_unnoticed(
    own_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step, in a command, and last in the thread itself, while it aborts."""
    engine, thread = own_llm.engine, own_llm._thread

    def panic(*_: Any, **__: Any) -> Any:
        raise Panic("index out of range")

    async def failures() -> list[Any]:
        tasks = [asyncio.create_task(own_llm.generate("Hi", ENDLESS)) for _ in range(3)]
        return await asyncio.gather(*tasks, return_exceptions=True)

    async def main() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "run_step", panic)
            for error in await failures():
                assert isinstance(error, RuntimeError)
                assert str(error) == "Panic: index out of range"
            patch.setattr(engine, "queue", panic)
            assert {type(error) for error in await failures()} == {RuntimeError}
            thread.submit(panic)
        output = await own_llm.generate(QUESTIONS[0], GREEDY)
        assert output.text == " " + ANSWER_TO[QUESTIONS[0]]
        await own_llm.check_health()

        monkeypatch.setattr(engine, "run_step", panic)
        monkeypatch.setattr(engine, "abort", panic)
        for error in await failures():
            assert isinstance(error, RuntimeError | EngineDeadError)
        with pytest.raises(EngineDeadError, match="the engine's thread failed"):
            await own_llm.check_health()
        with pytest.raises(EngineDeadError):
            await own_llm.generate("Hi", GREEDY)

    run(main(), 20)
    thread.join(5)
    assert not thread.is_alive()


async def start(llm: AsyncLLM, num: int) -> list[AsyncIterator[Any]]:
    """Start streams that do not end by themselves; read the first piece of each."""
    streams = [llm.stream(question, ENDLESS) for question in QUESTIONS[:num]]
    await asyncio.gather(*(anext(stream) for stream in streams))
    return streams


async def drain(stream: AsyncIterator[Any]) -> None:
    async for _ in stream:
        pass


def test_shutdown_ends_running_requests(own_llm: AsyncLLM) -> None:
    async def main() -> None:
        streams = await start(own_llm, 20)
        tasks = [asyncio.create_task(drain(stream)) for stream in streams]
        tasks += [asyncio.create_task(own_llm.generate("Hi", ENDLESS)) for _ in range(5)]
        await asyncio.sleep(0.05)
        await asyncio.to_thread(own_llm.shutdown)
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, EngineDeadError)
            assert "shut down" in str(error)
        own_llm.shutdown()
        for refused in (read(own_llm, "Hi"), own_llm.generate("Hi"), own_llm.generate("")):
            with pytest.raises(EngineDeadError, match="shut down"):
                await refused
        with pytest.raises(EngineDeadError, match="shut down"):
            await own_llm.chat([{"role": "user", "content": "Hi"}])

    run(main())
    assert not own_llm._thread.is_alive()


def test_request_queued_during_shutdown_raises(
    own_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox = own_llm._thread.inbox

    class SlowInbox:
        """Delivers a request only after the engine's thread has ended."""

        def __getattr__(self, name: str) -> Any:
            return getattr(inbox, name)

        def put(self, command: Any) -> None:
            own_llm.shutdown()
            inbox.put(command)

    monkeypatch.setattr(own_llm._thread, "inbox", SlowInbox())
    with pytest.raises(EngineDeadError, match="shut down"):
        run(own_llm.generate("Hi", GREEDY), seconds=5)


def test_event_loops_in_two_threads_share_an_engine(llm: AsyncLLM) -> None:
    async def main(questions: list[str]) -> list[str]:
        return await asyncio.gather(*(read(llm, question) for question in questions))

    halves = QUESTIONS[0:24:2], QUESTIONS[1:24:2]
    found = in_threads([lambda half=half: run(main(half)) for half in halves])
    assert found == [[" " + ANSWER_TO[question] for question in half] for half in halves]


def test_own_request_ids(llm: AsyncLLM) -> None:
    async def main() -> None:
        outputs = await asyncio.gather(
            llm.generate(QUESTIONS[0], GREEDY, "first"),
            llm.generate(QUESTIONS[1], GREEDY, request_id="second"),
            llm.chat([{"role": "user", "content": "Hi"}], GREEDY, request_id="third"),
        )
        assert [output.request_id for output in outputs] == ["first", "second", "third"]
        assert [output.text for output in outputs[:2]] == [
            " " + ANSWER_TO[question] for question in QUESTIONS[:2]
        ]
        async for piece in llm.stream(QUESTIONS[0], GREEDY, "first"):  # free again
            assert piece.request_id == "first"
        running = llm.stream(QUESTIONS[0], ENDLESS, "same")
        await anext(running)
        with pytest.raises(InvalidRequestError, match="request_id 'same' is that of a running"):
            await llm.generate(QUESTIONS[1], GREEDY, "same")
        with pytest.raises(InvalidRequestError, match=r"request_id must be a string, got 5 \(int"):
            await llm.generate(QUESTIONS[1], GREEDY, 5)  # type: ignore[arg-type]
        assert not (await anext(running)).finished
        await running.aclose()  # type: ignore[attr-defined]

    run(main())


def test_abort_by_request_id(llm: AsyncLLM) -> None:
    """An aborted request returns what it has; unknown and finished ids do nothing."""

    async def main() -> None:
        whole = asyncio.create_task(llm.generate(QUESTIONS[0], ENDLESS, "whole"))
        pieces = llm.stream(QUESTIONS[0], ENDLESS, "stream")
        text = "".join([(await anext(pieces)).text for _ in range(5)])
        await llm.abort("stream")
        await llm.abort("whole")
        await llm.abort("unknown")
        rest = [piece async for piece in pieces]
        assert rest[-1].finish_reason == "abort"
        output = await whole
        assert output.finish_reason == "abort"
        # Which of the two is a few tokens ahead depends on which was queued first.
        assert output.text.startswith(text) or text.startswith(output.text)
        await llm.abort("whole")

    run(main())


def test_users_take_turns_while_prompts_are_tokenized(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: the long prompts of one user held up another user's short one for seconds."""
    processor, may_go_on = llm.engine.input_processor, threading.Event()
    encode, prompts = processor.encode, []

    def encode_slowly(prompt: str, *, rendered: bool) -> list[int]:
        prompts.append(prompt)
        may_go_on.wait(20)
        return encode(prompt, rendered=rendered)

    monkeypatch.setattr(processor, "encode", encode_slowly)

    async def main() -> None:
        one = SamplingParams(temperature=0, max_tokens=1)
        tasks = [
            asyncio.create_task(llm.generate(name, one, name, user=name[0]))
            for name in ("z", "a1", "a2", "a3", "b1")  # z occupies the thread
        ]
        await asyncio.sleep(0)  # they begin
        aborted = asyncio.create_task(llm.abort("a3"))
        await asyncio.sleep(0)
        assert llm._making.keys() >= {"a2", "a3", "b1"}
        may_go_on.set()
        reasons = [output.finish_reason for output in await asyncio.gather(*tasks)]
        assert reasons[:3] == ["length", "length", "length"]
        await aborted

    run(main())
    assert prompts == ["z", "a1", "b1", "a2", "a3"]
    assert not llm._making


def test_health_and_names_of_llm(own_llm: AsyncLLM, sync_llm: LLM) -> None:
    assert own_llm.get_default_sampling_params() == sync_llm.get_default_sampling_params()
    assert type(own_llm.get_tokenizer()) is type(sync_llm.get_tokenizer())
    assert run(own_llm.check_health()) is None
    own_llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        run(own_llm.check_health())


def test_closed_event_loop_leaves_the_engine_working(llm: AsyncLLM) -> None:
    """The request of the closed loop is never read to its end; other loops still get answers."""
    loop = asyncio.new_event_loop()
    stream = llm.stream(QUESTIONS[0], GREEDY)
    piece = loop.run_until_complete(stream.__anext__())
    assert not piece.finished
    loop.close()
    assert run(read(llm, QUESTIONS[1])) == " " + ANSWER_TO[QUESTIONS[1]]


def test_collected_engine_ends_its_thread() -> None:
    llm = AsyncLLM(demo_model.MODEL, **OPTIONS)
    thread = llm._thread

    async def begin(llm: AsyncLLM) -> None:
        async for _ in llm.stream(QUESTIONS[0], ENDLESS):
            break

    run(begin(llm))
    assert thread.is_alive()
    del llm
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_dead_worker_ends_every_stream() -> None:
    with forked_ranks():
        llm = AsyncLLM(demo_model.MODEL, tensor_parallel_size=2, **OPTIONS)

    async def main() -> None:
        assert await read(llm, QUESTIONS[0]) == " " + ANSWER_TO[QUESTIONS[0]]
        streams = await start(llm, 8)
        waiting = [asyncio.create_task(llm.generate("Hi", ENDLESS)) for _ in range(80)]
        await asyncio.sleep(0)  # they begin
        await llm.abort("nobody's")  # runs behind them, so they are queued
        metrics = {metric.name: metric for metric in await llm.get_metrics()}
        states = [metrics[f"vllm:num_requests_{state}"] for state in ("running", "waiting")]
        assert sum(state.value for state in states) == 88  # type: ignore[union-attr]
        started = time.monotonic()
        llm.engine.executor.ranks.processes[1].kill()  # type: ignore[attr-defined]
        ends = (*map(drain, streams), *waiting)
        for error in await asyncio.gather(*ends, return_exceptions=True):
            assert isinstance(error, EngineDeadError)
            assert "rank1 exited with -9" in str(error)
        with pytest.raises(EngineDeadError, match="rank1"):
            await llm.generate("Hi", GREEDY)
        with pytest.raises(EngineDeadError, match="rank1"):
            await llm.check_health()
        assert time.monotonic() - started < 10

    run(main())
    llm.shutdown()
