"""Bad input raises a NanoVLLMError that names the value and the rule; the engine still works."""

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.errors import (
    CheckpointError,
    ConfigError,
    InvalidRequestError,
    OutOfMemoryError,
)
from nanovllm.parallel.in_process import InProcessExecutor
from tests.checkpoints import copy_checkpoint
from tests.helpers import assert_idle

PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(random_model: str) -> LLM:
    return LLM(random_model, max_model_len=64)


@pytest.fixture
def works_after(llm: LLM) -> Any:
    """Check that the engine is idle after the test, and generates the same tokens as before."""
    before = llm.generate([[1, 2, 3]], PARAMS, use_tqdm=False)[0].token_ids
    yield
    assert_idle(llm)
    assert llm.generate([[1, 2, 3]], PARAMS, use_tqdm=False)[0].token_ids == before


@pytest.mark.usefixtures("works_after")
@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[]], r"prompt 0: the prompt is empty"),
        ([[1], []], r"prompt 1: the prompt is empty"),
        ([[1] * 64], r"64 tokens; max_model_len 64 allows 63 prompt tokens"),
        ([[1, 1003]], r"prompt token 1 must be an integer from 0 to 1002, got 1003"),
        ([[-1]], r"from 0 to 1002, got -1"),
        ([[1.5]], r"prompt token 0 must be an integer .* got 1.5 \(float\)"),
        ([["a", "b"]], r"got 'a' \(str\)"),
        ([[None]], r"got None"),
        ([None], r"must be a string or a list of token ids, got NoneType"),
        ([b"text"], r"got bytes"),
        (None, r"prompts must be a string, token ids, or a list"),
        ("text", r"has no tokenizer"),
        (numpy.str_("text"), r"has no tokenizer"),
        ([{"text": "x"}], r"""has the key "prompt" \(text\) or "prompt_token_ids", got 'text';"""),
        (
            {"prompt_token_ids": [1], "multi_modal_data": {"image": 1}},
            r"this model reads text only",
        ),
        ({}, r'"prompt_token_ids", got neither'),
        ({"prompt": [1]}, r'the "prompt" of a prompt dictionary must be a string, got \[1\]'),
        ({"prompt_token_ids": "text"}, r"prompt_token_ids must be a list of token ids, got 'text'"),
        ({"prompt": "x", "cache_salt": 5}, r"cache_salt must be a string of 1 to 128 .*, got int"),
        ({"prompt": "x", "cache_salt": "s" * 129}, r"1 to 128 characters, got 129"),
        ({"prompt_token_ids": 5}, r"must be a string or a list of token ids, got int 5"),
        (b"x" * 10**7, r"got bytes b'x+\.\.\.x+'$"),
        ([[1], {1}], r"prompt 1: a prompt must be a string or a list of token ids, got set"),
        (numpy.array([0.5]), r"token ids must be integers, got an array of float64"),
        (torch.tensor([1.0]), r"got an array of torch.float32"),
        ([numpy.array(["1"])], r"got an array of <U1"),
        (numpy.array(5), r"got int"),
        (numpy.array([1, 1003]), r"prompt token 1 must be .* got 1003"),
        (numpy.zeros((2, 0), dtype=int), r"prompt 0: the prompt is empty"),
    ],
)
def test_bad_prompt_is_refused(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompts, PARAMS, use_tqdm=False)


@pytest.mark.usefixtures("works_after")
@pytest.mark.parametrize("params", [[PARAMS], [PARAMS] * 3, []])
def test_lists_of_unequal_length_are_refused(llm: LLM, params: list[SamplingParams]) -> None:
    with pytest.raises(InvalidRequestError, match=f"2 prompts but {len(params)} sampling_params"):
        llm.generate([[1], [2]], params, use_tqdm=False)


