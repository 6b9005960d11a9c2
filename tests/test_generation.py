"""What a request gets: log-probabilities as transformers computes them, rules and filters that do
not depend on how the work is cut up, ends and times as documented.

float32, so that the sums of different batch shapes cannot tip a choice.
"""

import dataclasses
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.config import Config
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import InvalidRequestError
from nanovllm.llm import default_sampling_params
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput
from nanovllm.scheduler.scheduler import Scheduler
from tests.checkpoints import copy_checkpoint

VOCAB = 1003
EOS = (7, 11)
CLOSE = 1e-4
OPTIONS = {"dtype": "float32", "max_model_len": 48}

Requests = list[tuple[list[int], SamplingParams]]
Preempted = list[tuple[int, int]]
LogitsOf = Callable[[list[int]], torch.Tensor]


def random_prompt(chooser: random.Random, length: int) -> list[int]:
    return [chooser.randrange(VOCAB) for _ in range(length)]


def make_requests() -> Requests:
    """40 requests; prompts of 1 to 24 tokens that often begin alike; what they ask for crosses
    filters, rules, ends, n and log-probabilities.
    """
    chooser = random.Random(5)
    shared = random_prompt(chooser, 20)
    asked: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "top_k": 20},
        {"top_p": 0.7},
        {"temperature": 1.5, "min_p": 0.1},
        {"top_k": 30, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 0, "repetition_penalty": 1.4, "logit_bias": {7: 3.0, 11: 3.0}},
        {"frequency_penalty": 0.9, "presence_penalty": 0.6, "top_k": 50},
        {"logit_bias": {7: 6.0, 50: 8.0, 60: -100.0}, "temperature": 2.0},
        {"allowed_token_ids": list(range(0, VOCAB, 40)), "top_p": 0.95, "frequency_penalty": -0.5},
        {"min_tokens": 4, "stop_token_ids": list(range(0, VOCAB, 3)), "temperature": 1.2},
    ]
    requests = []
    for index in range(40):
        start = shared[: chooser.choice([0, 4, 16, 20])]
        prompt = start + random_prompt(chooser, chooser.randint(1, 24 - len(start)))
        if index % 8 == 7:
            prompt = list(requests[-1][0])
        options = {"max_tokens": chooser.randint(4, 10), **asked[index % 10]}
        if index % 4 == 1:
            options.setdefault("stop_token_ids", chooser.sample(range(VOCAB), 150))
        params = SamplingParams(
            seed=1000 * index,
            n=(1, 2, 1, 3, 1)[index % 5] if index < 30 else 1 + index % 3,
            logprobs=(None, 2, None, 0)[index % 4],
            prompt_logprobs=3 if index % 6 == 5 else None,
            ignore_eos=index % 7 == 3,
            **options,
        )
        requests.append((prompt, params))
    return requests


REQUESTS = make_requests()


def choices(outputs: list[RequestOutput]) -> list[Any]:
    """Return the tokens and the ends of all continuations."""
    return [
        [(c.index, c.token_ids, c.finish_reason, c.stop_reason) for c in output.outputs]
        for output in outputs
    ]


def numbers(outputs: list[RequestOutput]) -> list[float]:
    """Return all log-probabilities and cumulative ones, in order."""
    found: list[float] = []
    for output in outputs:
        for entries in (output.prompt_logprobs or [])[1:]:
            assert entries is not None
            found += [entry.logprob for entry in entries.values()]
        for completion in output.outputs:
            for entries in completion.logprobs or ():
                found += [entry.logprob for entry in entries.values()]
            if completion.cumulative_logprob is not None:
                found.append(completion.cumulative_logprob)
    return found


def assert_same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    assert choices(found) == choices(expected)
    assert numbers(found) == pytest.approx(numbers(expected), abs=CLOSE, rel=0)


def generate(llm: LLM, requests: Requests) -> list[RequestOutput]:
    prompts, params = zip(*requests, strict=True)
    return llm.generate(list(prompts), list(params), use_tqdm=False)


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> Preempted:
    """(sequence, output tokens so far) of each preemption."""
    found: Preempted = []
    preempt = Scheduler._preempt

    def note(self: Scheduler, seq: Any) -> None:
        found.append((seq.seq_id, seq.num_output_tokens))
        preempt(self, seq)

    monkeypatch.setattr(Scheduler, "_preempt", note)
    return found


