"""Vectors and scores beside transformers, and the promise: they depend on nothing but the text."""

import asyncio
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from nanovllm import LLM, AsyncLLM, NanoVLLMError, PoolingParams, SamplingParams, demo_model
from nanovllm.errors import InvalidRequestError, UnsupportedModelError
from nanovllm.features.pooling.checkpoint_files import PoolingSettings
from nanovllm.features.pooling.requests import PoolingRequests
from tests.gguf_files import make_gguf
from tests.test_native_invariance import pytestmark as with_c_kernels

POOLINGS = ("last", "mean", "cls")
OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 512, "num_kvcache_blocks": 256}
random_tokens = random.Random(0)
PROMPTS = [[random_tokens.randrange(1000) for _ in range(n)] for n in (1, 5, 16, 33, 90)]


def vectors(llm: LLM, prompts: Any = PROMPTS, **params: Any) -> list[list[float]]:
    outputs = llm.embed(prompts, use_tqdm=False, pooling_params=PoolingParams(**params))
    return [output.outputs.embedding for output in outputs]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The demo model in float32, whose long prompts take several steps."""
    found = LLM(demo_model.MODEL, dtype="float32", max_num_batched_tokens=40, **OPTIONS)
    yield found
    found.shutdown()


@pytest.fixture(scope="module")
def states() -> list[torch.Tensor]:
    """transformers' hidden states of each prompt."""
    model = AutoModelForCausalLM.from_pretrained(demo_model.MODEL, dtype=torch.float32)
    with torch.inference_mode():
        return [model.model(torch.tensor([ids])).last_hidden_state[0] for ids in PROMPTS]


@pytest.mark.parametrize("pooling", POOLINGS)
def test_vectors_equal_those_of_transformers(
    llm: LLM, states: list[torch.Tensor], pooling: str
) -> None:
    choose = {"last": lambda x: x[-1], "mean": lambda x: x.mean(0), "cls": lambda x: x[0]}
    expected = [choose[pooling](each) for each in states]
    found = vectors(llm, pooling=pooling, normalize=False)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(torch.tensor(one), other, rtol=1e-5, atol=1e-5)
    normalized = vectors(llm, pooling=pooling, normalize=True, dimensions=32)
    for one, other in zip(normalized, expected, strict=True):
        cut = torch.nn.functional.normalize(other[:32], dim=0)
        assert torch.allclose(torch.tensor(one), cut, rtol=1e-5, atol=1e-5)


