"""A request's logits rules against transformers' processors, or formulas written out here."""

import dataclasses
import random

import pytest
import torch
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

from nanovllm.layers.logits_rules import LogitsRules
from nanovllm.options.sampling_params import RequestOutputKind, SamplingParams
from tests.closeness import assert_close

VOCAB = 211
CPU = torch.device("cpu")


def make_rules(params, num_prompt_tokens=0, bad_words=(), stop_token_ids=()):
    return LogitsRules(params, num_prompt_tokens, bad_words, frozenset(stop_token_ids), CPU)


def apply(rules, logits, tokens):
    """Return a copy of `logits` with the rules applied."""
    changed = logits.clone()
    for _ in rules.apply_each(changed, torch.tensor(tokens, dtype=torch.int64)):
        pass
    return changed


def random_logits(seed):
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


def random_history(chooser, vocab_size=30, longest=40):
    """Return a prompt and an output with many repetitions; the output may be empty."""
    prompt = [chooser.randrange(vocab_size) for _ in range(chooser.randint(1, longest))]
    return prompt, [chooser.randrange(vocab_size) for _ in range(chooser.randint(0, longest))]


@pytest.mark.parametrize("penalty", [0.3, 1.2])
@pytest.mark.parametrize("seed", range(3))
def test_repetition_penalty_is_transformers(seed, penalty):
    """Prompt and output count. Logits have both signs, and some are masked."""
    prompt, output = random_history(random.Random(seed))
    logits = random_logits(seed)
    logits[prompt[0]] = -torch.inf
    logits[prompt[-1]] = 0.0
    tokens = prompt + output
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), logits[None])[0]
    changed = apply(
        make_rules(SamplingParams(repetition_penalty=penalty), len(prompt)), logits, tokens
    )
    assert_close(changed, expected, rtol=1e-6, atol=0)
    unseen = [token for token in range(VOCAB) if token not in tokens]
    assert torch.equal(changed[unseen], logits[unseen])
    assert not torch.equal(changed, logits)


@pytest.mark.parametrize(("frequency", "presence"), [(0.7, 0.0), (0.0, 1.3), (-0.5, -2.0)])
@pytest.mark.parametrize("seed", range(2))
def test_frequency_and_presence_penalties_count_the_output_alone(seed, frequency, presence):
    prompt, output = random_history(random.Random(seed))
    logits = random_logits(seed)
    expected = [
        logit - output.count(token) * frequency - (output.count(token) > 0) * presence
        for token, logit in enumerate(logits.tolist())
    ]
    params = SamplingParams(frequency_penalty=frequency, presence_penalty=presence)
    changed = apply(make_rules(params, len(prompt)), logits, prompt + output)
    assert_close(changed, torch.tensor(expected), rtol=1e-6, atol=2e-6)
    others = [token for token in range(VOCAB) if token not in output]
    assert torch.equal(changed[others], logits[others])


def test_logit_bias_is_added():
    logits = random_logits(0)
    bias = {3: 2.5, 0: -7.0, VOCAB - 1: 100.0, 40: -1e9}
    expected = logits.clone()
    for token, value in bias.items():
        expected[token] += max(value, -100.0)
    assert torch.equal(
        apply(make_rules(SamplingParams(logit_bias=bias)), logits, [1, 2, 3]), expected
    )


def test_logit_bias_does_not_allow_forbidden_tokens():
    logits = random_logits(0)
    params = SamplingParams(logit_bias={5: 100.0, 6: 100.0}, allowed_token_ids=[6, 7])
    changed = apply(make_rules(params), logits, [1])
    assert changed[5] == -torch.inf
    assert changed[6] == logits[6] + 100


@pytest.mark.parametrize("allowed", [[9], [0, VOCAB - 1], [5, 3, 5], list(range(VOCAB))])
def test_only_allowed_tokens_are_left(allowed):
    logits = random_logits(1)
    changed = apply(make_rules(SamplingParams(allowed_token_ids=allowed)), logits, [1, 2])
    for token in range(VOCAB):
        assert changed[token] == (logits[token] if token in allowed else -torch.inf)


def test_allowed_tokens_win_if_all_of_them_are_forbidden():
    """Stop tokens (min_tokens) and bad words are forbidden only if an allowed token remains."""
    logits = random_logits(1)
    for allowed, left in (([7, 11], [7, 11]), ([5], [5]), ([5, 7, 11], [5, 7, 11]), ([7, 8], [8])):
        params = SamplingParams(
            allowed_token_ids=allowed, min_tokens=2, bad_words="given as tokens"
        )
        rules = make_rules(params, 1, bad_words=((5,),), stop_token_ids={7, 11})
        expected = torch.full_like(logits, -torch.inf)
        expected[left] = logits[left]
        assert torch.equal(apply(rules, logits, [1, 2]), expected)


