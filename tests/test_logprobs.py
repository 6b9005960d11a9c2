"""Log-probabilities and penalties, compared with those computed from transformers' logits."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.errors import InvalidRequestError
from nanovllm.outputs import Logprob, RequestOutput
from tests.helpers import VOCAB, generate_all, random_prompt

CLOSE = 1e-4
OPTIONS = {"dtype": "float32", "max_model_len": 48}

LogitsOf = Callable[[list[int]], torch.Tensor]


@pytest.fixture
def llm(random_llm: LLM) -> LLM:
    return random_llm


@pytest.fixture(scope="module")
def logits_of(random_model: str) -> LogitsOf:
    """Return the logits at each position of a list of tokens, as transformers computes them."""
    model = Qwen3ForCausalLM.from_pretrained(random_model, dtype=torch.float32).eval()

    @torch.inference_mode()
    def compute(tokens: list[int]) -> torch.Tensor:
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
        return logits.double()

    return compute


def check_entries(
    entries: dict[int, Logprob] | None, token: int, count: int, reference: torch.Tensor
) -> None:
    """Compare an output's log-probabilities of one position with transformers'.

    Args:
        token: the token at this position.
        count: how many of the most likely tokens were requested.
        reference: log-probabilities of the whole vocabulary.
    """
    assert entries is not None
    assert next(iter(entries)) == token
    assert len(entries) in (count, count + 1)
    ordered = reference.sort(descending=True).values
    for entry_token, entry in entries.items():
        assert entry.logprob == pytest.approx(reference[entry_token].item(), abs=CLOSE)
        # Two tokens that are almost equally likely may have each other's rank.
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


@pytest.mark.thinned(2)
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
    preempted: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    """In chunks, after preemptions, and the second time with a warm prefix cache.

    The logits of prompts are computed 6 rows at a time, so in several parts.
    """
    monkeypatch.setattr("nanovllm.worker.logprobs._PROMPT_ROWS", 6)
    chooser = random.Random(2)
    asked = [(0, 0, 1), (3, None, 1), (1, 4, 2), (5, 2, 1), (2, None, 2), (4, 0, 1)]
    requests = [
        (
            random_prompt(chooser, 13 + index),
            SamplingParams(
                temperature=index % 2,
                top_p=0.9,
                repetition_penalty=1.1,  # applies after the log-probabilities are taken
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
        outputs = generate_all(llm, requests)
        for output, (_, params) in zip(outputs, requests, strict=True):
            check_logprobs(output, params, logits_of)
    if "num_kvcache_blocks" in options:
        assert any(num_output_tokens > 0 for _, num_output_tokens in preempted)
    elif options.get("kvcache_block_size") == 1:
        assert outputs[1].num_cached_tokens == len(requests[1][0]) - 1


def test_logprobs_after_a_prefix_hit_equal_transformers(
    make_llm: Any, random_model: str, logits_of: LogitsOf
) -> None:
    """Prompt tokens that are in the prefix cache have log-probabilities too."""
    llm = make_llm(random_model, **OPTIONS, kvcache_block_size=4)
    prompt = random_prompt(random.Random(3), 22)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
    with_prompt = dataclasses.replace(params, prompt_logprobs=2)
    (cold,) = generate_all(llm, [(prompt, params)])
    (hit,) = generate_all(llm, [(prompt, params)])
    (whole,) = generate_all(llm, [(prompt, with_prompt)])
    assert (cold.num_cached_tokens, hit.num_cached_tokens) == (0, 20)
    for output, requested in ((cold, params), (hit, params), (whole, with_prompt)):
        check_logprobs(output, requested, logits_of)
        assert output.token_ids == cold.token_ids


@pytest.mark.parametrize("budget", [64, 5])
def test_prompt_logprobs_from_a_position_on_may_hit_what_is_before_it(
    make_llm: Any, random_model: str, budget: int
) -> None:
    """They are those of the whole prompt, also in a step with others, and in chunks."""
    llm = make_llm(random_model, **OPTIONS, kvcache_block_size=4, max_num_batched_tokens=budget)
    prompt = random_prompt(random.Random(5), 22)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=2)
    (whole,) = generate_all(llm, [(prompt, params)])
    assert whole.prompt_logprobs is not None
    starts = [0, 3, 4, 13, 19, 20, 21]
    counts = [0, 2, 1, 0, 3, 2, 2]
    requests = [
        (prompt, params.clone(prompt_logprobs=count, prompt_logprob_start=start))
        for start, count in zip(starts, counts, strict=True)
    ]
    outputs = generate_all(llm, requests)
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 4, 12, 16, 20, 20]
    for output, start, count in zip(outputs, starts, counts, strict=True):
        assert output.token_ids == whole.token_ids
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[: start + 1] == [None] * (start + 1)
        for place in range(start + 1, len(prompt)):
            found, expected = output.prompt_logprobs[place], whole.prompt_logprobs[place]
            assert found is not None
            assert expected is not None
            assert next(iter(found)) == prompt[place]
            assert count <= len(found) <= count + 1
            for token in found.keys() & expected.keys():
                assert found[token].rank == expected[token].rank
                assert found[token].logprob == pytest.approx(expected[token].logprob, abs=CLOSE)


def test_a_start_of_prompt_logprobs_after_the_prompt_is_refused(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, prompt_logprob_start=3)
    with pytest.raises(InvalidRequestError, match=r"start 3 is after the prompt, which has 3"):
        llm.generate([[1, 2, 3]], params)
    cut = params.clone(truncate_prompt_tokens=3)
    with pytest.raises(InvalidRequestError, match=r"start 3 is after the prompt, which has 3"):
        llm.generate([[1, 2, 3, 4, 5]], cut)
    (output,) = llm.generate([[1, 2, 3, 4]], params, use_tqdm=False)
    assert output.prompt_logprobs == [None] * 4
    with pytest.raises(InvalidRequestError, match="prompt_logprob_start 3 .* prompt_logprobs=0"):
        SamplingParams(prompt_logprob_start=3)


def test_logprobs_of_a_stream_join_to_those_of_generate(llm: LLM) -> None:
    prompt = random_prompt(random.Random(8), 6)
    params = SamplingParams(seed=3, max_tokens=7, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (whole,) = generate_all(llm, [(prompt, params)])
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
    """Generate greedily under penalties, with one forward pass of transformers for each token."""
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
    make_llm: Any, random_model: str, logits_of: LogitsOf, preempted: list[tuple[int, int]]
) -> None:
    """Some penalties are negative: they reward repetition, so that tokens do repeat."""
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
    outputs = generate_all(llm, requests)
    assert sum(num_output_tokens > 0 for _, num_output_tokens in preempted) > 3
    for output, (prompt, params) in zip(outputs, requests, strict=True):
        assert output.token_ids == penalised_greedy(prompt, params, logits_of)
    free = generate_all(llm, [(p, SamplingParams(0, 16, ignore_eos=True)) for p, _ in requests])
    assert sum(o.token_ids != f.token_ids for o, f in zip(outputs, free, strict=True)) > 3


def test_logprobs_of_the_whole_vocabulary_equal_transformers(
    make_llm: Any, random_model: str, logits_of: LogitsOf
) -> None:
    """-1 asks for all; max_logprobs -1 allows it."""
    llm = make_llm(random_model, **OPTIONS, max_logprobs=-1)
    prompt = random_prompt(random.Random(6), 5)
    params = SamplingParams(
        temperature=0, max_tokens=3, ignore_eos=True, logprobs=-1, prompt_logprobs=-1
    )
    (output,) = generate_all(llm, [(prompt, params)])
    check_logprobs(output, params.clone(logprobs=VOCAB, prompt_logprobs=VOCAB), logits_of)
    assert output.outputs[0].logprobs is not None
    assert output.prompt_logprobs is not None
    for entries in (*output.outputs[0].logprobs, *output.prompt_logprobs[1:]):
        assert entries is not None
        assert entries.keys() == set(range(VOCAB))
