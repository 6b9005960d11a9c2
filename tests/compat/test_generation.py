"""`AsyncLLM.generate` awaited and iterated, and its arguments of vLLM's."""

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from nanovllm import LLM, AsyncLLM, RequestOutputKind, SamplingParams, demo_model
from nanovllm.errors import InvalidRequestError, NanoVLLMError
from tests.glossary import GREEDY, OPTIONS, QUESTION

LONG = SamplingParams(max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(demo_model.MODEL, **OPTIONS)
    yield llm
    llm.shutdown()


def test_awaited_or_iterated(llm: AsyncLLM) -> None:
    async def main() -> None:
        expected = await llm.generate(QUESTION, GREEDY)
        task = asyncio.create_task(llm.generate(QUESTION, GREEDY))
        assert (await task).outputs == expected.outputs
        steps = [output async for output in llm.generate(QUESTION, GREEDY, "mine")]
        assert len(steps) > 2
        assert {output.request_id for output in steps} == {"mine"}
        assert steps[-1].finished
        assert steps[-1].outputs == expected.outputs
        texts = [output.text for output in steps]
        assert all(text.startswith(before) for before, text in itertools.pairwise(texts))
        delta = GREEDY.clone(output_kind=RequestOutputKind.DELTA)
        assert "".join([o.text async for o in llm.generate(QUESTION, delta)]) == expected.text
        final = GREEDY.clone(output_kind=RequestOutputKind.FINAL_ONLY)
        assert [o.text async for o in llm.generate(QUESTION, final)] == [expected.text]

    asyncio.run(main())


def test_one_use_each(llm: AsyncLLM) -> None:
    async def main() -> None:
        awaited, iterated = llm.generate(QUESTION, GREEDY), llm.generate(QUESTION, LONG)
        await awaited
        await anext(iterated)
        with pytest.raises(RuntimeError, match="already awaited"):
            await awaited
        with pytest.raises(NanoVLLMError, match="was awaited already"):
            await anext(awaited)
        with pytest.raises(NanoVLLMError, match="was iterated already"):
            await iterated
        await iterated.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(iterated)

    asyncio.run(main())


@pytest.mark.filterwarnings("error")
def test_ends_early(llm: AsyncLLM) -> None:
    """A break and a cancelled task abort the request."""

    async def main() -> None:
        async for output in llm.generate(QUESTION, LONG):
            assert not output.finished
            break
        while llm.engine.scheduler.num_unfinished:
            await asyncio.sleep(0.01)
        for is_started in (False, True):
            task = asyncio.create_task(llm.generate(QUESTION, LONG))
            while is_started and not llm.engine.scheduler.num_unfinished:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        llm.generate(QUESTION)  # never started
        while llm.engine.scheduler.num_unfinished:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_arguments_of_vllms_that_ask_for_nothing(llm: AsyncLLM, demo_llm: LLM) -> None:
    async def main() -> None:
        await llm.generate(QUESTION, GREEDY, lora_request=None, trace_headers=None)
        foo: Any = {"foo": 1}
        with pytest.raises(
            TypeError, match=r"generate\(\) got an unexpected keyword argument 'foo'"
        ):
            llm.generate(QUESTION, GREEDY, **foo)
        adapter: Any = {"lora_request": 1}
        with pytest.raises(InvalidRequestError, match="lora_request=1 needs an engine that takes"):
            await llm.generate(QUESTION, GREEDY, **adapter)
        with pytest.raises(InvalidRequestError, match="lora_request=1 needs an engine that takes"):
            demo_llm.generate(QUESTION, GREEDY, **adapter)

    asyncio.run(main())
    (output,) = demo_llm.generate(QUESTION, GREEDY, use_tqdm=False, lora_request=None)
    assert output.text
    messages = [{"role": "user", "content": QUESTION}]
    assert demo_llm.chat(messages, GREEDY, False, lora_request=None)[0].text


def test_abort_takes_one_id_or_several(llm: AsyncLLM) -> None:
    """Options that are None ask for nothing; max_tokens is then what the context has room for."""

    async def main() -> list[str]:
        ids = ["a", "b", "c"]
        tasks = [asyncio.create_task(llm.generate(QUESTION, LONG, name)) for name in ids]
        while llm.engine.scheduler.num_unfinished < 3:
            await asyncio.sleep(0.01)
        await llm.abort(["a", "b", "unknown"])
        await llm.abort("c")
        return [(await task).outputs[0].finish_reason for task in tasks]

    assert asyncio.run(asyncio.wait_for(main(), 30)) == ["abort"] * 3


def test_nothing_is_asked_for_by_none(make_llm: Any) -> None:
    llm = make_llm(demo_model.MODEL, **OPTIONS, max_num_seqs=None, max_cpu_loras=8)
    endless = SamplingParams(temperature=0, max_tokens=None, seed=-1, ignore_eos=True)  # type: ignore[arg-type]
    (output,) = llm.generate(QUESTION, endless, use_tqdm=False)
    (found,) = output.outputs
    assert found.finish_reason == "length"
    assert len(output.prompt_token_ids) + len(found.token_ids) == OPTIONS["max_model_len"]


def test_engine_with_vllms_methods(demo_llm: LLM) -> None:
    engine = demo_llm.llm_engine
    expected = demo_llm.generate(QUESTION, GREEDY, use_tqdm=False)[0].outputs
    engine.add_request("a", QUESTION, GREEDY, lora_request=None)
    engine.add_request("b", {"prompt": QUESTION}, LONG, priority=1)
    with pytest.raises(InvalidRequestError, match="'a' is that of a running request"):
        engine.add_request("a", QUESTION, GREEDY)
    assert engine.get_num_unfinished_requests() == 2
    last = {}
    while "a" not in last or not last["a"].finished:
        last |= {output.request_id: output for output in engine.step()}
    assert last["a"].outputs == expected
    assert not last["b"].finished
    assert not engine.reset_prefix_cache()
    engine.abort_request(["b", "c"])
    assert not engine.has_unfinished_requests()
    assert engine.reset_prefix_cache()
    with pytest.raises(AttributeError, match="add_lora.*lora_request="):
        engine.add_lora  # noqa: B018
