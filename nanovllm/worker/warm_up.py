"""The steps that a rank runs at start: the largest ones, so that their memory is known, and one of
each kind, so that no request waits for a kernel to be compiled.

Those are schedules like those of requests: of one sequence, in table row 0 and KV block 0. Knows no
kernel and no device.
"""

from collections.abc import Callable, Iterator

import torch

from nanovllm.layers.logits_rules import LogitsRules
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.options.speculative_config import SpeculativeConfig
from nanovllm.scheduler.messages import MAX_SAMPLES, Admission, Row, Schedule, WorkerInfo
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.network import Network
from nanovllm.worker.step_output import PendingResult

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


def largest_steps(
    info: WorkerInfo, tables: DeviceTables, *, drafts: bool
) -> tuple[list[Row], list[Row]]:
    """Return the rows of the longest prefill and of the most samples; prepare `tables` for them.

    Args:
        info: its blocks are those of one sequence.
        drafts: whether rows may have drafts.
    """
    max_tokens, num_seqs = info.max_num_batched_tokens, len(tables.params)
    length = min(info.max_model_len, max_tokens)
    blocks = torch.arange(info.num_blocks, device=tables.device)
    tables.block_tables[:num_seqs, : info.num_blocks] = blocks
    ruled = SamplingParams(temperature=1.0, logit_bias=((0, 1.0),))
    tables.params = [ruled] * num_seqs
    # With rules in one row, all rows' logits are copied to float32.
    tables.rules[0] = LogitsRules(ruled, 0, (), frozenset(), tables.device)
    count = max(1, min(max_tokens // length, num_seqs))
    prompts = [Row(i, i, 0, length, samples=True) for i in range(count)]
    num_drafts = 0
    if drafts:
        num_drafts = max(0, min(MAX_SAMPLES, max_tokens, length * num_seqs) // num_seqs - 1)
    return prompts, [Row(i, i, 0, 1 + num_drafts, True, num_drafts) for i in range(num_seqs)]


def compile_kernels(
    info: WorkerInfo,
    spec: SpeculativeConfig | None,
    execute: Callable[[Schedule], PendingResult],
    network: Network,
    tables: DeviceTables,
) -> None:
    """Run a step of each kind, and leave nothing of them in `tables` and in the pool."""
    for schedule in warm_up_steps(info, 0 if spec is None else spec.max_draft_tokens):
        execute(schedule).result()
    tables.apply(emptying_step(info))
    network.zero_blocks([0], tables)


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