@pytest.fixture(scope="module")
def logits_of(random_model: str) -> LogitsOf:
    """Logits of the token after each of some tokens, as transformers computes them."""
    model = Qwen3ForCausalLM.from_pretrained(random_model, dtype=torch.float32).eval()

    @torch.inference_mode()
    def compute(tokens: list[int]) -> torch.Tensor:
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
        return logits.double()

    return compute


@pytest.fixture(scope="module")
def llm(random_model: str) -> Iterator[LLM]:
    made = LLM(random_model, **OPTIONS, kvcache_block_size=4)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def expected(random_model: str) -> list[RequestOutput]:
    """One request at a time, whole prompts, no cache."""
    alone = LLM(random_model, max_num_seqs=1, enable_prefix_caching=False, **OPTIONS)
    outputs = [output for request in REQUESTS for output in generate(alone, [request])]
    alone.shutdown()
    return outputs


def test_the_workload_ends_in_every_way(expected: list[RequestOutput]) -> None:
    """What the tests below compare is worth comparing."""
    completions = [c for output in expected for c in output.outputs]
    ends = {(c.finish_reason, type(c.stop_reason)) for c in completions}
    assert ends == {("stop", int), ("stop", type(None)), ("length", type(None))}
    assert {len(output.outputs) for output in expected} == {1, 2, 3}
    assert len({tuple(c.token_ids) for c in completions}) > 0.8 * len(completions)
    assert len(numbers(expected)) > 500
    for (_, params), output in zip(REQUESTS, expected, strict=True):
        for completion in output.outputs:
            tokens = completion.token_ids
            if params.allowed_token_ids is not None:
                assert set(tokens) <= set(params.allowed_token_ids)
            if completion.finish_reason == "stop":
                assert len(tokens) > params.min_tokens


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 2},
        {"max_num_seqs": 64},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 7},
        {"kvcache_block_size": 1},
        {"kvcache_block_size": 4},
        {"kvcache_block_size": 16},
        {"kvcache_block_size": 1, "enable_prefix_caching": False},
        {"kvcache_block_size": 4, "enable_prefix_caching": False},
        {"kvcache_block_size": 16, "enable_prefix_caching": False},
        {"tensor_parallel_size": 2, "max_num_batched_tokens": 40, "kvcache_block_size": 4},
    ],
    ids=str,
)
def test_outputs_do_not_depend_on_how_the_work_is_cut(
    make_llm: Any, random_model: str, expected: list[RequestOutput], options: dict[str, Any]
) -> None:
    assert_same(generate(make_llm(random_model, **OPTIONS, **options), REQUESTS), expected)


