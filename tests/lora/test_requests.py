"""Adapters of requests beside n, grammars and salts, on the shipped model."""

import re
from pathlib import Path
from typing import Any

from nanovllm import LoRARequest, SamplingParams, demo_model
from nanovllm.options.structured_outputs import StructuredOutputsParams
from tests.glossary import QUESTIONS
from tests.lora.adapters import linears_of, write_adapter

PARAMS = [
    SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=8, logprobs=1),
    SamplingParams(
        temperature=1.0,
        seed=7,
        max_tokens=24,
        structured_outputs=StructuredOutputsParams(regex="[a-z]{3,9}, [0-9]{2}!"),
    ),
]


def adapters(tmp_path: Path) -> list[LoRARequest]:
    """Return two adapters that change the answers."""
    linears = linears_of(demo_model.MODEL)
    paths = [write_adapter(tmp_path / str(i), linears, seed=i, size=4.0) for i in range(2)]
    return [LoRARequest(f"a{i}", i, path) for i, path in enumerate(paths, start=1)]


def test_many_answers_and_grammars(make_llm: Any, tmp_path: Path) -> None:
    """In one batch as alone, bit for bit; a grammar holds whatever the adapter."""
    both = adapters(tmp_path)
    llm = make_llm(demo_model.MODEL, enable_lora=True, max_loras=2, max_model_len=256)
    asked = [(q, p, a) for q in QUESTIONS[:2] for p in PARAMS for a in (None, *both)]
    prompts, params, chosen = map(list, zip(*asked, strict=True))
    together = llm.generate(prompts, params, use_tqdm=False, lora_request=chosen)
    for (prompt, param, adapter), output in zip(asked, together, strict=True):
        (alone,) = llm.generate([prompt], param, use_tqdm=False, lora_request=adapter)
        assert alone.outputs == output.outputs
        assert output.lora_request == adapter
        for completion in output.outputs if param is PARAMS[1] else ():
            assert re.fullmatch("[a-z]{3,9}, [0-9]{2}!", completion.text)
    texts = [tuple(c.text for c in output.outputs) for output in together]
    assert len({*texts}) == len(texts)


def test_prefixes_of_salts_and_adapters_are_kept_apart(make_llm: Any, tmp_path: Path) -> None:
    """Also if a salt is written as the root of an adapter is."""
    both = adapters(tmp_path)
    llm = make_llm(demo_model.MODEL, enable_lora=True, max_model_len=256)
    digests = [llm.engine.input_processor.find_adapter(adapter).digest for adapter in both]
    tokens = list(range(100, 180))
    salts = [None, "a", digests[0], f"{digests[0]}None", f"{digests[0]}'a'"]
    one = SamplingParams(max_tokens=1)

    def cached(salt: str | None, adapter: LoRARequest | None) -> int | None:
        prompt = {"prompt_token_ids": tokens} | ({} if salt is None else {"cache_salt": salt})
        (output,) = llm.generate([prompt], one, use_tqdm=False, lora_request=adapter)
        return output.num_cached_tokens

    asked = [(salt, adapter) for salt in salts for adapter in (None, *both)]
    assert {cached(*each) for each in asked} == {0}
    assert {cached(*each) for each in asked} == {64}
