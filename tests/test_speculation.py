"""Speculation changes the speed and nothing else: tokens, texts, log-probabilities and the ends of
requests are those of the same engine without it, whatever a proposer proposes.

One product of targets, proposers and ways to run them. Two scripted proposers know the right
tokens: one always proposes them, one is wrong at random.
"""

import dataclasses
import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from nanovllm import LLM, RequestOutput, SamplingParams, demo_model
from nanovllm.core.sequence import Sequence
from nanovllm.errors import ConfigError
from nanovllm.factory import make_engine
from nanovllm.kernels.cpu.library import library
from nanovllm.options.config import Config
from tests.checkpoints import copy_checkpoint, make_checkpoint
from tests.eagle3_checkpoints import change_tensors, make_eagle3_checkpoint
from tests.glossary import QUESTIONS
from tests.helpers import (
    COMPACT,
    HAS_GRAMMARS,
    Request,
    assert_idle,
    generate_all,
    generate_in_random_order,
    random_prompt,
    token_ids,
)
from tests.mtp_checkpoints import STATEFUL, add_mtp
from tests.speculation.proposers.drafting import (
    MAX_MODEL_LEN,
    NATIVE,
    allow_all,
    make_requests,
    use_scripted,
    watch_sequences,
)


class Kind(NamedTuple):
    """A kind of target."""

    config: dict[str, Any]
    """What to change in `checkpoints.SMALL`."""
    block_size: int
    few_blocks: int
    """A pool in which the requests preempt one another."""


LFM2: dict[str, Any] = {
    "model_type": "lfm2",
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "block_auto_adjust_ff_dim": False,
    "conv_L_cache": 4,
}
WIDE = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
KINDS = {
    "plain": Kind({}, 4, 40),
    "states": Kind(STATEFUL, 4, 60),
    "convolution": Kind(LFM2, 4, 60),
    "bfloat16": Kind(NATIVE, 32, 4),
    "bfloat16 states": Kind({**STATEFUL, **NATIVE, **WIDE}, 32, 16),
    "bfloat16 convolution": Kind({**LFM2, **NATIVE}, 32, 10),
    "demo": Kind({}, 32, 8),
}
"""Those in bfloat16, as the demo model, are computed by the C kernels: the same bits."""

SHARES = {
    "right": (0.9, 1.0),
    "wrong at random": (0.2, 0.7),
    "itself": (0.9, 1.0),
    "another": (0.0, 0.9),
    "eagle3": (0.0, 0.9),
    "mtp": (0.0, 0.9),
    "ngram": (0.0, 1.0),
}
"""By proposer: which share of its drafts is accepted."""

WAYS: dict[str, dict[str, Any]] = {
    "one batch": {},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_seqs": 3},
    "call by call": {"enforce_eager": True, "max_num_batched_tokens": 17},
    "preemption": {"max_num_batched_tokens": 33},
    "arrivals": {"max_num_seqs": 8, "max_num_batched_tokens": 24},
    "two ranks": {"tensor_parallel_size": 2},
}

CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("plain", "itself", "chunks of 7", {}),
    ("plain", "itself", "preemption", {}),
    ("plain", "itself", "two ranks", {}),
    ("plain", "another", "no prefix cache", {}),
    ("plain", "eagle3", "preemption", {}),
    ("states", "right", "one batch", {}),
    ("states", "wrong at random", "preemption", {}),
    ("states", "wrong at random", "arrivals", {}),
    ("states", "mtp", "chunks of 7", {}),
    ("states", "mtp", "preemption", {}),
    ("convolution", "wrong at random", "preemption", {}),
    ("bfloat16", "itself", "preemption", {"quantization": "int8", "kv_cache_dtype": "int8"}),
    ("bfloat16", "eagle3", "call by call", {}),
    ("bfloat16", "eagle3", "preemption", {}),
    ("bfloat16 states", "mtp", "one batch", {}),
    ("bfloat16 states", "eagle3", "preemption", {}),
    ("bfloat16 states", "wrong at random", "preemption", {"quantization": "int4"}),
    ("bfloat16 convolution", "another", "preemption", {"quantization": "int4"}),
    ("demo", "right", "one batch", {}),
    ("demo", "wrong at random", "preemption", {}),
    ("demo", "wrong at random", "call by call", {"kv_cache_dtype": "int4"}),
    ("demo", "ngram", "arrivals", {}),
    ("demo", "another", "arrivals", {}),
    ("demo", "eagle3", "arrivals", {}),
]
NOT_WITH = {"plain": "mtp", "states": "itself"}
LONG: list[tuple[str, str, str, dict[str, Any]]] = [
    (kind, method, way, {})
    for kind in NOT_WITH
    for method in SHARES
    for way in ("chunks of 7", "preemption", "arrivals", "two ranks")
    if method != NOT_WITH[kind]
    and (kind, method, way, {}) not in CASES
    and not (method in ("right", "wrong at random") and way == "two ranks")  # one process only
]