@pytest.mark.usefixtures("works_after")
@pytest.mark.parametrize("params", [{"temperature": 0}, 0.5, [PARAMS, 3], ["greedy", PARAMS]])
def test_sampling_params_of_the_wrong_type_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequestError, match="sampling_params"):
        llm.generate([[1], [2]], params, use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"block_size": 4}, ConfigError, r"block_size=4 .*: use kvcache_block_size"),
        ({"device": "cuda:99"}, ConfigError, r"CUDA|GPUs"),
        ({"num_kvcache_blocks": 3}, OutOfMemoryError, r"3 blocks .* max_model_len 256 needs 16"),
        ({"kv_cache_memory_bytes": 10}, OutOfMemoryError, r"holds 0 blocks"),
        (
            {"num_kvcache_blocks": 2**31 - 1, "kvcache_block_size": 2**31 - 1},
            OutOfMemoryError,
            r"refuses the memory .*num_kvcache_blocks 2147483647",
        ),
        ({"tensor_parallel_size": 1000}, ConfigError, r"does not divide .*num_attention_heads"),
    ],
)
def test_bad_engine_options_are_refused(
    random_model: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(random_model, **options)


def test_broken_tokenizer_is_refused_before_weights_load(
    random_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer is read first: an exception's traceback would keep loaded weights alive."""
    path = Path(copy_checkpoint(random_model, tmp_path / "m"))
    monkeypatch.setattr(InProcessExecutor, "start", lambda self: pytest.fail("started"))
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot load the tokenizer"):
        LLM(str(path))


@pytest.mark.usefixtures("works_after")
@pytest.mark.parametrize(
    "prompts",
    [
        [numpy.int64(1), numpy.int64(2), numpy.int64(3)],
        numpy.arange(1, 4, dtype="uint8"),
        torch.arange(1, 4),
        torch.tensor([[1, 2, 3]], dtype=torch.int32),
        list(torch.arange(1, 4)),
        {"prompt_token_ids": numpy.arange(1, 4)},
        {"prompt_token_ids": [1, 2, 3], "prompt": None},
        {"prompt_token_ids": [1, 2, 3], "cache_salt": "salt"},
        [{"prompt_token_ids": (1, 2, 3)}],
    ],
)
def test_token_ids_may_be_an_array(llm: LLM, prompts: Any) -> None:
    (output,) = llm.generate(prompts, PARAMS, use_tqdm=False)
    assert output.prompt_token_ids == [1, 2, 3]
    assert all(type(token) is int for token in output.prompt_token_ids)
    assert output.prompt is None


@pytest.mark.usefixtures("works_after")
@pytest.mark.parametrize("copy_of", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_engine_is_neither_pickled_nor_copied(llm: LLM, copy_of: Any) -> None:
    with pytest.raises(TypeError, match="'LLM' objects cannot .*; make one in each process"):
        copy_of(llm)


@pytest.mark.usefixtures("works_after")
def test_rows_of_an_array_are_prompts(llm: LLM) -> None:
    rows = numpy.arange(1, 7).reshape(2, 3)
    for prompts in (rows, torch.tensor(rows), list(rows), list(torch.tensor(rows))):
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        assert [output.prompt_token_ids for output in outputs] == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.usefixtures("works_after")
def test_truncated_prompt_keeps_its_last_tokens(llm: LLM) -> None:
    """`llm` has room for 64 tokens."""
    for length, kept, expected in (
        (3, 2, 2),
        (3, 5, 3),
        (5000, 63, 63),
        (5000, -1, 63),
        (9, -1, 9),
    ):
        prompt = [index % 1000 for index in range(length)]
        params = SamplingParams(temperature=0, max_tokens=1, truncate_prompt_tokens=kept)
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        assert output.prompt_token_ids == prompt[-expected:]
    with pytest.raises(
        InvalidRequestError, match="64 tokens; max_model_len 64 allows 63 prompt tokens"
    ):
        llm.generate([1] * 70, SamplingParams(truncate_prompt_tokens=64), use_tqdm=False)


def test_long_text_is_refused_before_it_is_tokenized(
    demo_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: a prompt of 10 MB takes 20 s to be refused."""
    text = "What is paged attention? " * 400_000
    chat = [{"role": "user", "content": text}]
    cut = SamplingParams(temperature=0, max_tokens=1, truncate_prompt_tokens=7)
    (output,) = demo_llm.generate(text[:20_000], cut, use_tqdm=False)
    assert output.prompt_token_ids == demo_llm.get_tokenizer().encode(text[:20_000])[-7:]
    with pytest.raises(InvalidRequestError, match="a word of bad_words is too long: 10000000"):
        demo_llm.generate("Hi", SamplingParams(bad_words=["Hi", text]), use_tqdm=False)
    processor = demo_llm.engine.input_processor
    monkeypatch.setattr(processor, "encode", lambda *_, **__: pytest.fail("used"))
    with pytest.raises(
        InvalidRequestError, match="prompt is too long: 10000000 characters, and no token"
    ):
        demo_llm.generate(text, PARAMS, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match=r"prompt is too long: 100000\d\d char"):
        demo_llm.chat(chat, PARAMS, use_tqdm=False)


def test_half_a_surrogate_pair_in_a_stop_string_is_refused(demo_llm: LLM) -> None:
    params = SamplingParams(stop=["a", "b\udcff"])
    with pytest.raises(InvalidRequestError, match="a stop string is not valid Unicode text"):
        demo_llm.generate("Hi", params, use_tqdm=False)


@pytest.mark.usefixtures("works_after")
@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate([["x" * 10**6]]),
        lambda llm: llm.generate([[1]], {"stop": ["x"] * 10**5}),
        lambda llm: llm.generate({"x" * 10**6: 1}),
        lambda llm: llm.chat([[5] * 10**5]),
    ],
)
def test_messages_are_short(llm: LLM, call: Any) -> None:
    """Symptom: an error message of 600 KB."""
    with pytest.raises(InvalidRequestError) as caught:
        call(llm)
    assert len(str(caught.value)) < 300