@pytest.mark.parametrize("num_output_tokens", [0, 2, 3, 4])
def test_stop_tokens_wait_for_min_tokens(num_output_tokens):
    """Tokens of the prompt do not count."""
    logits = random_logits(2)
    rules = make_rules(SamplingParams(min_tokens=3), 4, stop_token_ids={7, 11, 200})
    changed = apply(rules, logits, [1] * 4 + [2] * num_output_tokens)
    expected = logits.clone()
    if num_output_tokens < 3:
        expected[[7, 11, 200]] = -torch.inf
    assert torch.equal(changed, expected)


@pytest.mark.parametrize("seed", range(12))
def test_bad_words_are_transformers(seed):
    """Outputs have few distinct tokens, so that words of one to four tokens occur."""
    chooser = random.Random(seed)
    prompt, output = random_history(chooser, vocab_size=3, longest=12)
    words = {
        tuple(chooser.randrange(3) for _ in range(length))
        for length in [1] * (seed % 2) + [2, 2, 3, 4]
    }
    logits = random_logits(seed)
    # transformers fails on an empty history, so put a token before it that is in no word.
    history = torch.tensor([[VOCAB - 1, *output]])
    processor = NoBadWordsLogitsProcessor([list(word) for word in words])
    expected = processor(history, logits[None])[0]
    rules = make_rules(SamplingParams(bad_words="given as tokens"), len(prompt), tuple(words))
    assert torch.equal(apply(rules, logits, prompt + output), expected)


def test_many_bad_words_take_few_operations():
    """As many with 1024 words as with two."""
    chooser = random.Random(0)
    words = [tuple(chooser.choices(range(VOCAB), k=1 + i % 4)) for i in range(1024)]
    counts = []
    for few in (words[:4], words):
        rules = make_rules(SamplingParams(bad_words="given as tokens"), 3, few)
        with torch.profiler.profile() as profile:
            apply(rules, random_logits(3), [7, 7, 8, 1, 2])
        counts.append(len(profile.events()))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("seed", range(4))
def test_all_rules_apply_in_vllms_order(seed):
    """Allowed tokens, bad words, min_tokens, bias, repetition, then frequency and presence."""
    prompt, output = random_history(random.Random(seed))
    tokens = prompt + output
    logits = random_logits(seed)
    allowed, stops, word = list(range(60)), {4, 8}, (6,)
    bias = {token: 9.0 * (-1) ** token for token in range(0, 40, 3)}
    params = SamplingParams(
        allowed_token_ids=allowed,
        bad_words="given as tokens",
        min_tokens=20,
        logit_bias=bias,
        repetition_penalty=1.7,
        frequency_penalty=0.6,
        presence_penalty=0.25,
    )
    expected = []
    for token, logit in enumerate(logits.tolist()):
        if token not in allowed or token in word or (token in stops and len(output) < 20):
            logit = -float("inf")
        logit += bias.get(token, 0.0)
        if token in tokens:
            logit = logit / 1.7 if logit > 0 else logit * 1.7
        logit -= 0.6 * output.count(token) + 0.25 * (token in output)
        expected.append(logit)
    changed = apply(make_rules(params, len(prompt), (word,), stops), logits, tokens)
    assert_close(changed, torch.tensor(expected), rtol=1e-6, atol=1e-5)


def test_rules_are_needed_where_a_parameter_says_so():
    """`needed` is true for every parameter that the rules read, and for no other."""
    of_rules = {
        "allowed_token_ids": (1,),
        "bad_words": ("a",),
        "min_tokens": 1,
        "logit_bias": {1: 1.0},
        "presence_penalty": -0.1,
        "frequency_penalty": 0.1,
        "repetition_penalty": 0.9,
        "logits_processors": (lambda token_ids, logits: logits,),
        "extra_args": {"no_digits": True},
    }
    of_others = {
        "temperature": 0.5,
        "max_tokens": 3,
        "ignore_eos": True,
        "seed": 1,
        "n": 2,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.1,
        "stop": ("a",),
        "stop_token_ids": (1,),
        "include_stop_str_in_output": True,
        "structured_outputs": {"choice": ["yes", "no"]},  # a mask of the whole step
        "logprobs": 1,
        "prompt_logprobs": 1,
        "prompt_logprob_start": 0,
        "truncate_prompt_tokens": 5,
        "detokenize": False,
        "skip_special_tokens": False,
        "kept_token_ids": (1,),
        "marks_kept_tokens": True,
        "spaces_between_special_tokens": False,
        "output_kind": RequestOutputKind.CUMULATIVE,
    }
    assert {f.name for f in dataclasses.fields(SamplingParams)} == of_rules.keys() | of_others
    assert not SamplingParams().has_rules
    for name, value in of_rules.items():
        assert SamplingParams(**{name: value}).has_rules, name
    for name, value in of_others.items():
        assert not SamplingParams(**{name: value}).has_rules, name
