"""`nanovllm.vllm.AsyncLLM`: `generate` is iterated, and takes vLLM's arguments."""

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from nanovllm import LLM, RequestOutputKind, SamplingParams, demo_model
from nanovllm.errors import InvalidRequestError
from nanovllm.vllm import AsyncEngineArgs, AsyncLLM
from tests.glossary import GREEDY, OPTIONS, QUESTION

LONG = SamplingParams(max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(demo_model.MODEL, **OPTIONS)
    yield llm
    llm.shutdown()


def test_an_output_for_each_step(llm: AsyncLLM, demo_llm: LLM) -> None:
    """Each holds all so far, unless output_kind asks for something else."""
    expected = demo_llm.generate(QUESTION, GREEDY, use_tqdm=False)[0]

    async def main() -> None:
        assert len([output async for output in llm.generate(QUESTION, LONG)]) > 2
        steps = [output async for output in llm.generate(QUESTION, GREEDY, "mine")]
        assert {output.request_id for output in steps} == {"mine"}
        assert steps[-1].finished
        assert steps[-1].outputs == expected.outputs
        texts = [output.text for output in steps]
        assert all(text.startswith(before) for before, text in itertools.pairwise(texts))
        delta = GREEDY.clone(output_kind=RequestOutputKind.DELTA)
        assert "".join([o.text async for o in llm.generate(QUESTION, delta)]) == expected.text
        final = GREEDY.clone(output_kind=RequestOutputKind.FINAL_ONLY)
        assert [o.text async for o in llm.generate(QUESTION, final)] == [expected.text]
        assert [o.finished async for o in llm.generate(QUESTION)][-1]

    asyncio.run(main())


@pytest.mark.filterwarnings("error")
def test_ends_early(llm: AsyncLLM) -> None:
    """A break aborts the request, and so does closing."""

    async def main() -> None:
        async for output in llm.generate(QUESTION, LONG):
            assert not output.finished
            break
        while llm.engine.scheduler.num_unfinished:
            await asyncio.sleep(0.01)
        outputs = llm.generate(QUESTION, LONG)
        await anext(outputs)
        await outputs.aclose()
        while llm.engine.scheduler.num_unfinished:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_arguments_of_vllms_that_ask_for_nothing(llm: AsyncLLM) -> None:
    async def main() -> None:
        async for _ in llm.generate(QUESTION, GREEDY, lora_request=None, trace_headers=None):
            pass
        foo: Any = {"foo": 1}
        with pytest.raises(
            TypeError, match=r"generate\(\) got an unexpected keyword argument 'foo'"
        ):
            llm.generate(QUESTION, GREEDY, **foo)
        headers: Any = {"trace_headers": {"a": "b"}}
        with pytest.raises(TypeError, match="unexpected keyword argument 'trace_headers'"):
            llm.generate(QUESTION, GREEDY, **headers)
        adapter: Any = {"lora_request": 1}
        with pytest.raises(InvalidRequestError, match="lora_request=1 needs an engine that takes"):
            await anext(llm.generate(QUESTION, GREEDY, **adapter))
        assert (await llm.chat([{"role": "user", "content": QUESTION}], GREEDY, stream=False)).text
        with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
            AsyncLLM.from_engine_args(AsyncEngineArgs("m"), foo=1)  # type: ignore[call-arg]

    asyncio.run(main())


def test_abort_takes_one_id_or_several(llm: AsyncLLM) -> None:
    async def main() -> list[str | None]:
        async def last(name: str) -> str | None:
            *_, output = [output async for output in llm.generate(QUESTION, LONG, name)]
            return output.outputs[0].finish_reason

        tasks = [asyncio.create_task(last(name)) for name in ("a", "b", "c")]
        while llm.engine.scheduler.num_unfinished < 3:
            await asyncio.sleep(0.01)
        await llm.abort(["a", "b", "unknown"])
        await llm.abort("c")
        return [await task for task in tasks]

    assert asyncio.run(asyncio.wait_for(main(), 30)) == ["abort"] * 3