@pytest.mark.parametrize("max_num_batched_tokens", [16384, 5])
def test_outputs_do_not_depend_on_a_warm_cache(
    make_llm: Any, random_model: str, expected: list[RequestOutput], max_num_batched_tokens: int
) -> None:
    llm = make_llm(
        random_model,
        **OPTIONS,
        kvcache_block_size=4,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    generate(llm, REQUESTS)
    outputs = generate(llm, REQUESTS)
    assert sum(output.num_cached_tokens for output in outputs) > 200
    assert_same(outputs, expected)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_outputs_do_not_depend_on_preemption(
    make_llm: Any,
    random_model: str,
    expected: list[RequestOutput],
    preempted: Preempted,
    enable_prefix_caching: bool,
) -> None:
    llm = make_llm(
        random_model,
        **OPTIONS,
        kvcache_block_size=4,
        num_kvcache_blocks=12,  # one sequence of max_model_len
        enable_prefix_caching=enable_prefix_caching,
    )
    assert_same(generate(llm, REQUESTS), expected)
    assert len(preempted) > 10
    assert any(num_output_tokens > 0 for _, num_output_tokens in preempted)


@pytest.mark.parametrize(("seed", "queue_depth"), [(0, 0), (1, 1), (2, 3)])
def test_outputs_do_not_depend_on_arrival_and_priority(
    random_model: str,
    expected: list[RequestOutput],
    preempted: Preempted,
    seed: int,
    queue_depth: int,
) -> None:
    """Requests arrive in any order while others run, in a pool that preempts."""
    chooser = random.Random(seed)
    config = Config(
        model=random_model,
        max_num_seqs=6,
        max_num_batched_tokens=20,
        kvcache_block_size=4,
        num_kvcache_blocks=16,
        **OPTIONS,
    )
    engine = LLMEngine(config, queue_depth=queue_depth)
    waiting = chooser.sample(range(len(REQUESTS)), len(REQUESTS))
    index_of: dict[int, int] = {}
    found: dict[int, RequestOutput] = {}
    while waiting or not engine.is_finished():
        for _ in range(min(len(waiting), chooser.choice([0, 0, 1, 5]))):
            index = waiting.pop()
            prompt, params = REQUESTS[index]
            request = engine.add_request(prompt, params, priority=chooser.randint(-1, 1))
            index_of[request] = index
        for output in engine.step():
            found[index_of[output.request_id]] = output
        engine.scheduler.check()
    engine.shutdown()
    assert preempted
    assert_same([found[index] for index in range(len(REQUESTS))], expected)


def check_entries(
    entries: dict[int, Logprob] | None, token: int, count: int, reference: torch.Tensor
) -> None:
    """Compare what is said of one position with all log-probabilities there."""
    assert entries is not None
    assert next(iter(entries)) == token
    assert len(entries) in (count, count + 1)
    ordered = reference.sort(descending=True).values
    for entry_token, entry in entries.items():
        assert entry.logprob == pytest.approx(reference[entry_token].item(), abs=CLOSE)
        # The token of this rank: one that is as likely, where two are almost alike.
        assert entry.logprob == pytest.approx(ordered[entry.rank - 1].item(), abs=CLOSE)
    ranks = [entry.rank for entry in entries.values()]
    own, others = ranks[0], ranks[1:]
    assert others == [rank for rank in range(1, count + 1) if rank != own]


def check_logprobs(output: RequestOutput, params: SamplingParams, logits_of: LogitsOf) -> None:
    prompt = output.prompt_token_ids
    for completion in output.outputs:
        tokens = prompt + completion.token_ids
        reference = logits_of(tokens).log_softmax(-1)
        assert params.logprobs is not None
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids) == params.max_tokens
        total = 0.0
        for place, entries in enumerate(completion.logprobs, len(prompt)):
            check_entries(entries, tokens[place], params.logprobs, reference[place - 1])
            total += entries[tokens[place]].logprob
        assert completion.cumulative_logprob == pytest.approx(total, abs=1e-6)
    if params.prompt_logprobs is None:
        assert output.prompt_logprobs is None
        return
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[0] is None
    reference = logits_of(prompt).log_softmax(-1)
    for place, entries in enumerate(output.prompt_logprobs[1:], 1):
        check_entries(entries, prompt[place], params.prompt_logprobs, reference[place - 1])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 1, "kvcache_block_size": 1},
        {"kvcache_block_size": 4, "num_kvcache_blocks": 12},
        {"kvcache_block_size": 4, "num_kvcache_blocks": 12, "max_num_batched_tokens": 9},
    ],
    ids=str,
)
def test_logprobs_equal_transformers(
    make_llm: Any,
    random_model: str,
    logits_of: LogitsOf,
    preempted: Preempted,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    """In chunks, after preemptions, and (the second time) with a warm cache; the prompt's logits
    in several parts.
    """
    monkeypatch.setattr("nanovllm.worker.model_runner._LOGPROB_ROWS", 6)
    chooser = random.Random(2)
    asked = [(0, 0, 1), (3, None, 1), (1, 4, 2), (5, 2, 1), (2, None, 2), (4, 0, 1)]
    requests = [
        (
            random_prompt(chooser, 13 + index),
            SamplingParams(
                temperature=index % 2,
                top_p=0.9,
                repetition_penalty=1.1,  # log-probabilities are taken before it
                seed=index,
                max_tokens=10,
                ignore_eos=True,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                n=n,
            ),
        )
        for index, (logprobs, prompt_logprobs, n) in enumerate(asked)
    ]
    llm = make_llm(random_model, **OPTIONS, **options)
    for _ in range(2):
        outputs = generate(llm, requests)
        for output, (_, params) in zip(outputs, requests, strict=True):
            check_logprobs(output, params, logits_of)
    if "num_kvcache_blocks" in options:
        assert any(num_output_tokens > 0 for _, num_output_tokens in preempted)
    elif options.get("kvcache_block_size") == 1:
        assert outputs[1].num_cached_tokens == len(requests[1][0]) - 1


def test_logprobs_after_a_prefix_hit_equal_transformers(
    make_llm: Any, random_model: str, logits_of: LogitsOf
) -> None:
    """Prompt tokens from the cache have log-probabilities like the others."""
    llm = make_llm(random_model, **OPTIONS, kvcache_block_size=4)
    prompt = random_prompt(random.Random(3), 22)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
    asking = SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=2
    )
    (cold,) = generate(llm, [(prompt, params)])
    (hit,) = generate(llm, [(prompt, params)])
    (asked,) = generate(llm, [(prompt, asking)])
    assert (cold.num_cached_tokens, hit.num_cached_tokens) == (0, 20)
    for output, wanted in ((cold, params), (hit, params), (asked, asking)):
        check_logprobs(output, wanted, logits_of)
        assert output.token_ids == cold.token_ids


