"""`nanovllm.vllm`'s LLM, LLMEngine and EngineArgs: vLLM's keywords and loop."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy
import pytest

from nanovllm import Config, SamplingParams, demo_model
from nanovllm.errors import ConfigError, InvalidRequestError
from nanovllm.vllm import LLM, AsyncEngineArgs, EngineArgs
from tests.glossary import GREEDY, OPTIONS, QUESTION

LONG = SamplingParams(max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Options that are None ask for nothing."""
    options = {**OPTIONS, "max_num_seqs": None, "max_cpu_loras": 8}
    llm = LLM.from_engine_args(EngineArgs(demo_model.MODEL, **options))
    yield llm
    llm.shutdown()


def test_max_tokens_may_be_none(llm: LLM) -> None:
    """It is then what the context has room for."""
    endless = SamplingParams(temperature=0, max_tokens=None, seed=-1, ignore_eos=True)  # type: ignore[arg-type]
    (output,) = llm.generate(QUESTION, endless, use_tqdm=False)
    (found,) = output.outputs
    assert found.finish_reason == "length"
    assert len(output.prompt_token_ids) + len(found.token_ids) == OPTIONS["max_model_len"]


def test_keywords_of_vllms(llm: LLM) -> None:
    assert llm.generate(QUESTION, GREEDY, use_tqdm=False, tokenization_kwargs={})[0].text
    messages = [{"role": "user", "content": QUESTION}]
    assert llm.chat(messages, GREEDY, False, mm_processor_kwargs=None)[0].text
    with pytest.raises(InvalidRequestError, match="tokenization_kwargs=.* not supported: use trun"):
        llm.generate(QUESTION, GREEDY, tokenization_kwargs={"truncation": True})
    with pytest.raises(InvalidRequestError, match="mm_processor_kwargs=.*: give it to the engine"):
        llm.chat(messages, GREEDY, False, mm_processor_kwargs={"size": 1})


def test_prompt_token_ids_is_an_argument(llm: LLM) -> None:
    for ids in ([[1, 2], [3]], (numpy.array([1, 2]), [3])):
        outputs = llm.generate(prompt_token_ids=ids, sampling_params=GREEDY, use_tqdm=False)
        assert [output.prompt_token_ids for output in outputs] == [[1, 2], [3]]
    (output,) = llm.generate(prompt_token_ids=[1, 2], sampling_params=GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == [1, 2]
    (output,) = llm.generate({"prompt_token_ids": [1], "prompt": "A"}, GREEDY, use_tqdm=False)
    assert (output.prompt, output.prompt_token_ids) == ("A", [1])
    with pytest.raises(InvalidRequestError, match="give prompts or prompt_token_ids, not both"):
        llm.generate([[1]], GREEDY, prompt_token_ids=[[1]], use_tqdm=False)


def test_engine_with_vllms_methods(llm: LLM) -> None:
    engine = llm.llm_engine
    assert engine.engine is llm.engine
    expected = llm.generate(QUESTION, GREEDY, use_tqdm=False)[0].outputs
    engine.add_request("a", QUESTION, GREEDY, lora_request=None, trace_headers=None)
    engine.add_request("b", {"prompt": QUESTION}, LONG, priority=1)
    with pytest.raises(InvalidRequestError, match="'a' is that of a running request"):
        engine.add_request("a", QUESTION, GREEDY)
    assert engine.get_num_unfinished_requests() == 2
    last: dict[Any, Any] = {}
    while "a" not in last or not last["a"].finished:
        last |= {output.request_id: output for output in engine.step()}
    assert last["a"].outputs == expected
    assert not last["b"].finished
    assert not engine.reset_prefix_cache()
    engine.abort_request(["b", "c"])
    assert not engine.has_unfinished_requests()
    assert engine.reset_prefix_cache(reset_running_requests=True)


def test_engine_args_are_options() -> None:
    args = AsyncEngineArgs("model", max_model_len=None, seed=None, swap_space=0)
    assert dataclasses.asdict(args) == dataclasses.asdict(Config("model"))
    with pytest.raises(ConfigError, match="no field 'foo'"):
        EngineArgs("model", foo=None)
    args.seed = 1
    args.mm_processor_cache_gb = 4  # changes nothing
    assert dataclasses.asdict(args) == dataclasses.asdict(Config("model", seed=1))
    with pytest.raises(ConfigError, match="seed"):
        args.seed = "one"
    with pytest.raises(ConfigError, match="no field 'foo'"):
        args.foo = 1
