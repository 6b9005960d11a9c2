"""What speculation gains, by batch size and acceptance, against what this processor allows.

A scripted proposer stands in for a real one: it knows the output and proposes each next token
correctly with probability p. Engines with and without speculation take turns. The ideal is that of
the best fixed number of drafts, by the cost of steps measured in the same run. Without --model:
random weights in the shape of Qwen3-0.6B. With --method, a real proposer whose drafts are useless,
because the output is random.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from bench import workload
from benchmarks.comparison import processor_name
from benchmarks.harness import Table, loadable, make_parser
from benchmarks.scripted import Scripted
from benchmarks.shapes import described, read_config
from nanovllm import LLM, SamplingParams
from nanovllm.core.messages import MAX_SAMPLES, Row
from nanovllm.core.sequence import Sequence
from nanovllm.factory import make_drafting
from nanovllm.features.speculation import proposers
from nanovllm.platform.cpu import CPU
from nanovllm.worker.model_runner import ModelRunner
from nanovllm.worker.timing import measure_seconds

DRAFTS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 15, 19, 23)
"""Numbers of drafts for which the ideal's cost is measured."""
SLICE = 0.1
"""Seconds of a turn."""
CONTEXT = 100
"""Tokens of each sequence in these steps."""
DRAFT_SHAPE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2}
"""Fields in which a draft model's shape differs from the target's."""


class Work(NamedTuple):
    """The requests of a race."""

    prompts: list[list[int]]
    params: SamplingParams
    expected: list[list[int]]
    """All tokens of each sequence."""


def begin(llm: LLM, work: Work) -> list[Sequence]:
    """Compute the prompts; return the sequences, which keep running."""
    for seed, prompt in enumerate(work.prompts):
        llm.engine.add_request(prompt, dataclasses.replace(work.params, seed=seed))
    llm.engine.step()
    sequences = list(llm.engine.scheduler.running)
    assert len(sequences) == len(work.prompts)
    return sequences


def run_for(llm: LLM, seconds: float, num_rows: int = 1) -> float:
    """Run steps for about `seconds`, at least one, while `num_rows` sequences or more run.

    Returns their seconds.
    """
    start = time.perf_counter()
    while len(llm.engine.scheduler.running) >= num_rows:
        llm.engine.step()
        if time.perf_counter() - start >= seconds:
            break
    return time.perf_counter() - start


def race(plain: LLM, drafting: LLM, work: Work) -> float:
    """Return the tokens per second of `drafting` over those of `plain`, while all sequences run.

    They take turns of SLICE seconds, so that a slow moment of the machine affects both.
    """
    batch = len(work.prompts)
    engines = plain, drafting
    sequences = [begin(llm, work) for llm in engines]
    seconds = [0.0, 0.0]
    while len(drafting.engine.scheduler.running) == batch:
        for index, llm in enumerate(engines):
            seconds[index] += run_for(llm, SLICE, batch)
    speeds = [
        (sum(seq.num_output_tokens for seq in seqs) - batch) / spent
        for seqs, spent in zip(sequences, seconds, strict=True)
    ]
    run_for(drafting, math.inf)
    for seq in list(plain.engine.scheduler.running):
        request = plain.engine.output_processor.request_of(seq.seq_id)
        assert request is not None
        plain.engine.abort(request.request_id)
    assert [seq.token_ids for seq in sequences[1]] == work.expected, (
        "speculation changed the tokens"
    )
    return speeds[1] / speeds[0]


def forget(llm: LLM) -> None:
    """Reset the controller and the counts of `llm`."""
    engine, scheduler = llm.engine, llm.engine.scheduler
    manager = scheduler.block_manager
    scheduler.drafting = make_drafting(engine.config, engine.worker_info, manager)


def runner_of(llm: LLM) -> ModelRunner:
    return llm.engine.executor._runner  # type: ignore[attr-defined, no-any-return]


@contextlib.contextmanager
def without_speculation(llm: LLM) -> Iterator[None]:
    """Run `llm` without speculation inside `with`: the same weights at the same addresses."""
    runner, scheduler = runner_of(llm), llm.engine.scheduler
    kept = runner.drafter, scheduler.drafting
    runner.drafter = scheduler.drafting = None
    yield
    runner.drafter, scheduler.drafting = kept


