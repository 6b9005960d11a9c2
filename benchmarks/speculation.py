"""What speculation gains, by batch size and acceptance, beside what is possible on this processor.

A scripted proposer stands for a real one: it knows the output and proposes each next token rightly
with probability p. Engines with and without speculation take turns. The ideal is that of the best
fixed number of drafts, by the cost of steps measured in the same run. Without --model: random
weights in the shape of Qwen3-0.6B.
"""

import argparse
import datetime
import random
import shlex
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from benchmarks.comparison import processor_name
from benchmarks.scripted import Scripted
from benchmarks.shapes import checkpoint, described
from benchmarks.speedups import Speedup, Speedups, ideal_speedup
from nanovllm import LLM, SamplingParams
from nanovllm.outputs import DraftCounts
from nanovllm.scheduler.draft_controller import DraftController
from nanovllm.scheduler.messages import Row
from nanovllm.scheduler.sequence import Sequence
from nanovllm.worker import model_runner
from nanovllm.worker.proposers.costs import measure_seconds

SIZES = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160,
         192, 224, 256)  # fmt: skip
"""Tokens of the steps whose cost is measured for the ideal."""


def generate(llm: LLM, prompts: list[list[int]], num_tokens: int) -> tuple[float, list[Sequence]]:
    """Return the seconds from the first output token to the last one, and the sequences."""
    params = SamplingParams(temperature=0, seed=0, max_tokens=num_tokens, ignore_eos=True)
    for prompt in prompts:
        llm.engine.add_request(prompt, params)
    llm.engine.step()  # the prompts
    sequences = list(llm.engine.scheduler.running)
    assert len(sequences) == len(prompts)
    start = time.perf_counter()
    while not llm.engine.is_finished():
        llm.engine.step()
    return time.perf_counter() - start, sequences


def forget(llm: LLM) -> None:
    """Let the controller and the counts of `llm` begin again."""
    info, scheduler = llm.engine.cache_info, llm.engine.scheduler
    assert scheduler.draft_controller is not None
    scheduler.draft_controller = DraftController(
        scheduler.draft_controller.max_draft_tokens, info.step_seconds, info.draft_seconds
    )
    scheduler.stats.drafts = DraftCounts()


def step_costs(llm: LLM) -> dict[int, float]:
    """Return the seconds of a decode step by its tokens."""
    runner = llm.engine.executor._runner  # type: ignore[attr-defined]

    @torch.inference_mode()
    def run(size: int) -> None:
        row = Row(0, 0, 0, size, True, size - 1)
        runner._run_rows(runner._tables, [row])

    found = [measure_seconds(run, SIZES, torch.device("cpu")) for _ in range(3)]
    return {size: min(dict(times)[size] for times in found) for size in SIZES}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation", description=__doc__)
    parser.add_argument("--model", help="a directory, a hub id or a name of benchmarks/shapes.py")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8, 16, 64])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0, 0.3, 0.6, 0.8, 0.95])
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--num-speculative-tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def main() -> None:
    """Run the rounds and print a line for each batch size and acceptance."""
    args = parse_args()
    scripted = Scripted()
    vars(model_runner)["make_proposer"] = lambda *_: scripted
    options = {"enable_prefix_caching": False, "max_model_len": 1024}
    with tempfile.TemporaryDirectory() as directory:
        model, load_format = checkpoint(args.model, directory)
        plain = LLM(model, load_format=load_format, **options)
        spec = {"method": "ngram", "num_speculative_tokens": args.num_speculative_tokens}
        drafting = LLM(model, load_format=load_format, speculative_config=spec, **options)
    costs = step_costs(drafting)
    print("tokens of a step: milliseconds", {n: round(1e3 * s, 1) for n, s in costs.items()})
    rng = random.Random(0)
    points = []
    for batch in args.batch:
        prompts = [[rng.randint(0, 10000) for _ in range(32)] for _ in range(batch)]
        _, sequences = generate(plain, prompts, args.output_len)
        scripted.learn(sequences)
        outputs = [seq.token_ids for seq in sequences]
        ratios: dict[float, list[float]] = {p: [] for p in args.acceptance}
        lengths: dict[float, float] = {}
        for _ in range(args.rounds):
            for p in args.acceptance:
                scripted.acceptance = p
                forget(drafting)
                without, _ = generate(plain, prompts, args.output_len)
                seconds, found = generate(drafting, prompts, args.output_len)
                assert [seq.token_ids for seq in found] == outputs, "other tokens"
                ratios[p].append(without / seconds)
                lengths[p] = drafting.engine.stats.drafts.mean_acceptance_length
        for p, rounds in ratios.items():
            ideal, drafts = ideal_speedup(batch, p, costs, args.num_speculative_tokens)
            points.append(Speedup(batch, p, median(rounds), ideal, drafts, lengths[p], rounds))
            print(
                f"batch {batch:3} p {p:4.2f}: {points[-1].measured:5.2f} times as fast, ideal "
                f"{ideal:5.2f} ({drafts} drafts), share {points[-1].share:4.2f}; acceptance length "
                f"{lengths[p]:.2f}; rounds {', '.join(f'{r:.2f}' for r in rounds)}",
                flush=True,
            )
    if args.json is not None:
        Speedups(
            command=shlex.join(["python", "-m", "benchmarks.speculation", *sys.argv[1:]]),
            date=datetime.date.today().isoformat(),
            processor=processor_name(),
            model=described(args.model),
            num_threads=torch.get_num_threads(),
            step_seconds=costs,
            points=points,
        ).save(args.json)


if __name__ == "__main__":
    main()
