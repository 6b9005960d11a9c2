"""What a sampling method costs: the time of a decode step of one batch, relative to greedy.

The methods run in turn. The ratio in the last column is the median over rounds of a method's time
divided by greedy's in the same round. Without --model: random weights in the shape of Qwen3-0.6B.
"""

import argparse
import random
import tempfile
import time
from statistics import median
from typing import Any

from benchmarks.shapes import checkpoint
from nanovllm import LLM, SamplingParams

METHODS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature=0.6": {"temperature": 0.6},
    "top_k=20, top_p=0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "top_p=0.95": {"temperature": 0.6, "top_p": 0.95},
    "repetition_penalty=1.1": {"temperature": 0.6, "repetition_penalty": 1.1},
    "logprobs=1": {"temperature": 0.6, "logprobs": 1},
}


def step_seconds(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float:
    """Return the mean seconds of a decode step of all prompts in one batch."""
    for prompt in prompts:
        llm.engine.add_request(prompt, params)
    llm.engine.step()  # the prompts
    start = time.perf_counter()
    while not llm.engine.is_finished():
        llm.engine.step()
    return (time.perf_counter() - start) / (params.max_tokens - 1)


def main() -> None:
    """Run the rounds and print a line for each method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a directory or a hub id")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    rng = random.Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(args.input_len)] for _ in range(args.batch)]
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    with tempfile.TemporaryDirectory() as directory:
        model, load_format = checkpoint(args.model, directory)
        llm = LLM(model, load_format=load_format, enable_prefix_caching=False)
    for round_ in range(args.rounds + 1):  # the first warms up
        for name, options in METHODS.items():
            params = SamplingParams(
                max_tokens=args.output_len, ignore_eos=True, seed=round_, **options
            )
            found = step_seconds(llm, prompts, params)
            if round_:
                seconds[name].append(found)
    print(f"{args.batch} sequences, {args.rounds} rounds: milliseconds a decode step")
    for name, times in seconds.items():
        ratio = median(t / g for t, g in zip(times, seconds["greedy"], strict=True))
        print(f"  {name:24} {1e3 * median(times):8.2f}  {ratio:6.3f} of greedy")


if __name__ == "__main__":
    main()