@torch.inference_mode()
def step_costs(llm: LLM, batch: int) -> dict[int, float]:
    """Return the seconds of a step of `batch` sequences by its tokens, with 0 to 23 drafts each."""
    runner = runner_of(llm)
    tables = runner.tables
    per_row = -(-(CONTEXT + 1 + DRAFTS[-1]) // tables.block_size)
    blocks = torch.arange(batch * per_row, dtype=torch.int32).view(batch, per_row)
    tables.block_tables[:batch, :per_row] = blocks  # these have no owner now

    def run(size: int) -> None:
        drafts = size // batch - 1
        runner.run_rows([Row(i, i, CONTEXT, 1 + drafts, True, drafts) for i in range(batch)])

    sizes = [batch * (1 + drafts) for drafts in DRAFTS if batch * (1 + drafts) <= MAX_SAMPLES]
    return dict(measure_seconds(run, sizes, CPU()))


def ideal_speedup(
    batch: int, acceptance: float, step_seconds: dict[int, float], max_drafts: int
) -> tuple[float, int]:
    """Return the largest speed-up over fixed numbers of drafts, and that number of drafts.

    K drafts give (1 - p^(K + 1)) / (1 - p) tokens a step on average (Leviathan et al. 2023), in the
    time of a step of `batch` (K + 1) tokens.

    Args:
        step_seconds: by the tokens of a step; sizes between two measured ones are interpolated.
    """
    best = (1.0, 0)
    for drafts in range(max_drafts + 1):
        size = batch * (drafts + 1)
        if size > max(step_seconds):
            break
        tokens = sum(acceptance**i for i in range(drafts + 1))
        cost = interpolated(step_seconds, size) / interpolated(step_seconds, batch)
        if tokens / cost > best[0]:
            best = tokens / cost, drafts
    return best


def rising(step_seconds: dict[int, float]) -> dict[int, float]:
    """Return the times with noise removed: no step takes longer than a larger one."""
    sizes = sorted(step_seconds)
    return {n: min(step_seconds[m] for m in sizes if m >= n) for n in sizes}


def interpolated(step_seconds: dict[int, float], size: int) -> float:
    """Return the seconds of a step of `size` tokens, linear between measured sizes."""
    if size in step_seconds:
        return step_seconds[size]
    low = max(n for n in step_seconds if n < size)
    high = min(n for n in step_seconds if n > size)
    share = (size - low) / (high - low)
    return step_seconds[low] * (1 - share) + step_seconds[high] * share


def measure(
    engines: tuple[LLM, LLM], scripted: list[Scripted], batch: int, args: argparse.Namespace
) -> Iterator[tuple[float | str | int, ...]]:
    """Measure the speed-ups of one batch size; yield a row for each acceptance.

    The engines change roles.
    """
    num_tokens = min(args.output_len, 4096 // batch)
    prompts, _ = workload(batch, (32, 32), (1, 1), 0)
    temperature = 1.0 if args.method else 0.0
    params = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True)
    work = Work(prompts, params, [])
    with without_speculation(engines[0]):
        sequences = begin(engines[0], work)
        run_for(engines[0], math.inf)
    work = work._replace(expected=[seq.token_ids for seq in sequences])
    for proposer in scripted:
        proposer.learn(sequences)
    ratios: dict[float, list[float]] = {p: [] for p in args.acceptance}
    lengths: dict[float, float] = {}
    costs: list[dict[int, float]] = []
    for round_ in range(args.rounds):
        plain, drafting = engines if round_ % 2 else engines[::-1]
        for p in args.acceptance:
            costs.append(step_costs(drafting, batch))
            for proposer in scripted:
                proposer.acceptance = p
            forget(drafting)
            with without_speculation(plain):
                ratios[p].append(race(plain, drafting, work))
            assert drafting.engine.scheduler.drafting is not None
            lengths[p] = drafting.engine.scheduler.drafting.counts.mean_acceptance_length
    step_seconds = rising({size: median(found[size] for found in costs) for size in costs[0]})
    for p, rounds in ratios.items():
        ideal, drafts = ideal_speedup(batch, p, step_seconds, args.num_speculative_tokens)
        measured = median(rounds)
        spread = f"{min(rounds):.2f} to {max(rounds):.2f}"
        yield batch, p, measured, spread, ideal, drafts, f"{measured / ideal:.0%}", lengths[p]


def main() -> None:
    """Run the rounds and print a row for each batch size and acceptance."""
    parser = make_parser("speculation", __doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8, 16, 64])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0, 0.3, 0.6, 0.8, 0.95])
    parser.add_argument("--output-len", type=int, default=256, help="at most 4096 over batch")
    parser.add_argument("--num-speculative-tokens", type=int, default=24)
    parser.add_argument("--method", choices=["ngram", "draft_model", "mtp"])
    args = parser.parse_args()
    scripted: list[Scripted] = []
    spec = {
        "method": args.method or "ngram",
        "num_speculative_tokens": args.num_speculative_tokens,
    }
    if args.method is None:
        scripted = [Scripted(), Scripted()]
        unused = iter(scripted)
        vars(proposers)["make_proposer"] = lambda *_: next(unused)
    else:
        args.acceptance = [0.0]
    with loadable(args.model) as (model, load_format), tempfile.TemporaryDirectory() as draft:
        if args.method == "draft_model":
            config = {**read_config(model), **DRAFT_SHAPE}
            Path(draft, "config.json").write_text(json.dumps(config), encoding="utf-8")
            spec["model"] = draft
        options: dict[str, Any] = {"enable_prefix_caching": False, "max_model_len": 1024}
        options["max_num_batched_tokens"] = 4096  # all prompts in one step
        options |= {"speculative_config": spec, "load_format": load_format}
        engines = LLM(model, **options), LLM(model, **options)
    print(f"{described(args.model)}; {processor_name()}, {torch.get_num_threads()} threads\n")
    headings = "batch", "acceptance", "times as fast", "rounds", "ideal", "its drafts", "share"
    table = Table(*headings, "acceptance length")
    for batch in args.batch:
        for row in measure(engines, scripted, batch, args):
            table.row(*row)


if __name__ == "__main__":
    main()
