"""Sampling of a step's rows. Each row gets the token that it gets alone,
whatever parameters the other rows have.
"""

import random

import pytest
import torch

from nanovllm.core.messages import Admission, FinishInfo, Row, Schedule
from nanovllm.core.worker_info import WorkerInfo
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.platform.cpu import CPU
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.logprobs import sampled_logprobs
from nanovllm.worker.step_sampler import StepSampler

VOCAB = 5003
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

KINDS = {
    "greedy": SamplingParams(temperature=0),
    "almost greedy": SamplingParams(temperature=1e-6, top_k=5, top_p=0.5),
    "plain": SamplingParams(),
    "hot": SamplingParams(temperature=5.0),
    "min_p": SamplingParams(min_p=0.1),
    "top_k": SamplingParams(top_k=20),
    "large top_k": SamplingParams(top_k=900, temperature=2.0),
    "top_k beyond the vocabulary": SamplingParams(top_k=VOCAB + 1),
    "top_p": SamplingParams(top_p=0.8),
    "top_p of a flat row": SamplingParams(top_p=0.95, temperature=30.0),
    "top_p and a top_k beyond the vocabulary": SamplingParams(
        top_k=VOCAB, top_p=0.6, temperature=3.0
    ),
    "top_k and top_p": SamplingParams(top_k=20, top_p=0.95, temperature=0.6),
    "all filters": SamplingParams(top_k=30, top_p=0.9, min_p=0.02, temperature=1.5),
    "penalties": SamplingParams(
        repetition_penalty=1.5, frequency_penalty=1.0, presence_penalty=0.5, top_k=40
    ),
    "greedy with penalties": SamplingParams(temperature=0, repetition_penalty=2.0),
    "bias": SamplingParams(logit_bias={5: 4.0, 9: -100.0}, top_p=0.9),
    "allowed": SamplingParams(allowed_token_ids=[4, 400, 4000]),
    "min_tokens": SamplingParams(min_tokens=20, logit_bias={3: 60.0}),
    "logprobs": SamplingParams(logprobs=3, top_k=10),
    "logprobs of a greedy row with a rule": SamplingParams(
        temperature=0, logprobs=0, logit_bias={7: 50.0}
    ),
}


def make_rows(
    params, histories=None, seeds=None, table_indices=None, vocab_size=VOCAB, prompt_lengths=None
):
    """Return tables with one sequence for each of `params`, and rows with their last tokens."""
    count = len(params)
    histories = histories or [[1]] * count
    seeds = seeds or [0] * count
    table_indices = table_indices or list(range(count))
    prompt_lengths = prompt_lengths or [1 + len(tokens) // 2 for tokens in histories]
    tables = DeviceTables(
        WorkerInfo(100, 4, 60, vocab_size, 60),
        max(table_indices) + 1,
        CPU(),
        CPU().kernels(torch.float32),
    )
    admissions = [
        Admission(
            100 + table_idx,
            table_idx,
            tokens,
            prompt_length,
            [0],
            p,
            seed,
            frozenset({3}),
            (),
        )
        for table_idx, tokens, prompt_length, p, seed in zip(
            table_indices, histories, prompt_lengths, params, seeds, strict=True
        )
    ]
    tables.apply(Schedule(0, admissions, [], []))
    rows = [
        Row(100 + table_idx, table_idx, len(tokens) - 1, 1, samples=True)
        for table_idx, tokens in zip(table_indices, histories, strict=True)
    ]
    return tables, rows


def random_logits(count, dtype=torch.float32, vocab_size=VOCAB, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, vocab_size, generator=generator) * 2).to(dtype)