def test_logprobs_of_a_stream_join_to_those_of_generate(llm: LLM) -> None:
    prompt = random_prompt(random.Random(8), 6)
    params = SamplingParams(seed=3, max_tokens=7, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (whole,) = generate(llm, [(prompt, params)])
    pieces = list(llm.stream(prompt, params))
    completions = [piece.outputs[0] for piece in pieces]
    assert [c.finish_reason for c in completions] == [None] * 6 + ["length"]
    assert [entries for c in completions for entries in c.logprobs or ()] == whole.outputs[
        0
    ].logprobs
    assert completions[-1].cumulative_logprob == whole.outputs[0].cumulative_logprob
    assert pieces[0].prompt_logprobs == whole.prompt_logprobs
    assert {piece.prompt_logprobs is None for piece in pieces[1:]} == {True}


def penalised_greedy(prompt: list[int], params: SamplingParams, logits_of: LogitsOf) -> list[int]:
    """Generate with a whole forward pass of transformers for each token."""
    output: list[int] = []
    while len(output) < params.max_tokens:
        logits = logits_of(prompt + output)[-1].tolist()
        for token in {*prompt, *output}:
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token in set(output):
            logits[token] -= params.frequency_penalty * output.count(token)
            logits[token] -= params.presence_penalty
        output.append(max(range(VOCAB), key=logits.__getitem__))
    return output


def test_penalties_count_tokens_generated_before_a_preemption(
    make_llm: Any, random_model: str, logits_of: LogitsOf, preempted: Preempted
) -> None:
    """Tokens of few kinds, so that they repeat; penalties that reward repetition among them."""
    chooser = random.Random(4)
    requests = []
    for index in range(6):
        params = SamplingParams(
            temperature=0,
            max_tokens=16,
            ignore_eos=True,
            repetition_penalty=(1.0, 1.4, 0.8)[index % 3],
            frequency_penalty=(0.9, 0.0, 1.5)[index // 2],
            presence_penalty=(0.0, 1.2, -1.0, 0.3)[index % 4],
        )
        requests.append((random_prompt(chooser, 6 + index), params))
    llm = make_llm(random_model, **OPTIONS, kvcache_block_size=4, num_kvcache_blocks=12)
    outputs = generate(llm, requests)
    assert sum(num_output_tokens > 0 for _, num_output_tokens in preempted) > 3
    for output, (prompt, params) in zip(outputs, requests, strict=True):
        assert output.token_ids == penalised_greedy(prompt, params, logits_of)
    free = generate(llm, [(p, SamplingParams(0, 16, ignore_eos=True)) for p, _ in requests])
    assert sum(o.token_ids != f.token_ids for o, f in zip(outputs, free, strict=True)) > 3


@pytest.mark.parametrize("prompt_logprobs", [None, 1])
@pytest.mark.parametrize(("enable_prefix_caching", "most_blocks"), [(True, 8 + 4), (False, 4 * 9)])
def test_continuations_share_the_blocks_of_the_prompt(
    random_model: str, enable_prefix_caching: bool, most_blocks: int, prompt_logprobs: int | None
) -> None:
    """Eight full blocks of prompt, and one of each continuation's own."""
    config = Config(
        model=random_model,
        kvcache_block_size=4,
        enable_prefix_caching=enable_prefix_caching,
        **OPTIONS,
    )
    engine = LLMEngine(config)
    prompt = random_prompt(random.Random(6), 33)
    params = SamplingParams(
        n=4, seed=1, max_tokens=3, ignore_eos=True, prompt_logprobs=prompt_logprobs
    )
    engine.add_request(prompt, params)
    manager = engine.scheduler.block_manager
    used = []
    outputs: list[RequestOutput] = []
    while not engine.is_finished():
        outputs += engine.step()
        used.append(engine.cache_info.num_blocks - manager.num_free_blocks)
        engine.scheduler.check()
    engine.shutdown()
    assert max(used) == most_blocks
    assert used[-1] == 0
    assert [c.index for c in outputs[0].outputs] == [0, 1, 2, 3]
    assert engine.stats.num_decode_tokens == 12


@pytest.mark.parametrize("seed", [100, 2**63 - 2])
def test_each_continuation_has_the_next_seed(llm: LLM, seed: int) -> None:
    prompt = random_prompt(random.Random(6), 9)
    options: dict[str, Any] = {"max_tokens": 8, "top_p": 0.95, "presence_penalty": 0.5}
    (output,) = generate(llm, [(prompt, SamplingParams(n=4, seed=seed, **options))])
    seeds = [(seed + index) % 2**63 for index in range(4)]
    alone = generate(llm, [(prompt, SamplingParams(seed=s, **options)) for s in seeds])
    assert [c.token_ids for c in output.outputs] == [o.token_ids for o in alone]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 4


def test_continuations_without_a_seed_differ(llm: LLM) -> None:
    (output,) = generate(llm, [([1, 2], SamplingParams(n=5, max_tokens=8, ignore_eos=True))])
    assert len({tuple(c.token_ids) for c in output.outputs}) == 5


def forced(llm: LLM, token: int, prompt_length: int = 3, **options: Any) -> CompletionOutput:
    """Generate where `token` comes whenever it may."""
    params = SamplingParams(logit_bias={token: 100.0}, temperature=0, **options)
    (output,) = generate(llm, [(random_prompt(random.Random(1), prompt_length), params)])
    return output.outputs[0]


def end(completion: CompletionOutput) -> tuple[int, str | None, int | str | None]:
    return len(completion.token_ids), completion.finish_reason, completion.stop_reason


@pytest.mark.parametrize("max_tokens", [1, 2, 13])
def test_max_tokens_ends_the_output(llm: LLM, max_tokens: int) -> None:
    assert end(forced(llm, 50, max_tokens=max_tokens)) == (max_tokens, "length", None)


def test_max_model_len_ends_the_output_before_max_tokens(llm: LLM) -> None:
    assert end(forced(llm, 50, prompt_length=40, max_tokens=1000)) == (8, "length", None)
    assert end(forced(llm, 50, prompt_length=47, max_tokens=1000)) == (1, "length", None)


@pytest.mark.parametrize("eos", EOS)
def test_eos_is_in_the_tokens_and_is_no_stop_reason(llm: LLM, eos: int) -> None:
    completion = forced(llm, eos)
    assert completion.token_ids == [eos]
    assert end(completion) == (1, "stop", None)
    assert end(forced(llm, eos, stop_token_ids=[eos])) == (1, "stop", None)


@pytest.mark.parametrize("eos", EOS)
def test_ignore_eos_continues_past_eos(llm: LLM, eos: int) -> None:
    completion = forced(llm, eos, max_tokens=9, ignore_eos=True)
    assert completion.token_ids == [eos] * 9
    assert end(completion) == (9, "length", None)


@pytest.mark.parametrize("eos", EOS)
def test_ignored_eos_may_still_be_a_stop_token(llm: LLM, eos: int) -> None:
    completion = forced(llm, eos, stop_token_ids=[eos], ignore_eos=True)
    assert completion.token_ids == [eos]
    assert end(completion) == (1, "stop", eos)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_token_is_in_the_tokens_and_is_the_stop_reason(llm: LLM, ignore_eos: bool) -> None:
    completion = forced(llm, 50, stop_token_ids=[49, 50], ignore_eos=ignore_eos)
    assert completion.token_ids == [50]
    assert end(completion) == (1, "stop", 50)


def test_stop_token_as_the_last_allowed_token_is_a_stop(llm: LLM) -> None:
    assert end(forced(llm, 50, max_tokens=1, stop_token_ids=[50])) == (1, "stop", 50)
    assert end(forced(llm, 7, max_tokens=1)) == (1, "stop", None)
    assert end(forced(llm, 7, prompt_length=47)) == (1, "stop", None)


@pytest.mark.parametrize("min_tokens", [1, 2, 6])
@pytest.mark.parametrize(("token", "stop_reason"), [(7, None), (50, 50)])
def test_min_tokens_forbids_early_stop_tokens(
    llm: LLM, token: int, stop_reason: int | None, min_tokens: int
) -> None:
    completion = forced(llm, token, min_tokens=min_tokens, stop_token_ids=[50])
    assert not {*EOS, 50} & {*completion.token_ids[:-1]}
    assert completion.token_ids[-1] == token
    assert end(completion) == (min_tokens + 1, "stop", stop_reason)


def test_min_tokens_may_equal_max_tokens(llm: LLM) -> None:
    completion = forced(llm, 7, min_tokens=5, max_tokens=5)
    assert end(completion) == (5, "length", None)
    assert not {*EOS} & {*completion.token_ids}


def test_min_tokens_with_ignore_eos_allows_eos(llm: LLM) -> None:
    completion = forced(llm, 7, min_tokens=5, max_tokens=6, ignore_eos=True)
    assert completion.token_ids == [7] * 6


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"top_k": 5}, {"temperature": 0}], ids=str)
def test_contradictory_request_ends_and_affects_no_other(
    make_llm: Any, random_model: str, filters: dict[str, Any]
) -> None:
    llm = make_llm(random_model, **OPTIONS)
    sound = ([4, 5, 6], SamplingParams(top_p=0.9, seed=1, max_tokens=6, ignore_eos=True))
    contradictory = SamplingParams(allowed_token_ids=[7], min_tokens=2, max_tokens=4, **filters)
    (alone,) = generate(llm, [sound])
    output, beside = generate(llm, [([1, 2], contradictory), sound])
    assert beside.token_ids == alone.token_ids
    assert output.token_ids == [7, 7]
    assert end(output.outputs[0]) == (2, "stop", None)


