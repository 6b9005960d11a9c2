"""Log-probabilities: of the tokens that rows sample, for the rows whose request wants them."""

import itertools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from nanovllm.options.sampling_params import SamplingParams
from nanovllm.platform.cpu import CPU
from nanovllm.worker.logprobs import (
    GatheredLogprobs,
    Logprobs,
    _largest_by_key,
    _largest_by_row,
    gather_logprobs,
    sampled_logprobs,
)
from nanovllm.worker.step_output import PendingResult, StepOutput
from nanovllm.worker.step_sampler import StepSampler
from tests.worker.test_acceptance import row
from tests.worker.test_step_sampler import DTYPES, KINDS, VOCAB, make_rows, random_logits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 5, VOCAB, VOCAB + 3])
def test_logprobs_are_the_log_softmax(dtype, count):
    logits = random_logits(20, dtype)
    tokens = torch.randint(VOCAB, (20,), generator=torch.Generator().manual_seed(1))
    tokens[:10] = logits[:10].argmax(-1)
    expected = logits.double().log_softmax(-1)
    found = gather_logprobs(logits, tokens, count)
    width = 1 + min(count, VOCAB)
    assert found.token_ids.shape == found.logprobs.shape == (20, width)
    assert torch.equal(found.token_ids[:, 0], tokens)
    assert found.logprobs.dtype == torch.float32
    torch.testing.assert_close(
        found.logprobs.double(), expected.gather(1, found.token_ids), rtol=0, atol=1e-5
    )
    assert (found.logprobs[:, 1:].diff(dim=-1) <= 0).all()
    top = expected.topk(width - 1).values
    torch.testing.assert_close(found.logprobs[:, 1:].double(), top, rtol=0, atol=1e-5)
    assert all(len(set(row)) == width - 1 for row in found.token_ids[:, 1:].tolist())


@pytest.mark.parametrize("largest", [_largest_by_row, _largest_by_key])
def test_of_equal_numbers_the_lowest_ids_come_first(largest):
    """On a CPU and on a GPU."""
    numbers = torch.randint(-3, 3, (8, VOCAB), generator=torch.Generator().manual_seed(2)) / 7.0
    numbers[:, :5] = torch.tensor([-0.0, 0.0, -torch.inf, 1e-40, -1e-40])
    expected = numbers.sort(dim=-1, descending=True, stable=True).indices
    for count in (1, 2, 7, VOCAB // 2, VOCAB):
        assert torch.equal(largest(numbers, count), expected[:, :count])


def test_of_equal_logits_the_lowest_token_ids_come_first():
    """So a request's most likely tokens do not depend on how many another one wants."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randint(0, 6, (8, VOCAB), generator=generator).bfloat16()
    tokens = torch.zeros(8, dtype=torch.long)
    expected = logits.float().sort(dim=-1, descending=True, stable=True).indices
    for count in (1, 2, 7, VOCAB // 2, VOCAB):
        found = gather_logprobs(logits, tokens, count).token_ids[:, 1:]
        assert torch.equal(found, expected[:, :count])


def test_a_rank_is_one_more_than_the_number_of_likelier_tokens():
    logits = random_logits(50, torch.bfloat16)  # many ties, which share the same rank
    tokens = torch.randint(VOCAB, (50,), generator=torch.Generator().manual_seed(1))
    tokens[:5] = logits[:5].argmax(-1)
    tokens[5:10] = logits[5:10].argmin(-1)
    ranks = gather_logprobs(logits, tokens, 0).ranks.tolist()
    for rank, token, values in zip(ranks, tokens.tolist(), logits.tolist(), strict=True):
        assert rank == 1 + sum(logit > values[token] for logit in values)
    assert ranks[:5] == [1] * 5


def test_logprobs_for_the_rows_that_ask():
    params = list(KINDS.values())
    logits = random_logits(len(params))
    tables, rows = make_rows(params)
    sampling = StepSampler(tables, rows)
    tokens = sampling.sample(logits)
    asking = [index for index, p in enumerate(params) if p.logprobs is not None]
    (found,) = sampled_logprobs(tables, sampling, logits, tokens)
    seq_ids, counts, gathered, _ = found
    assert seq_ids == [rows[index].seq_id for index in asking]
    assert counts == [3, 0]
    logprobs = logits.double().log_softmax(-1)
    for index, value in zip(asking, gathered.tolist(counts), strict=True):
        expected = [logprobs[index, token].item() for token in value.token_ids]
        assert value.token_ids[0] == tokens[index]
        assert value.logprobs == pytest.approx(expected, abs=1e-5)
    assert tokens[asking[1]] == 7
    assert gathered.ranks[1] > 1  # by the logits without the bias that made it the most likely


def test_pieces_of_rows_give_the_same_logprobs(monkeypatch):
    logits = random_logits(20, torch.bfloat16)
    tokens, rows = torch.arange(20), torch.tensor([3, 1, 19, 4, 5, 9, 0])
    whole = gather_logprobs(logits, tokens, 4)
    monkeypatch.setattr("nanovllm.worker.logprobs._PIECE", 3 * VOCAB)
    found = gather_logprobs(logits, tokens, 4)
    chosen = gather_logprobs(logits, tokens[rows], 4, rows)
    for name in ("token_ids", "logprobs", "ranks"):
        expected = getattr(whole, name)
        assert torch.equal(getattr(found, name), expected)
        assert torch.equal(getattr(chosen, name), expected[rows])


def peak_bytes(function):
    """Return the most bytes that torch allocates at a time during `function`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))


def test_logprobs_of_many_rows_take_little_memory(monkeypatch):
    """Symptom: 20 bytes for each logit of all rows, which the warm-up of a GPU does not see."""
    vocab_size = 2**15
    piece = 2**20  # logits at a time, of twice as many
    monkeypatch.setattr("nanovllm.worker.logprobs._PIECE", piece)
    params = [SamplingParams(temperature=0, logprobs=5)] * 64
    tables, rows = make_rows(params, vocab_size=vocab_size)
    sampling = StepSampler(tables, rows)
    logits = torch.zeros(64, vocab_size, dtype=torch.bfloat16)
    tokens = torch.zeros(64, dtype=torch.int64)
    peak = peak_bytes(lambda: sampled_logprobs(tables, sampling, logits, tokens))
    assert 8 * piece < peak < 12 * piece  # float32 twice, and less than bfloat16 and a mask


def gathered(tokens: list[int]) -> GatheredLogprobs:
    """Return log-probabilities: minus the token, and token 1 as the most likely one."""
    ids = torch.tensor([[token, 1] for token in tokens])
    return GatheredLogprobs(ids, -ids.float(), torch.full((len(tokens),), 2))


def test_logprobs_are_those_of_all_samples_in_order() -> None:
    """The scheduler takes as many as there are tokens."""
    sampled = [5, 6, 7, 8]
    logprobs = Logprobs([0, 0, 0], [1, 1, 1], gathered([5, 6, 7]))
    output = StepOutput(torch.tensor(sampled), [logprobs], {}, torch.tensor([5, 9, 9, 9]))
    result = PendingResult(0, [row(0, 2), row(1, 0)], output, CPU()).result()
    assert result.token_ids == [[5, 6], [8]]
    assert list(result.details) == [0]
    found = result.details[0].logprobs
    assert found is not None
    assert [value.token_ids for value in found] == [[5, 1], [6, 1], [7, 1]]
    assert [value.logprobs for value in found] == [[-5, -1], [-6, -1], [-7, -1]]