def sample(params, logits, **options):
    tables, rows = make_rows(params, vocab_size=logits.shape[-1], **options)
    return StepSampler(tables, rows).sample(logits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_row_gets_the_token_that_it_gets_alone(dtype):
    """Two rows of each kind, in several orders and selections, with ties and flat rows."""
    chooser = random.Random(0)
    params = [*KINDS.values(), *KINDS.values()]
    count = len(params)
    logits = random_logits(count, dtype)
    histories = [
        [chooser.randrange(VOCAB) for _ in range(chooser.randint(1, 30))] for _ in range(count)
    ]
    seeds = [chooser.getrandbits(63) for _ in range(count)]
    alone = [
        sample([params[i]], logits[i : i + 1], histories=[histories[i]], seeds=[seeds[i]]).item()
        for i in range(count)
    ]
    for size in (count, count, count // 2, 7, 2, 2, 2, 2):
        chosen = chooser.sample(range(count), size)
        together = sample(
            [params[i] for i in chosen],
            logits[chosen],
            histories=[histories[i] for i in chosen],
            seeds=[seeds[i] for i in chosen],
            table_indices=chooser.sample(range(count), size),
        )
        assert together.dtype == torch.int64
        assert together.tolist() == [alone[i] for i in chosen]


def test_ties_with_the_last_of_top_k_do_not_depend_on_a_neighbour():
    """A row with a larger top_k increases the candidates of all rows, so more ties are seen."""
    logits = (random_logits(200) / 10).round(decimals=1).bfloat16()
    narrow, wide = SamplingParams(top_k=20, top_p=0.3), SamplingParams(top_k=400)
    seeds = list(range(200))
    alone = sample([narrow] * 200, logits, seeds=seeds)
    together = sample([narrow] * 200 + [wide], torch.cat([logits, logits[:1]]), seeds=[*seeds, 0])
    assert torch.equal(together[:200], alone)


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5])
@pytest.mark.parametrize("top_k", [VOCAB, VOCAB + 1, 2**40, 2**70])
def test_a_top_k_from_the_vocabularys_size_up_is_none(top_k, top_p):
    logits, seeds = random_logits(100), list(range(100))
    without, beyond = (SamplingParams(top_k=k, top_p=top_p, temperature=4.0) for k in (0, top_k))
    expected = sample([without] * 100, logits, seeds=seeds)
    assert torch.equal(sample([beyond] * 100, logits, seeds=seeds), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rules_change_no_other_row_and_not_what_the_model_said(dtype):
    """Log-probabilities come from the model's logits, without the rules."""
    params = list(KINDS.values())
    logits = random_logits(len(params), dtype)
    before = logits.clone()
    tables, rows = make_rows(params, histories=[[5, 9, 4]] * len(params))
    sampling = StepSampler(tables, rows)
    changed = sampling.apply_rules(logits)
    for index, row in enumerate(rows):
        untouched = torch.equal(changed[index], before[index].float())
        assert untouched == (tables.rules[row.table_idx] is None)
    sampling.sample(logits)
    assert torch.equal(logits, before)


def test_rules_see_the_tokens_that_the_host_has_not_seen():
    """Sampled tokens are stored on the device, so penalties count them in the next step."""
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    tables, rows = make_rows([params], histories=[[1, 2]])
    logits = torch.zeros(1, VOCAB)
    logits[0, [50, 60, 70]] = torch.tensor([4.0, 3.5, 2.6])
    chosen = []
    for step in range(6):
        sampling = StepSampler(tables, [rows[0]._replace(num_computed_tokens=1 + step)])
        tokens = sampling.sample(logits)
        sampling.store(tokens)
        chosen.append(tokens.item())
    assert chosen == [50, 60, 50, 70, 60, 50]


def with_drafts(params, histories, drafts):
    """Return tables and rows of sequences whose `drafts` are in the tables, and row lengths."""
    tables, rows = make_rows(params, histories=histories, seeds=range(len(params)))
    drafting = []
    for row, guesses in zip(rows, drafts, strict=True):
        start = row.sample_position
        tables.token_ids[row.table_idx, start : start + len(guesses)] = torch.tensor(guesses).int()
        count = len(guesses)
        drafting.append(row._replace(num_scheduled_tokens=1 + count, num_draft_tokens=count))
    return tables, drafting


@pytest.mark.parametrize("seed", range(3))
def test_each_sample_is_what_the_row_samples_with_its_drafts_as_tokens(seed):
    """Every kind of parameters, with 0 to 3 drafts: rules, random numbers, log-probabilities."""
    chooser = random.Random(seed)
    params = list(KINDS.values())
    histories = [[chooser.randrange(20) for _ in range(chooser.randint(1, 20))] for _ in params]
    drafts = [[chooser.randrange(20) for _ in range(chooser.randrange(4))] for _ in params]
    tables, rows = with_drafts(params, histories, drafts)
    sampling = StepSampler(tables, rows)
    logits = random_logits(len(sampling), seed=seed)
    tokens = sampling.sample(logits)
    (logprobs,) = sampled_logprobs(tables, sampling, logits, tokens)
    found = iter(logprobs.values.tolist(logprobs.counts))
    sample_index = 0
    for index, (history, guesses) in enumerate(zip(histories, drafts, strict=True)):
        for num_accepted in range(len(guesses) + 1):
            own_tables, own_rows = make_rows(
                [params[index]],
                histories=[history + guesses[:num_accepted]],
                seeds=[index],
                prompt_lengths=[1 + len(history) // 2],
            )
            alone = StepSampler(own_tables, own_rows)
            one = logits[sample_index : sample_index + 1]
            token = alone.sample(one)
            assert tokens[sample_index] == token
            if params[index].logprobs is not None:
                (expected,) = sampled_logprobs(own_tables, alone, one, token)
                assert [next(found)] == expected.values.tolist(expected.counts)
            sample_index += 1
    assert sample_index == len(sampling) == len(tokens)


def test_samples_know_their_drafts_and_where_they_stand():
    tables, rows = with_drafts([SamplingParams()] * 3, [[1, 2], [3], [4, 5]], [[7, 8], [], [9]])
    chunk = Row(100, 0, 0, 3, samples=False)  # a prompt's chunk in the same batch
    sampling = StepSampler(tables, [chunk, *rows])
    assert [row.seq_id for row in sampling.rows] == [100, 100, 100, 101, 102, 102]
    assert sampling.output_indices.tolist() == [3, 4, 5, 6, 7, 8]
    drafts = sampling.draft_ids.tolist()
    assert (drafts[:2], drafts[4]) == ([7, 8], 9)
    assert StepSampler(tables, [chunk, rows[1]]).draft_ids is None
    before = tables.token_ids.clone()
    sampling.store(torch.tensor([7, 20, -1, 30, 40, 50]))
    assert drafts == sampling.draft_ids.tolist()  # a copy: what the target drew is stored over it
    assert tables.token_ids[0, :5].tolist() == [1, 2, 7, 20, 0]
    assert tables.token_ids[1, :2].tolist() == [3, 30]
    assert tables.token_ids[2, :4].tolist() == [4, 5, 40, 50]
    assert torch.equal(tables.token_ids[:, 5:], before[:, 5:])


def test_failure_of_a_processor_names_its_sample():
    def fails_after_eight(output, logits):
        if output[-1:] == [8]:
            raise ValueError("eight")
        return logits

    params = SamplingParams(logits_processors=[fails_after_eight])
    tables, rows = with_drafts([SamplingParams(), params], [[1], [1, 2]], [[7], [7, 8, 9]])
    sampling = StepSampler(tables, rows)
    sampling.sample(random_logits(6))
    reason = "a logits processor failed: ValueError: eight"
    assert sampling.finish_infos == {4: FinishInfo("error", reason)}
