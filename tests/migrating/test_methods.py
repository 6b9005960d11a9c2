"""Methods that users bring from vLLM and nano-vllm: they work, or say what to use instead."""

from typing import Any

import pytest

from nanovllm import LLM, AsyncLLM, PoolingParams, SamplingParams, demo_model
from nanovllm.errors import EngineDeadError, InvalidRequestError
from nanovllm.options.other_names import REMEDIES
from tests.glossary import GREEDY, OPTIONS, QUESTION, QUESTIONS
from tests.helpers import generate


def test_a_nano_vllm_loop_gets_what_generate_returns(demo_llm: Any) -> None:
    llm = demo_llm
    expected = [output.token_ids for output in llm.generate(QUESTIONS[:5], GREEDY, False)]
    for question in QUESTIONS[:5]:
        llm.add_request(question, GREEDY)
    outputs: dict[Any, list[int]] = {}
    num_prefill = num_decode = 0
    while not llm.is_finished():
        output, num_tokens = llm.step()
        if num_tokens > 0:
            num_prefill += num_tokens
        else:
            num_decode -= num_tokens
        for seq_id, token_ids in output:
            outputs[seq_id] = token_ids
    assert [outputs[seq_id] for seq_id in sorted(outputs)] == expected
    tokenizer: Any = llm.get_tokenizer()
    assert num_prefill == sum(len(tokenizer.encode(q)) - 1 for q in QUESTIONS[:5])
    assert num_decode == sum(map(len, expected)) - 5  # the first tokens came with the prompts
    assert llm.step() == ([], 0)


def test_step_returns_what_other_callers_steps_finished(demo_llm: Any) -> None:
    request = demo_llm.add_request(QUESTIONS[0], SamplingParams(temperature=0, max_tokens=2))
    expected = generate(demo_llm, QUESTIONS[0]).token_ids[:2]
    assert not demo_llm.is_finished()
    assert demo_llm.step() == ([(request, expected)], 0)
    assert demo_llm.is_finished()


def test_add_request_takes_a_priority(make_llm: Any) -> None:
    llm = make_llm(demo_model.MODEL, **{**OPTIONS, "max_num_seqs": 1})
    first, last = (llm.add_request(QUESTION, GREEDY, priority=priority) for priority in (2, 1))
    finished = []
    while not llm.is_finished():
        finished += [request_id for request_id, _ in llm.step()[0]]
    assert finished == [last, first]


def test_add_request_refuses_what_step_could_not_return(demo_llm: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"n must be 1, got 2: use generate\(\)"):
        demo_llm.add_request(QUESTION, SamplingParams(n=2))
    with pytest.raises(InvalidRequestError, match="sampling_params must be SamplingParams"):
        demo_llm.add_request(QUESTION, {"n": 2})
    with pytest.raises(InvalidRequestError, match="sampling_params must be SamplingParams"):
        demo_llm.add_request("0", QUESTION)
    assert demo_llm.is_finished()


@pytest.mark.parametrize("owner", [LLM, AsyncLLM])
def test_what_is_not_there_says_what_to_use(owner: type) -> None:
    llm = owner.__new__(owner)
    for name in ("encode", "classify", "collective_rpc", "add_lora", "llm_engine"):
        assert not hasattr(llm, name)
        with pytest.raises(AttributeError) as caught:
            getattr(llm, name)
        expected = f"{owner.__name__!r} object has no attribute {name!r}: {REMEDIES[name]}"
        assert str(caught.value) == expected
    with pytest.raises(AttributeError, match=r"no attribute 'generated'$"):
        llm.generated  # noqa: B018


def test_exit_is_shutdown(make_llm: Any) -> None:
    llm = make_llm(demo_model.MODEL, **OPTIONS)
    llm.exit()
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate(QUESTION)


def test_keywords_of_vllm_are_taken_or_say_what_to_use(demo_llm: Any) -> None:
    quiet = {"use_tqdm": False, "stream": False, "tokenization_kwargs": {}, "trace_headers": None}
    [output] = demo_llm.generate(QUESTION, GREEDY, **quiet)
    assert output.text == generate(demo_llm, QUESTION).text
    for method, name, value, remedy in (
        ("generate", "stream", True, r"use LLM\.stream\(prompt\), or AsyncLLM\.stream"),
        ("chat", "stream", True, r"use LLM\.stream\(prompt\)"),
        ("embed", "tokenization_kwargs", {"a": 1}, "use truncate_prompt_tokens, or give token ids"),
        ("score", "use_activation", False, r"use PoolingParams\(normalize=\.\.\.\)"),
    ):
        arguments = [QUESTION] * (1 + (method == "score"))
        with pytest.raises(InvalidRequestError, match=f"^{name}=.* is not supported: {remedy}"):
            getattr(demo_llm, method)(*arguments, **{name: value})
    with pytest.raises(TypeError, match="no_such"):
        demo_llm.embed(QUESTION, no_such=1)
    with pytest.raises(InvalidRequestError, match=r"use_activation=.*: use Pool.*normalize"):
        PoolingParams(use_activation=False)
    with pytest.raises(InvalidRequestError, match=r"stream=True is not supported: use LLM\.stream"):
        SamplingParams(stream=True)
    with pytest.raises(AttributeError, match=r"model_config.*: llm\.engine\.config has the"):
        _ = demo_llm.model_config
