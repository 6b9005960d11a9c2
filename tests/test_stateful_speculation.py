"""Speculation with a target whose layers keep a state: each proposer's drafts change no token.

The scripted proposer of tests/test_speculation.py has drafts accepted in every number.
"""

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.scripted import Scripted
from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.core.sequence import Sequence
from nanovllm.errors import ConfigError
from nanovllm.factory import make_engine
from nanovllm.options.config import Config
from tests.checkpoints import make_checkpoint
from tests.eagle3_checkpoints import make_eagle3_checkpoint
from tests.helpers import (
    HAS_GRAMMARS,
    Request,
    generate_all,
    generate_in_random_order,
    random_prompt,
)
from tests.kernels.cpu.helpers import native
from tests.mtp_checkpoints import STATEFUL
from tests.speculation.proposers.drafting import (
    MAX_MODEL_LEN,
    NATIVE,
    acceptance,
    allow_all,
    make_requests,
    run,
    seen_of,
    use_scripted,
    watch_sequences,
)

LFM2: dict[str, Any] = {
    "model_type": "lfm2",
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "block_auto_adjust_ff_dim": False,
    "conv_L_cache": 4,
}
BF16: dict[str, Any] = {
    **STATEFUL,
    **NATIVE,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
"""A model that the C kernels compute."""
MODELS: dict[str, dict[str, Any]] = {
    "gated delta": STATEFUL,
    "short convolution": LFM2,
    "bfloat16": BF16,
    "bfloat16 convolution": {**LFM2, **NATIVE},
}
ALONE: dict[str, Any] = {
    "kvcache_block_size": 4,
    "enable_prefix_caching": False,
    "max_num_seqs": 1,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "one batch": {},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "preemption": {"num_kvcache_blocks": 60, "max_num_batched_tokens": 33},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_seqs": 3},
}
SPEC = {"method": "ngram", "num_speculative_tokens": 4}
REQUESTS = make_requests(12)


@pytest.fixture(params=[1.0, 0.6], ids=["right", "wrong at random"])
def scripted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    return use_scripted(monkeypatch, request.param)


class Expected(NamedTuple):
    """What `REQUESTS` give one at a time, without a cache and without speculation."""

    model: str
    seen: list[Any]
    sequences: list[Sequence]


@pytest.fixture(scope="module")
def expected_of(shared_checkpoint: Any) -> Callable[..., Expected]:
    """Return what is expected of one of `MODELS`, under options."""

    @functools.cache
    def compute(model: str, **options: Any) -> Expected:
        made: list[LLM] = []
        path = shared_checkpoint(**MODELS[model])

        def make_llm(path: str, **options: Any) -> LLM:
            made.append(LLM(path, **options))
            return made[-1]

        with pytest.MonkeyPatch.context() as patch:
            sequences = watch_sequences(patch)
            seen, _ = run(make_llm, path, REQUESTS, **{**ALONE, **options})
        made[0].shutdown()
        return Expected(path, seen, sequences)

    return compute


def tokens_of(seen: list[Any]) -> list[Any]:
    return [part[:2] for part in seen]


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("model", "options"),
    [*(("gated delta", name) for name in OPTIONS), ("short convolution", "preemption")],
)
def test_drafts_that_are_right_or_wrong(
    model: str,
    options: str,
    scripted: Scripted,
    expected_of: Callable[..., Expected],
    make_llm: Any,
    preempted: list[Any],
) -> None:
    expected = expected_of(model)
    scripted.learn(expected.sequences)
    speculating = {"kvcache_block_size": 4, "speculative_config": SPEC, **OPTIONS[options]}
    found, llm = run(make_llm, expected.model, REQUESTS, 2, **speculating)
    assert tokens_of(found) == tokens_of(expected.seen * 2)
    assert bool(preempted) == (options == "preemption")
    num_accepted, num_proposed = acceptance(llm)
    share = num_accepted / num_proposed
    assert share > 0.9 if scripted.acceptance == 1.0 else 0.2 < share < 0.7


@pytest.mark.parametrize("scripted", [0.6], ids=["wrong at random"], indirect=True)
@pytest.mark.parametrize("queue_depth", [0, 1])
def test_arrivals_priorities_and_aborts(
    queue_depth: int, scripted: Scripted, expected_of: Callable[..., Expected]
) -> None:
    """Table rows change hands while their last drafts are in the log."""
    expected = expected_of("gated delta")
    scripted.learn(expected.sequences)
    options: dict[str, Any] = {**OPTIONS["preemption"], "kvcache_block_size": 4, "max_num_seqs": 4}
    config = Config(
        model=expected.model,
        max_model_len=MAX_MODEL_LEN,
        speculative_config=SPEC,
        **options,
    )
    engine = make_engine(config, queue_depth=queue_depth)
    outputs = generate_in_random_order(engine, REQUESTS, queue_depth)
    engine.shutdown()
    assert tokens_of([seen_of(output) for output in outputs]) == tokens_of(expected.seen)
    assert engine.scheduler.drafting.counts.num_accepted_tokens > 50