def test_bad_words_are_left_out(make_llm: Any) -> None:
    """A word of several tokens that has as many after a space."""
    llm = make_llm(demo_model.MODEL)
    encode = llm.get_tokenizer().encode
    question, answer = next(
        (question, answer)
        for question, answer in demo_model.entries()
        if len(encode(f" {answer.split()[1]}")) == len(encode(answer.split()[1])) > 1
    )
    word = answer.split()[1]
    texts = []
    for bad_words in ([], [word]):
        params = SamplingParams(temperature=0, max_tokens=60, bad_words=bad_words)
        texts.append(llm.generate(question, params, use_tqdm=False)[0].text)
    assert f" {word}" in texts[0]
    assert f" {word}" not in texts[1]


def test_bad_words_may_be_white_space(make_llm: Any) -> None:
    """Symptom: such a word is dropped, and nothing is said."""
    llm = make_llm(demo_model.MODEL)
    question = demo_model.entries()[0][0]
    decode = llm.get_tokenizer().decode
    for word in (" ", "\n"):
        tokens, *_ = llm.engine.output_processor.encode_bad_words([word])
        assert decode(tokens) == word
    (forbidden,) = llm.get_tokenizer().encode("\n")
    only = SamplingParams(allowed_token_ids=[forbidden, forbidden + 1], max_tokens=9, seed=1)
    barred = dataclasses.replace(only, bad_words=["\n"])
    free, without = (llm.generate(question, p, use_tqdm=False)[0].token_ids for p in (only, barred))
    assert forbidden in free
    assert forbidden not in without
    with pytest.raises(InvalidRequestError, match="bad_words is not valid Unicode"):
        llm.engine.make_request(question, SamplingParams(bad_words=["\ud800"]))


