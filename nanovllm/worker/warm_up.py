"""The steps that a rank runs at start, so that no request waits for a kernel to be compiled.

They are schedules like those of requests: of one sequence, in table row 0 and KV block 0. Knows no
kernel and no device.
"""

from collections.abc import Iterator

from nanovllm.options.sampling_params import SamplingParams
from nanovllm.scheduler.messages import Admission, Row, Schedule, WorkerInfo

CHUNKS = (100, 40, 2)
"""Tokens of the chunks of the first prompt: kernels may have variants for many, some, few rows."""

KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, min_p=0.1),
    SamplingParams(temperature=0.8, top_k=20),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1),
    # With rules the logits are float32, for which kernels are compiled again.
    SamplingParams(temperature=0.0, logit_bias=((0, 1.0),)),
    SamplingParams(
        temperature=0.8,
        top_k=20,
        top_p=0.9,
        min_tokens=1,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logprobs=1,
    ),
)
"""What the requests want."""


def warm_up_steps(info: WorkerInfo, num_drafts: int) -> Iterator[Schedule]:
    """Yield the steps: prompts, chunks behind a short and a long prefix, single tokens and drafts,
    sampled in each of `KINDS`.

    Args:
        num_drafts: how many draft tokens a row may have; 0 without speculation.
    """
    room = min(info.max_model_len, info.max_num_batched_tokens)
    for params in KINDS:
        chunks = CHUNKS if params is KINDS[0] else CHUNKS[-1:]
        start = 0
        for size in (*chunks, 1):
            if size > room - start:
                continue
            yield _step(info, params, start, size, samples=size == chunks[-1] or size == 1)
            start += size
        drafts = min(num_drafts, room - start - 1)
        if drafts > 0:
            yield _step(info, params, start, 1 + drafts, num_drafts=drafts)
    for size in (min(CHUNKS[0], room), 1):
        yield _step(info, KINDS[0], info.max_model_len - size, size)


def emptying_step(info: WorkerInfo) -> Schedule:
    """Return what makes table row 0 as it was. It has no rows: it is for the tables alone."""
    empty = _admission(info, SamplingParams(temperature=0.0), 0)
    return Schedule(-1, [empty._replace(token_ids=[0] * (info.max_model_len + 1))], [], [])


def _step(
    info: WorkerInfo,
    params: SamplingParams,
    start: int,
    size: int,
    *,
    samples: bool = True,
    num_drafts: int = 0,
) -> Schedule:
    """Return a step of `size` tokens behind a prefix of `start` tokens, which need not be right."""
    admission = _admission(info, params, start + size - num_drafts)
    row = Row(-1, 0, start, size, samples, num_drafts)
    return Schedule(-1, [admission], [], [row], blocks_to_zero=[0], may_draft=num_drafts > 0)


def _admission(info: WorkerInfo, params: SamplingParams, num_tokens: int) -> Admission:
    """Return a sequence with block 0 in all places of its block table. Its tokens are those that
    table row 0 holds.
    """
    num_blocks = -(-info.max_model_len // info.block_size)
    return Admission(
        seq_id=-1,
        table_idx=0,
        token_ids=[0],
        num_prompt_tokens=num_tokens,
        block_ids=[0] * num_blocks,
        params=params,
        seed=0,
        stop_token_ids=frozenset({0}),
        bad_words=(),
    )
