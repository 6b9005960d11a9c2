"""Adapters of requests in whole engines, beside transformers' merged models.

LORA_CASES=all adds PEFT's own adapters and merged models, all families, and two ranks.
"""

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from nanovllm import LLM, LoRARequest, RequestOutput, SamplingParams, demo_model
from tests.helpers import random_prompt
from tests.lora.adapters import ALL, adapt, linears_of, merge, write_adapter
from tests.models import family_cases, test_hybrids
from tests.models.comparison import NUM_TOKENS, assert_tokens_are_greedy

MANY = "LORA_CASES" in os.environ
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ADAPTERS: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (ALL, {"r": 8}),
    (("q_proj", "v_proj"), {"r": 1, "lora_alpha": 3}),
    (("down_proj", "up_proj"), {"r": 64, "use_rslora": True}),
    (ATTENTION, {"r": 5}),
]
OPTIONS: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": 4,
    "max_lora_rank": 64,
    "max_model_len": 128,
}
Asked = tuple[list[int], LoRARequest | None]
"""A prompt and its adapter."""


def request(path: str) -> LoRARequest:
    return LoRARequest(path, 1 + sum(map(ord, path)) % 2**40, path)


@pytest.fixture(scope="module")
def adapters(random_model: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Adapters of the random model."""
    return [
        write_adapter(
            tmp_path_factory.mktemp(f"adapter{seed}"),
            linears_of(random_model, targets),
            seed=seed,
            target_modules=list(targets),
            **config,
        )
        for seed, (targets, config) in enumerate(ADAPTERS)
    ]


@pytest.fixture(scope="module")
def merged(
    random_model: str, adapters: list[str], tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """The random model with each adapter merged."""
    return [
        merge(random_model, path, tmp_path_factory.mktemp("merged") / "model", scale_of(config))
        for path, (_, config) in zip(adapters, ADAPTERS, strict=True)
    ]


def scale_of(config: dict[str, Any]) -> Callable[[str], float]:
    rank = config["r"] ** (0.5 if config.get("use_rslora") else 1)
    return lambda module: config.get("lora_alpha", 16) / rank


def ask(llm: LLM, asked: Sequence[Asked], params: SamplingParams = GREEDY) -> list[RequestOutput]:
    prompts, requests = zip(*asked, strict=True)
    return llm.generate(list(prompts), params, use_tqdm=False, lora_request=list(requests))


def bits(outputs: Sequence[RequestOutput]) -> list[Any]:
    """Return all numbers of outputs."""
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def mixed(
    adapters: Sequence[str], count: int, seed: int = 0, lengths: Any = (1, 60)
) -> list[Asked]:
    """Return prompts with an adapter, or none, each. Some begin alike."""
    chooser = random.Random(seed)
    common = random_prompt(chooser, 40)
    choices = [None, *map(request, adapters)]
    asked = []
    for index in range(count):
        prompt = random_prompt(chooser, chooser.randint(*lengths))
        asked.append((common + prompt if index % 3 == 0 else prompt, choices[index % len(choices)]))
    return asked


def test_tokens_are_those_of_merged_models(
    make_llm: Any, random_model: str, adapters: list[str], merged: list[str]
) -> None:
    """In float32, of one batch."""
    llm = make_llm(random_model, dtype="float32", **OPTIONS)
    asked = mixed(adapters, 10, lengths=(1, 24))
    outputs = ask(llm, asked)
    for path, model in [(None, random_model), *zip(adapters, merged, strict=True)]:
        theirs = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
        own = [i for i, (_, found) in enumerate(asked) if (found and found.lora_path) == path]
        prompts = [asked[i][0] for i in own]
        assert_tokens_are_greedy(theirs, prompts, [outputs[i].outputs[0] for i in own])


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_request_has_the_same_bits_in_any_batch(
    make_llm: Any,
    shared_checkpoint: Any,
    adapters: list[str],
    preempted: list[Any],
    quantization: str | None,
) -> None:
    """Alone, and with 64 others in small chunks, recorded or not, with hits and preemption."""
    model = shared_checkpoint()
    options = {**OPTIONS, "dtype": "bfloat16", "quantization": quantization}
    if quantization is not None:  # groups of 32 inputs
        model = shared_checkpoint(head_dim=32)
        path = Path(adapters[0]).parent / f"for_{quantization}"
        adapters = [
            write_adapter(path / str(seed), linears_of(model, targets), seed=seed, **config)
            for seed, (targets, config) in enumerate(ADAPTERS[:3])
        ]
    asked = mixed(adapters, 64 if quantization is None else 20)
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=20, ignore_eos=True, logprobs=2)
    alone = make_llm(model, **options, max_num_seqs=1, enable_prefix_caching=False)
    expected = bits([ask(alone, [each], params)[0] for each in asked])
    together = make_llm(model, **options, max_num_batched_tokens=80, num_kvcache_blocks=20)
    assert bits(ask(together, asked, params)) == expected
    assert preempted
    few, first = asked[:6], expected[:6]
    assert bits(ask(together, few, params)) == first
    hits = ask(together, few, params)
    assert bits(hits) == first
    assert any(output.num_cached_tokens for output in hits)
    if quantization is None:
        eager = make_llm(model, **options, enforce_eager=True)
        assert bits(ask(eager, asked, params)) == expected


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_base_is_rounded_and_the_adapter_is_not(
    make_llm: Any, shared_checkpoint: Any, tmp_path: Path, quantization: str
) -> None:
    """A rounded base with an adapter is as far from the float32 one as without."""
    model = shared_checkpoint(head_dim=32)
    path = write_adapter(tmp_path / "adapter", linears_of(model))
    whole = make_llm(model, dtype="float32", **OPTIONS)
    rounded = make_llm(model, dtype="bfloat16", quantization=quantization, **OPTIONS)
    prompts = [random_prompt(random.Random(seed), 60) for seed in range(4)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    distances = []
    for adapter in (None, request(path)):
        expected, found = (
            torch.cat(
                [scores(output) for output in ask(llm, [(p, adapter) for p in prompts], params)]
            )
            for llm in (whole, rounded)
        )
        distances.append(float((expected - found).square().mean().sqrt()))
    base, with_adapter = distances
    assert with_adapter < 1.3 * base
    apart = [
        torch.cat(
            [scores(output) for output in ask(whole, [(p, adapter) for p in prompts], params)]
        )
        for adapter in (None, request(path))
    ]
    assert (apart[0] - apart[1]).square().mean().sqrt() > base  # so that an error would show


def scores(output: RequestOutput) -> torch.Tensor:
    """Return the log-probabilities of a prompt's tokens."""
    assert output.prompt_logprobs is not None
    entries = [entry for entry in output.prompt_logprobs if entry is not None]
    return torch.tensor([next(iter(entry.values())).logprob for entry in entries])


def test_speculation_changes_no_token(make_llm: Any, tmp_path: Path) -> None:
    """Drafts are verified with the adapter of their request."""
    path = write_adapter(tmp_path, linears_of(demo_model.MODEL), size=0.3, r=4)
    entries = [" ".join(entry) for entry in demo_model.entries()[:4]]
    asked = [(entry, adapter) for entry in entries for adapter in (None, request(path))]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    options = {**OPTIONS, "enable_prefix_caching": False}
    plain = make_llm(demo_model.MODEL, **options)
    drafting = make_llm(
        demo_model.MODEL,
        **options,
        speculative_config={"method": "ngram", "num_speculative_tokens": 4},
    )
    expected, found = (ask(llm, asked, params) for llm in (plain, drafting))
    assert [each.outputs[0].token_ids for each in found] == [
        each.outputs[0].token_ids for each in expected
    ]
    with_adapter, without = found[1::2], found[::2]
    assert [o.outputs[0].token_ids for o in with_adapter] != [
        o.outputs[0].token_ids for o in without
    ]


def test_an_adapter_that_cannot_be_loaded_ends_its_request_alone(
    make_llm: Any, random_model: str, adapters: list[str], tmp_path: Path
) -> None:
    """Its files change between the check and the load; nothing of it stays in the prefix cache."""
    llm = make_llm(random_model, dtype="bfloat16", **OPTIONS)
    path = write_adapter(tmp_path, linears_of(random_model), seed=7)
    prompt = random_prompt(random.Random(0), 60)
    others = [(prompt, None), (prompt, request(adapters[0]))]
    expected = bits(ask(llm, others))
    engine = llm.engine
    whole = (tmp_path / "adapter_model.safetensors").read_bytes()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    engine.add_request(prompt, params, lora_request=request(path))
    write_adapter(tmp_path, linears_of(random_model), seed=8)
    (output,) = [each for each in run(engine) if each.finished]
    assert output.outputs[0].finish_reason == "error"
    assert "have changed since" in str(output.outputs[0].stop_reason)
    assert bits(ask(llm, others)) == expected
    (tmp_path / "adapter_model.safetensors").write_bytes(whole)
    (again,) = ask(llm, [(prompt, request(path))])
    assert again.num_cached_tokens == 0
    assert again.outputs[0].finish_reason == "length"


def run(engine: Any) -> list[RequestOutput]:
    outputs = []
    while not engine.is_finished():
        outputs += engine.step()
    return outputs


FAMILIES = ["qwen3_5_text 0", "phi3 0", "granitemoehybrid 0", "nemotron_h 0", "laguna 0"]
"""By default: mixers, merged linears of a checkpoint, families with other names."""


@pytest.mark.parametrize("case", [*test_hybrids.CASES, *family_cases.CASES] if MANY else FAMILIES)
def test_families(make_llm: Any, tmp_path: Path, case: str) -> None:
    """An adapter of each linear of transformers' model, by the names that it has there."""
    make = test_hybrids if case in test_hybrids.CASES else family_cases
    theirs = make.make_model(case)
    theirs.save_pretrained(tmp_path / "model")
    path = adapt(theirs, tmp_path / "adapter", r=4)
    llm = make_llm(tmp_path / "model", dtype="float32", **OPTIONS)
    prompts = [[3 + i * 7 % 400 for i in range(length)] for length in (9, 40)]
    outputs = ask(llm, [(prompt, request(path)) for prompt in prompts])
    assert_tokens_are_greedy(theirs, prompts, [output.outputs[0] for output in outputs])


def test_an_adapter_of_a_model_without_a_head(
    make_llm: Any, random_model: str, tmp_path: Path
) -> None:
    """Its names begin otherwise, as transformers' AutoModel has them; so do those with pictures."""
    AutoModel.from_pretrained(random_model).save_pretrained(tmp_path / "model")
    llm = make_llm(tmp_path / "model", dtype="float32", **OPTIONS)
    prompts = [[3, 4, 5], [6] * 20]
    found = [llm.embed(prompts, use_tqdm=False)]
    for number, prefix in enumerate(
        ("model.", "", "model.language_model.", "language_model.model.")
    ):
        linears = {
            name.replace("model.", prefix, 1): shape
            for name, shape in linears_of(random_model).items()
        }
        path = write_adapter(tmp_path / str(number), linears, r=4)
        found.append(llm.embed(prompts, lora_request=request(path), use_tqdm=False))
    without, first, *others = [[each.outputs.embedding for each in outputs] for outputs in found]
    assert first != without
    assert all(other == first for other in others)