def test_times_are_in_order(make_llm: Any, random_model: str) -> None:
    """The second request waits for the first."""
    llm = make_llm(random_model, **OPTIONS, max_num_seqs=1)
    before = time.monotonic()
    outputs = generate(llm, [([1, 2, 3], SamplingParams(0, 5, ignore_eos=True, n=2))] * 2)
    after = time.monotonic()
    for output in outputs:
        metrics = output.metrics
        times = [
            before,
            metrics.arrival_time,
            metrics.first_scheduled_time,
            metrics.first_token_time,
            metrics.last_token_time,
            after,
        ]
        assert times == sorted(times, key=float)
        assert metrics.num_output_tokens == 10
        assert metrics.queue_time == metrics.first_scheduled_time - metrics.arrival_time >= 0
        assert metrics.time_to_first_token == metrics.first_token_time - metrics.arrival_time > 0
        spent = metrics.last_token_time - metrics.first_token_time
        assert metrics.time_per_output_token == spent / 9 > 0
    first, second = (output.metrics for output in outputs)
    assert second.first_scheduled_time >= first.first_token_time
    assert second.queue_time > first.queue_time


def test_one_token_has_no_time_per_output_token(llm: LLM) -> None:
    (output,) = generate(llm, [([1], SamplingParams(max_tokens=1))])
    assert output.metrics.time_per_output_token is None
    assert output.metrics.first_token_time == output.metrics.last_token_time


