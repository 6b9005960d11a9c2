"""`Reader`: outputs that nobody reads are merged, and nothing is lost, repeated or reordered."""

import asyncio
import itertools
import random
from collections.abc import Coroutine, Sequence as Seq
from typing import Any, TypeVar

import pytest
from hypothesis import (
    given,
    settings,
    strategies as st,
)

from nanovllm.engine.reader import Reader, merge_outputs
from nanovllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

Result = TypeVar("Result")


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def make_stream(seed: int, n: int, num_steps: int, *, sends_all: bool) -> list[RequestOutput]:
    """Return the outputs of a stream: deltas, or all so far, of the sequences that advance."""
    rng = random.Random(seed)
    with_logprobs = rng.random() < 0.5
    texts: list[str] = [""] * n
    tokens: list[list[int]] = [[] for _ in range(n)]
    unfinished = set(range(n))
    outputs = []
    for step in range(num_steps):
        advancing = sorted(rng.sample(sorted(unfinished), rng.randint(1, len(unfinished))))
        if step == num_steps - 1:
            advancing = sorted(unfinished)
        completions = []
        for index in advancing:
            ends = step == num_steps - 1 or (len(unfinished) > 1 and rng.random() < 0.1)
            if ends:
                unfinished.remove(index)
            new = [rng.randrange(1000) for _ in range(rng.randint(0, 3))]
            text = "".join(rng.choice("ab ") for _ in new)
            texts[index] += text
            tokens[index] += new
            shown = list(tokens[index]) if sends_all else new
            completions.append(
                CompletionOutput(
                    index,
                    texts[index] if sends_all else text,
                    shown,
                    rng.choice(["stop", "length"]) if ends else None,
                    rng.choice([None, 7, "a"]) if ends else None,
                    -float(len(tokens[index])) if with_logprobs else None,
                    [{t: Logprob(-1.0, 1, "t")} for t in shown] if with_logprobs else None,
                )
            )
        outputs.append(
            RequestOutput(
                "id",
                "prompt",
                [1, 2],
                completions,
                finished=not unfinished,
                num_cached_tokens=3,
                metrics=RequestMetrics(0.0, num_output_tokens=sum(map(len, tokens))),
                prompt_logprobs=[None] if step == 0 or sends_all else None,
            )
        )
    return outputs


def whole(outputs: Seq[RequestOutput], *, sends_all: bool) -> Any:
    """Return what someone who reads all outputs knows in the end."""
    found: dict[int, list[Any]] = {}
    prompt_logprobs = None
    for output in outputs:
        prompt_logprobs = output.prompt_logprobs or prompt_logprobs
        for c in output.outputs:
            new = [c.text, c.token_ids, c.logprobs]
            old = found.get(c.index, [])[:3]
            if old and not sends_all:
                new = [a + b if a is not None else None for a, b in zip(old, new, strict=True)]
            found[c.index] = [*new, c.finish_reason, c.stop_reason, c.cumulative_logprob]
    last = outputs[-1]
    return found, prompt_logprobs, last.finished, last.metrics, last.num_cached_tokens


STREAM = st.tuples(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 80))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(stream=STREAM, sends_all=st.booleans(), cuts=st.lists(st.integers(1, 79)))
def test_merged_outputs_say_the_same(
    stream: tuple[int, int, int], sends_all: bool, cuts: list[int]
) -> None:
    outputs = make_stream(*stream, sends_all=sends_all)
    edges = [0, *sorted({cut for cut in cuts if cut < len(outputs)}), len(outputs)]
    merged = [
        merge_outputs(outputs[start:end], sends_all=sends_all)
        for start, end in itertools.pairwise(edges)
    ]
    assert whole(merged, sends_all=sends_all) == whole(outputs, sends_all=sends_all)
    for output in merged:
        indices = [completion.index for completion in output.outputs]
        assert indices == sorted(set(indices))
        assert all(
            completion.logprobs is None or len(completion.logprobs) == len(completion.token_ids)
            for completion in output.outputs
        )


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    stream=STREAM,
    sends_all=st.booleans(),
    num_unread=st.lists(st.integers(1, 70), min_size=1),
    fails=st.booleans(),
)
def test_reader_gets_everything_in_order_and_the_error_last(
    stream: tuple[int, int, int], sends_all: bool, num_unread: list[int], fails: bool
) -> None:
    outputs = make_stream(*stream, sends_all=sends_all)

    async def main() -> None:
        reader = Reader()
        reader.sends_all = sends_all
        left, got = list(outputs), []
        while left:
            count = num_unread[len(got) % len(num_unread)]
            for output in left[:count]:
                reader.put(output)
            del left[:count]
            if fails and not left:
                reader.put(ValueError("failed"))
            got.append(await reader.get())
        assert whole(got, sends_all=sends_all) == whole(outputs, sends_all=sends_all)
        if fails:
            with pytest.raises(ValueError, match="failed"):
                await reader.get()

    run(main())


def test_outputs_are_taken_only_while_the_task_waits_for_them() -> None:
    outputs = make_stream(2, 1, 9, sends_all=False)
    taken: list[RequestOutput] = []

    def take(output: RequestOutput) -> bool:
        if output is outputs[6]:
            raise ValueError("failed")
        if output is outputs[3]:
            return False
        taken.append(output)
        return True

    async def main() -> None:
        reader = Reader(take=take)
        reader.put(outputs[0])
        assert await reader.get() is outputs[0]
        task = asyncio.create_task(reader.get())
        await asyncio.sleep(0)
        for output in outputs[1:5]:  # the last follows one that is not read yet
            reader.put(output)
        assert taken == outputs[1:3]
        assert whole([await task], sends_all=False) == whole(outputs[3:5], sends_all=False)
        task = asyncio.create_task(reader.get())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        reader.put(outputs[5])
        assert await reader.get() is outputs[5]
        task = asyncio.create_task(reader.get())
        await asyncio.sleep(0)
        for output in outputs[6:]:
            reader.put(output)
        with pytest.raises(ValueError, match="failed"):
            await task
        assert taken == outputs[1:3]

    run(main())


def test_unread_outputs_are_few_objects() -> None:
    """Symptom: each token that a stopped reader does not read costs a kilobyte."""
    outputs = make_stream(5, 3, 5000, sends_all=False)

    async def main() -> None:
        reader = Reader()
        for output in outputs:
            reader.put(output)
            assert len(reader._outputs) <= 32
        got = await reader.get()
        assert whole([got], sends_all=False) == whole(outputs, sends_all=False)

    run(main())