@with_c_kernels
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_the_same_bits_in_any_batch(pooling: str) -> None:
    """Alone, in chunks of any size, beside others that generate, and after prefix hits."""
    whole = LLM(demo_model.MODEL, enable_prefix_caching=False, **OPTIONS)
    expected = [vectors(whole, [prompt], pooling=pooling)[0] for prompt in PROMPTS]
    whole.shutdown()
    for budget in (7, 40):
        llm = LLM(demo_model.MODEL, max_num_batched_tokens=budget, **OPTIONS)
        sampling = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        for prompt in PROMPTS:
            llm.add_request(prompt, sampling)
        llm.step()
        params = PoolingParams(pooling=pooling)
        for _ in range(2):
            outputs = llm.embed(PROMPTS, use_tqdm=False, pooling_params=params)
            assert [output.outputs.embedding for output in outputs] == expected
        hits = [output.num_cached_tokens for output in outputs]
        size = llm.engine.worker_info.block_size
        whole_blocks = [(len(prompt) - 1) // size * size for prompt in PROMPTS]
        assert hits == (whole_blocks if pooling == "last" else [0] * 5)
        assert max(whole_blocks) > 0
        while not llm.is_finished():
            llm.step()
        assert llm.engine.scheduler.block_manager.num_free_blocks == 256
        llm.shutdown()


def test_generation_beside_vectors_is_unchanged(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2, prompt_logprobs=1)
    expected = llm.generate("A KV cache is", params, use_tqdm=False)[0]
    made = {}

    async def both() -> None:
        other = AsyncLLM(demo_model.MODEL, dtype="float32", **OPTIONS)
        tasks = [other.embed(prompt) for prompt in PROMPTS]
        text, scores, *rest = await asyncio.gather(
            other.generate("A KV cache is", params), other.score("a", ["b", "c"]), *tasks
        )
        made.update(text=text, scores=scores, vectors=rest)
        with pytest.raises(InvalidRequestError, match="max_model_len 512"):  # not a group of errors
            await other.score("a", ["b", "c " * 2000])
        other.shutdown()

    asyncio.run(both())
    assert made["text"].token_ids == expected.token_ids
    assert len(made["scores"]) == 2
    for one, expected_vector in zip(made["vectors"], vectors(llm), strict=True):
        assert one.outputs.embedding == pytest.approx(expected_vector, abs=1e-6)


def test_scores_are_cosines(llm: LLM) -> None:
    texts = ["paged attention", "What is a KV cache?", "x"]
    made = np.array(vectors(llm, texts, normalize=False))
    made /= np.linalg.norm(made, axis=1, keepdims=True)
    found = [each.outputs.score for each in llm.score(texts[0], texts, use_tqdm=False)]
    assert found == pytest.approx((made @ made[0]).tolist(), abs=1e-6)
    pairs = [each.outputs.score for each in llm.score(texts, texts, use_tqdm=False)]
    assert pairs == pytest.approx([1, 1, 1], abs=1e-6)


def test_a_reranker_asks_for_yes_or_no(llm: LLM, states: list[torch.Tensor]) -> None:
    """Beside transformers: the probability of yes after the template."""
    processor = llm.engine.input_processor
    own = processor.pooling
    answers = PoolingSettings(pooling="mean", answers=(5, 9), activation="sigmoid", asks=True)
    processor._pooling = PoolingRequests(answers, processor.tokenizer, processor.limit, 128)
    try:
        reranker = processor.pooling.reranker
        assert reranker is not None
        documents = ["paged attention", "cats " * 20]
        found = llm.score("q?", documents, use_tqdm=False)
        again = llm.score("q?", documents, use_tqdm=False)
        assert all(each.num_cached_tokens > 0 for each in again)
        model = AutoModelForCausalLM.from_pretrained(demo_model.MODEL, dtype=torch.float32)
        for document, each in zip(documents, found, strict=True):
            ids = reranker.prompt("q?", document, None, None, "")
            assert each.prompt_token_ids == ids
            with torch.inference_mode():
                logits = model(torch.tensor([ids])).logits[0, -1]
            expected = math.exp(logits[9]) / (math.exp(logits[5]) + math.exp(logits[9]))
            assert each.outputs.score == pytest.approx(expected, abs=1e-5)
        raw = PoolingParams(normalize=False)
        for each, logit in zip(
            found, llm.score("q?", documents, pooling_params=raw, use_tqdm=False), strict=True
        ):
            probability = 1 / (1 + math.exp(-logit.outputs.score))
            assert probability == pytest.approx(each.outputs.score, abs=1e-6)
        cut = PoolingParams(truncate_prompt_tokens=3)
        short = llm.score("q?", documents[1], pooling_params=cut, use_tqdm=False)[0]
        assert len(short.prompt_token_ids) < len(found[1].prompt_token_ids)
        with pytest.raises(InvalidRequestError, match="max_model_len"):
            llm.score("q?", "cats " * 2000, use_tqdm=False)
    finally:
        processor._pooling = own


def test_long_prompts_keep_their_beginning(llm: LLM) -> None:
    assert vectors(llm, [PROMPTS[4]], truncate_prompt_tokens=16) == vectors(llm, [PROMPTS[4][:16]])
    text = "paged attention " * 2000
    tokens = llm.get_tokenizer().encode(text)  # type: ignore[union-attr]
    found = llm.embed(
        text, pooling_params=PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False
    )[0]
    assert found.prompt_token_ids == tokens[:511]


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ("a", {"dimensions": 129}, "dimensions must be at most 128"),
    ("a", {"dimensions": 0}, "dimensions must be an integer from 1"),
    ("a", {"pooling": "max"}, "pooling must be one of last, mean, cls"),
    ("a", {"prompt_name": "query"}, "prompt_name 'query' is not a prompt"),
    ("a", {"token_ids": [1024]}, "token_ids holds token 1024"),
    ("a", {"token_ids": [-1]}, r"token_ids\[0\] must be"),
    ([1], {"prompt_name": "query"}, "the prompt is token ids"),
    ("a", {"normalize": 1}, "normalize must be True or False"),
    ("a", {"normalise": True}, "did you mean 'normalize'"),
    ([1] * 512, {}, "max_model_len 512"),
    ([], {}, "the prompt is empty"),
    ([5000], {}, "prompt token 0"),
    ("\ud800", {}, "not valid Unicode"),
]
PAIRS: list[tuple[Any, Any, str]] = [
    ([], ["a"], "data_1 must be"),
    (["a", "b"], ["a"], "data_1 has 2 texts and data_2 has 1"),
    (["a"], [7], r"data_2\[0\] must be a text"),
    ("a", {"text": "a"}, "data_2 must be"),
]


def test_what_is_refused(llm: LLM) -> None:
    for prompt, params, message in REFUSED:
        with pytest.raises(InvalidRequestError, match=message):
            llm.embed([prompt], pooling_params=PoolingParams(**params), use_tqdm=False)
    for queries, documents, message in PAIRS:
        with pytest.raises(InvalidRequestError, match=message):
            llm.score(queries, documents, use_tqdm=False)


def test_states_that_are_not_finite_fail_alone(llm: LLM) -> None:
    """The prompt's KV is not cached, and the engine goes on."""
    weight = llm.engine.executor._runner.network.model.model.norm.weight  # type: ignore[attr-defined]
    before = weight.clone()
    with torch.inference_mode():
        weight.fill_(math.nan)
    with pytest.raises(NanoVLLMError, match="hidden states have NaN or inf"):
        llm.embed([[1, 2, 3]], use_tqdm=False)
    with torch.inference_mode():
        weight.copy_(before)
    assert all(map(math.isfinite, vectors(llm, [[1, 2, 3]])[0]))


@pytest.mark.parametrize("stored", [2, 4])
def test_the_pooling_of_a_gguf_file(stored: int, tmp_path: Path) -> None:
    file, wide = make_gguf(tmp_path, "qwen3", "F32", metadata={"qwen3.pooling_type": stored})
    if stored == 4:
        with pytest.raises(UnsupportedModelError, match=r"qwen3.pooling_type 4 .*0 or 1 or 2 or 3"):
            LLM(file, device="cpu")
        return
    llm = LLM(file, device="cpu", dtype="float32", num_kvcache_blocks=16)
    (found,) = vectors(llm, [[5, 6, 7]])
    llm.shutdown()
    model = AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32)
    with torch.inference_mode():
        states = model.model(torch.tensor([[5, 6, 7]])).last_hidden_state[0]
    assert found == pytest.approx((states[0] / states[0].norm()).tolist(), abs=1e-5)