def test_queue_time_excludes_the_first_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is scheduled when its step is launched, not when that is done."""
    executor = llm.engine.executor
    execute = executor.execute

    def slow(schedule: Any) -> Any:
        time.sleep(0.2)
        return execute(schedule)

    monkeypatch.setattr(executor, "execute", slow)
    (output,) = generate(llm, [([1], SamplingParams(max_tokens=1))])
    assert output.metrics.time_to_first_token >= 0.2
    assert output.metrics.queue_time < 0.2


def test_default_sampling_params_of_a_checkpoint(
    make_llm: Any, random_model: str, tmp_path: Path
) -> None:
    """A checkpoint that recommends nothing gives the defaults."""
    assert make_llm(random_model).get_default_sampling_params() == SamplingParams()
    recommended = {
        "do_sample": True,
        "eos_token_id": [7, 11],
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "transformers_version": "4.51.0",
    }
    llm = make_llm(copy_checkpoint(random_model, tmp_path, generation_config=recommended))
    found = llm.get_default_sampling_params()
    assert found == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    (output,) = llm.generate([1, 2], found, use_tqdm=False)
    assert output.finished


@pytest.mark.parametrize(
    ("recommended", "expected"),
    [
        ({}, {}),
        ({"temperature": None, "top_k": None, "max_new_tokens": None}, {}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, {"temperature": 0, "top_p": 0.9}),
        ({"temperature": 0.0}, {"temperature": 0}),
        ({"top_k": 0, "min_p": 0.0}, {}),
        (
            {"min_p": 0.1, "repetition_penalty": 1.2, "max_new_tokens": 300},
            {"min_p": 0.1, "repetition_penalty": 1.2, "max_tokens": 300},
        ),
        ({"num_beams": 4, "bos_token_id": 1, "max_length": 20}, {}),
    ],
    ids=str,
)
def test_default_sampling_params_by_generation_config(
    recommended: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert default_sampling_params(recommended) == SamplingParams(**expected)