def special_requests() -> list[Request]:
    """Every sampling parameter, at four temperatures, of the demo model."""
    rng = random.Random(0)
    special: list[dict[str, Any]] = [
        {"top_k": 20},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"presence_penalty": 0.7, "frequency_penalty": 0.3},
        {"repetition_penalty": 1.3},
        {"logit_bias": {5: 3.0, 300: -2.0}},
        {"bad_words": ["the", " attention"]},
        {"min_tokens": 12},
        {"allowed_token_ids": list(range(0, 1024, 3))},
        {"stop": ["a ", "KV"]},
        {"stop": [" of"], "include_stop_str_in_output": True},
        {"stop_token_ids": list(range(200, 260))},
        {"logprobs": 3},
        {"logprobs": 0, "prompt_logprobs": 2},
        {"n": 3},
        {"ignore_eos": True},
        {"logits_processors": [lower_even]},
        {"max_tokens": 1},
        {"skip_special_tokens": False},
        {},
    ]
    if HAS_GRAMMARS:
        regex = {"structured_outputs": {"regex": "[A-Z][a-z ]+"}, "logprobs": 1}
        special += [{"structured_outputs": COMPACT}, regex]
    requests: list[Request] = []
    for index, options in enumerate(special * 2):
        question = QUESTIONS[index % len(QUESTIONS)]
        prompt = question if index % 3 else [rng.randrange(1000) for _ in range(rng.randint(1, 70))]
        temperature = (0.0, 0.3, 1.0, 1.7)[(index + index // len(special)) % 4]
        params = {"max_tokens": 30, "temperature": temperature, "seed": index, **options}
        requests.append((prompt, SamplingParams(**params)))
    return requests


def lower_even(token_ids: list[int], logits: Any) -> Any:
    """Make even tokens less likely after an even number of tokens."""
    if len(token_ids) % 2 == 0:
        logits[::2] -= 1.5
    return logits


def repeating_requests() -> list[Request]:
    """Prompts that repeat themselves, so that n-grams are found and likely to be right."""
    rng = random.Random(0)
    requests: list[Request] = []
    for index in range(3):
        prompt = random_prompt(rng, rng.randint(2, 12)) * 3
        params = {"temperature": index / 2, "logit_bias": dict.fromkeys(prompt[:6], 12.0)}
        params |= {"seed": 100 + index, "max_tokens": 16, "ignore_eos": True}
        requests.append((prompt, SamplingParams(**params)))
    return requests


class Target(NamedTuple):
    """A model, and what its requests give one at a time, without a cache and speculation."""

    model: str
    options: dict[str, Any]
    requests: list[Request]
    expected: list[RequestOutput]
    sequences: list[Sequence]
    same_bits: bool

    def seen(self, outputs: list[RequestOutput]) -> list[Any]:
        """Return all of the outputs that must be the same: without their times, and in float32
        without log-probabilities, which differ by the rounding of other batches.
        """
        return [
            [
                dataclasses.astuple(completion)
                if self.same_bits
                else (completion.token_ids, completion.finish_reason, completion.stop_reason)
                for completion in output.outputs
            ]
            + [output.prompt_token_ids, self.same_bits and output.prompt_logprobs]
            for output in outputs
        ]


Targets = Callable[..., Target]


@pytest.fixture(scope="module")
def target_of(
    shared_checkpoint: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> Targets:
    """Return the target of a kind, under options; each is computed once."""

    @functools.cache
    def path_of(kind: str) -> str:
        if kind == "demo":
            return demo_model.MODEL
        path = shared_checkpoint(**KINDS[kind].config)
        if "states" in kind:
            path, _ = add_mtp(tmp_path_factory.mktemp("mtp"), path)
        return path

    @functools.cache
    def compute(kind: str, **base: Any) -> Target:
        requests = special_requests()
        if kind != "demo":
            requests = [*make_requests(10), *repeating_requests()]
        options = {"max_model_len": 192 if kind == "demo" else MAX_MODEL_LEN}
        options |= {"kvcache_block_size": KINDS[kind].block_size, **base}
        with pytest.MonkeyPatch.context() as patch:
            sequences = watch_sequences(patch)
            llm = LLM(path_of(kind), max_num_seqs=1, enable_prefix_caching=False, **options)
            expected = generate_all(llm, requests)
            llm.shutdown()
        same_bits = kind == "demo" or kind.startswith("bfloat16")
        return Target(path_of(kind), options, requests, expected, sequences, same_bits)

    return compute


@pytest.fixture
def check(
    shared_checkpoint: Callable[..., str],
    target_of: Targets,
    make_llm: Callable[..., LLM],
    preempted: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., tuple[int, int]]:
    """Compare what a target gives with drafts and without; return (accepted, proposed) drafts."""

    def drafts_of(kind: str, target: Target, method: str) -> dict[str, Any]:
        """Return a speculative_config."""
        if method in ("right", "wrong at random"):
            scripted = use_scripted(monkeypatch, 1.0 if method == "right" else 0.6)
            scripted.learn(target.sequences)
            return {"method": "ngram"}
        if method == "another":
            small = NATIVE if target.same_bits else {"hidden_size": 32, "num_hidden_layers": 1}
            return {
                "model": demo_model.DRAFT_MODEL if kind == "demo" else shared_checkpoint(**small)
            }
        if method == "eagle3":
            made = kind != "demo" and make_eagle3_checkpoint(tmp_path, target.model)
            return {"model": made or demo_model.EAGLE3}
        if method == "itself":
            return {"model": target.model}
        return {"method": method, **({"prompt_lookup_min": 1} if method == "ngram" else {})}

    def run(
        kind: str, method: str, way: str, base: dict[str, Any], spec: dict[str, Any] | None = None
    ) -> tuple[int, int]:
        target = target_of(kind, **base)
        allow_all(monkeypatch)
        spec = spec or drafts_of(kind, target, method)
        options = {"speculative_config": {"num_speculative_tokens": 4, **spec}, **target.options}
        if way in ("preemption", "arrivals"):
            options["num_kvcache_blocks"] = KINDS[kind].few_blocks
        preempted.clear()
        options |= WAYS[way]
        if way == "arrivals":
            engine = make_engine(Config(model=target.model, **options), queue_depth=1)
            outputs = generate_in_random_order(engine, target.requests, seed=3)
            assert target.seen(outputs) == target.seen(target.expected)
            engine.shutdown()
        else:
            llm = make_llm(target.model, **options)
            for _ in range(2):  # the second time with prefix hits
                outputs = generate_all(llm, target.requests)
                assert target.seen(outputs) == target.seen(target.expected)
            assert_idle(llm)
            engine = llm.engine
        assert preempted or way != "preemption"
        counts = engine.scheduler.drafting.counts
        return counts.num_accepted_tokens, counts.num_draft_tokens

    return run


def each_case() -> list[Any]:
    """Return the cases with their names."""
    return [
        pytest.param(
            case,
            id="-".join([*case[:3], *(f"{name}={value}" for name, value in case[3].items())]),
            marks=pytest.mark.long if case in LONG else (),
        )
        for case in (*CASES, *LONG)
    ]


@pytest.mark.parametrize("case", each_case())
def test_outputs_do_not_depend_on_speculation(
    case: tuple[str, str, str, dict[str, Any]],
    target_of: Targets,
    check: Callable[..., tuple[int, int]],
) -> None:
    kind, method, _, base = case
    if library() is None and KINDS[kind].block_size == 32:
        pytest.skip("no compiler here")
    num_accepted, num_proposed = check(*case)
    least, most = SHARES[method]
    assert num_proposed > 20
    assert least <= num_accepted / num_proposed <= most
    if method == "itself" and kind == "plain":  # KV that is missing or stale would say otherwise
        ends = [c.finish_reason for each in target_of(kind, **base).expected for c in each.outputs]
        # A draft behind an end-of-sequence token counts as rejected.
        assert num_proposed - num_accepted <= 4 * 2 * ends.count("stop")


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_network_that_is_nan_changes_nothing(
    method: str, target_of: Targets, check: Callable[..., tuple[int, int]], tmp_path: Path
) -> None:
    target, broken = target_of("plain"), tmp_path / "broken"
    if method == "eagle3":
        make_eagle3_checkpoint(broken, target.model)
        change_tensors(broken, norm__weight=torch.full((64,), torch.nan))
    else:
        copy_checkpoint(target.model, broken)
        change_tensors(broken, model__norm__weight=torch.full((64,), torch.nan))
    num_accepted, num_proposed = check("plain", method, "preemption", {}, {"model": str(broken)})
    assert num_accepted < 5
    assert num_proposed > 100


@pytest.mark.skipif(not HAS_GRAMMARS, reason="needs llguidance")
def test_tokens_that_a_grammar_forces(
    make_llm: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind accepted drafts come tokens that no step has sampled, and drafts again."""
    make_checkpoint(tmp_path, **STATEFUL, vocab_size=1024)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path(demo_model.MODEL) / name).read_bytes())
    regex = r"(attention|memory|[a-z]{3,9}) is kept in blocks( of the cache|, [a-z]+ )[a-z]{2,6}"
    params = [
        SamplingParams(temperature=1, seed=index, structured_outputs={"regex": regex})
        for index in range(8)
    ]
    requests = [(f"{index} of", each) for index, each in enumerate(params)]
    options: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "kvcache_block_size": 4}
    sequences = watch_sequences(monkeypatch)
    expected = generate_all(make_llm(tmp_path, **options), requests)
    use_scripted(monkeypatch, 0.6).learn(sequences)
    llm = make_llm(tmp_path, speculative_config={"method": "ngram"}, **options)
    assert token_ids(generate_all(llm, requests)) == token_ids(expected)
    assert llm.engine.scheduler.drafting.counts.num_accepted_tokens > 10


def test_a_draft_model_with_a_state_is_refused(
    random_model: str, shared_checkpoint: Callable[..., str], make_llm: Callable[..., LLM]
) -> None:
    draft = shared_checkpoint(**STATEFUL)
    with pytest.raises(ConfigError, match="the draft model has layers that keep a state"):
        make_llm(random_model, speculative_config={"model": draft})