@native
@pytest.mark.parametrize("scripted", [0.6], ids=["wrong at random"], indirect=True)
@pytest.mark.parametrize(
    ("base", "options"),
    [
        ({}, {"max_num_batched_tokens": 17, "num_kvcache_blocks": 40}),
        ({"quantization": "int4"}, {"enforce_eager": True}),
    ],
    ids=str,
)
def test_the_c_kernels_give_the_same_bits(
    base: dict[str, Any],
    options: dict[str, Any],
    scripted: Scripted,
    expected_of: Callable[..., Expected],
    make_llm: Any,
) -> None:
    base = {"kvcache_block_size": 32, **base}
    expected = expected_of("bfloat16", **base)
    scripted.learn(expected.sequences)
    speculating = {**base, **options, "speculative_config": SPEC}
    found, llm = run(make_llm, expected.model, REQUESTS, 2, **speculating)
    assert found == expected.seen * 2
    assert acceptance(llm)[0] > 50


def make_methods(target: str, draft: str, path: Path) -> dict[str, dict[str, Any]]:
    return {
        "draft model": {"model": draft, "num_speculative_tokens": 4},
        "eagle3": {"model": make_eagle3_checkpoint(path, target), "num_speculative_tokens": 4},
    }


def repeating_requests() -> list[Request]:
    """Return prompts that repeat themselves, so that n-grams are found and likely to be right."""
    rng = random.Random(0)
    requests: list[Request] = []
    for index in range(6):
        prompt = random_prompt(rng, rng.randint(2, 12)) * 3
        bias = dict.fromkeys(prompt[:6], 12.0)
        params = {"temperature": index % 3 / 2, "seed": index, "logit_bias": bias}
        requests.append((prompt, SamplingParams(max_tokens=16, ignore_eos=True, **params)))
    return requests


@pytest.mark.thinned(2)
@native
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("model", ["bfloat16", "bfloat16 convolution"])
def test_each_draft_network_with_the_c_kernels(
    model: str,
    quantization: str | None,
    shared_checkpoint: Any,
    make_llm: Any,
    preempted: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit, in chunks, with hits and preemption. test_native_invariance.py has n-grams."""
    path, requests = shared_checkpoint(**MODELS[model]), repeating_requests()
    kept = {"kvcache_block_size": 32, "quantization": quantization}
    expected, _ = run(make_llm, path, requests, **{**ALONE, **kept})
    allow_all(monkeypatch)
    methods = make_methods(path, shared_checkpoint(**NATIVE), tmp_path)
    num_blocks = {"bfloat16": 40, "bfloat16 convolution": 10}[model]  # by the size of a state
    for method in ("draft model", "eagle3"):
        spec = {"speculative_config": methods[method]}
        options = {**kept, **spec, "num_kvcache_blocks": num_blocks, "max_num_batched_tokens": 17}
        found, llm = run(make_llm, path, requests, 2, **options)
        assert found == expected * 2
        num_accepted, num_proposed = acceptance(llm)
        assert 0 < num_accepted < num_proposed
        assert preempted
        preempted.clear()


@pytest.mark.skipif(not HAS_GRAMMARS, reason="needs llguidance")
def test_tokens_that_a_grammar_forces(
    scripted: Scripted, make_llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind accepted drafts come tokens that no step has sampled, and drafts again."""
    tokenizer = Path(demo_model.MODEL)
    make_checkpoint(tmp_path, **STATEFUL, vocab_size=1024)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tokenizer / name).read_bytes())
    regex = r"(attention|memory|[a-z]{3,9}) is kept in blocks( of the cache|, [a-z]+ )[a-z]{2,6}"
    requests: list[Request] = [
        (
            f"{index} of",
            SamplingParams(temperature=1, seed=index, structured_outputs={"regex": regex}),
        )
        for index in range(8)
    ]

    def generate(**options: Any) -> tuple[list[Any], LLM]:
        llm = make_llm(tmp_path, max_model_len=MAX_MODEL_LEN, kvcache_block_size=4, **options)
        return [output.outputs[0].token_ids for output in generate_all(llm, requests)], llm

    sequences = watch_sequences(monkeypatch)
    expected, _ = generate()
    scripted.learn(sequences)
    found, llm = generate(speculative_config=SPEC)
    assert found == expected
    assert acceptance(llm)[0] > 10


def test_a_draft_model_with_a_state_is_refused(
    random_model: str, shared_checkpoint: Any, make_llm: Any
) -> None:
    draft = shared_checkpoint(**STATEFUL)
    with pytest.raises(ConfigError, match="the draft model has layers that keep a state"):
        make_llm(random_model, speculative_config={"model": draft})
