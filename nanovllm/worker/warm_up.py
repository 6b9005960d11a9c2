"""What a rank does before its first request: it finds how many KV blocks fit, allocates them, and
prepares faster steps.

It runs the largest steps, so that their memory is known. On a GPU it runs one of each kind, so that
no request waits for a kernel to be compiled: schedules like those of requests, of one sequence, in
table row 0 and KV block 0.
"""

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from nanovllm.core.messages import MAX_SAMPLES, Admission, Row, Schedule
from nanovllm.core.worker_info import Arithmetic, DraftInfo, KVInfo, WorkerInfo, num_tables
from nanovllm.kernels.cpu import library
from nanovllm.loading.files import is_gguf
from nanovllm.options.plugins import at_start, in_worker, is_plugin, make_guarded
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.hooks import StepRunner, step_runner_class
from nanovllm.worker.kv_cache import num_blocks_that_fit
from nanovllm.worker.model_runner import ModelRunner

CHUNKS = (100, 40, 2)  # of the first prompt: kernels may have variants for many and few rows

KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, min_p=0.1),
    SamplingParams(temperature=0.8, top_k=20),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1),
    # With rules the logits are float32, for which kernels are compiled again.
    SamplingParams(temperature=0.0, logit_bias={0: 1.0}),
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


@torch.inference_mode()
def measure(runner: ModelRunner) -> WorkerInfo:
    """Return what this rank can hold. Allocates nothing that stays."""
    network = runner.network
    config = runner.config
    states = network.attention.states
    block_size = network.backend.block_size
    block_bytes = network.block_bytes
    if runner.drafter is not None:
        block_bytes += runner.drafter.block_bytes
    info = WorkerInfo(
        0,
        block_size,
        runner.max_model_len,
        network.model_config.vocab_size,
        runner.max_num_batched_tokens,
        runs_ahead=runner.platform.runs_ahead,
        kv=KVInfo(
            network.attention.layout.windows,
            states.num_pages,
            network.attention.causal,
            network.attention.picture_tokens,
        ),
        drafts=DraftInfo(config.speculation.max_draft_tokens if config.speculation else 0),
    )
    blocks_of_one = num_tables(info.kv.windows) * -(-runner.max_model_len // block_size)
    if info.kv.state_pages:
        from nanovllm.kv.groups.state import SNAPSHOT_INTERVAL

        # Its own, and snapshots: on the way, of the last full block, and behind the last token.
        num_states = 3 + runner.max_model_len // SNAPSHOT_INTERVAL
        blocks_of_one += info.kv.state_pages * num_states
    num_blocks = num_blocks_that_fit(
        config,
        runner.platform,
        block_bytes=block_bytes,
        max_blocks=blocks_of_one * config.max_num_seqs,
        num_reserved=runner.num_padding_blocks,
        warm_up=partial(reach_peak, runner, info),
    )
    return dataclasses.replace(info, num_blocks=num_blocks)


def reach_peak(runner: ModelRunner, info: WorkerInfo) -> int:
    """Run the largest steps on a small pool, so that torch records its peak memory; return the
    bytes that CUDA graphs will take in addition.
    """
    num_blocks = -(-min(info.max_model_len, info.max_num_batched_tokens) // info.block_size)
    info = dataclasses.replace(info, num_blocks=num_blocks + info.kv.state_pages)
    tables = runner.allocate(info)
    drafter = runner.drafter
    prompts, samples = _largest_steps(info, tables, drafts=drafter is not None)
    runner.run_rows(prompts)
    runner.run_rows(samples)
    num_bytes = 0
    if runner.steps is not None:
        num_bytes = runner.steps.measure(tables, accepts=runner.follows_drafts)
    runner.free()
    if drafter is not None:
        num_bytes += drafter.warm_up(tables, num_blocks, prompts)
    return num_bytes


@torch.inference_mode()
def allocate(runner: ModelRunner, info: WorkerInfo) -> WorkerInfo:
    """Allocate the KV pool and the tables, then capture or record the model; return `info` with
    what the drafter and the parts measure.
    """
    tables = runner.allocate(info)
    network = runner.network
    drafter = runner.drafter
    if drafter is not None:
        drafter.allocate(tables, info.num_blocks)
    if network.user_parts is not None:  # before anything records it
        token = [Row(-1, 0, 0, 1, samples=False)]
        at_start(network.user_parts, "forward()", network.forward, tables, token, None)
        network.pool.zero([0])
    if runner.platform.runs_ahead and info.kv.causal:
        compile_kernels(runner, info)
    if runner.steps is not None:
        runner.step_runners = runner.steps.make(tables, accepts=runner.follows_drafts)
    if (name := runner.config.step_runner) is not None:  # it is asked first
        make = partial(make_guarded, f'step_runner="{name}"', StepRunner, step_runner_class(name))
        runner.step_runners.insert(0, make(network, tables, call=in_worker))
    info = with_arithmetic(runner, info)
    if drafter is not None:
        drafts = info.drafts._replace(follows_drafts=runner.follows_drafts)
        info = dataclasses.replace(info, drafts=drafts)
        info = drafter.add_costs(info, tables, runner.run_rows)
    for part in runner.parts:
        info = part.open(info, runner.run_rows)
    return info


def compile_kernels(runner: ModelRunner, info: WorkerInfo) -> None:
    """Run a step of each kind, and leave nothing of them in the tables and in the pool."""
    spec = runner.config.speculation
    for schedule in warm_up_steps(info, 0 if spec is None else spec.max_draft_tokens):
        runner.execute(schedule).result()
    runner.tables.apply(emptying_step(info))
    runner.network.pool.zero([0])


def _largest_steps(
    info: WorkerInfo, tables: DeviceTables, *, drafts: bool
) -> tuple[list[Row], list[Row]]:
    """Return the rows of the longest prefill and of the most samples; prepare `tables` for them.
    The blocks of `info` are those of one sequence, and the last of these its state's.
    """
    max_tokens = info.max_num_batched_tokens
    num_seqs = len(tables.params)
    length = min(info.max_model_len, max_tokens)
    blocks = torch.arange(info.num_blocks - info.kv.state_pages, device=tables.device)
    tables.block_tables[:num_seqs, : len(blocks)] = blocks
    ruled = SamplingParams(temperature=1.0, logit_bias={0: 1.0})
    tables.params = [ruled] * num_seqs
    # With rules in one row, all rows' logits are copied to float32.
    from nanovllm.layers.logits_rules import LogitsRules

    tables.rules[0] = LogitsRules(ruled, 0, (), frozenset(), tables.device)
    count = max(1, min(max_tokens // length, num_seqs))
    prompts = [Row(i, i, 0, length, samples=info.kv.causal) for i in range(count)]
    num_drafts = 0
    if drafts:
        num_drafts = max(0, min(MAX_SAMPLES, max_tokens, length * num_seqs) // num_seqs - 1)
    samples = [Row(i, i, 0, 1 + num_drafts, info.kv.causal, num_drafts) for i in range(num_seqs)]
    return prompts, samples


def warm_up_steps(info: WorkerInfo, num_drafts: int) -> Iterator[Schedule]:
    """Yield the steps: prompts, chunks behind a short and a long prefix, single tokens and up to
    `num_drafts` drafts, sampled in each of `KINDS`.
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
    """Return a sequence of block 0 alone, with the tokens that table row 0 holds."""
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


def with_arithmetic(runner: ModelRunner, info: WorkerInfo) -> WorkerInfo:
    """Return `info` with the arithmetic of a runner whose steps are recorded, if they can be."""
    network = runner.network
    config = runner.config
    names = {backend.name for backend in network.attention.backends}
    in_c = names == {"cpu"} and network.kernels.name == "c"
    in_c = in_c and not is_plugin(config.attention_backend)  # which may have that name, too
    # A step that can be recorded consists of C kernels alone, none of which mixes rows.
    is_invariant = in_c and bool(runner.step_runners) and config.step_runner is None
    kernels = f"C, {library.description()}" if in_c else network.kernels.name
    dtype = str(network.model_config.dtype).removeprefix("torch.")
    stored = None
    if isinstance(network.model_config.quantization_config, dict):
        stored = network.model_config.quantization_config.get("quant_method")
    if stored is None and config.quantization != "none" and is_gguf(Path(config.model)):
        stored = "gguf"
    return dataclasses.replace(
        info,
        arithmetic=Arithmetic(
            batch_invariant=is_invariant,
            dtype=dtype,
            weights=config.quantization or stored or dtype,
            kv_cache=dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
            kernels=kernels,
            num_ranks=config.tensor_parallel_size,
        ),
    )
