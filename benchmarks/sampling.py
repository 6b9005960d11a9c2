"""What sampling costs over greedy: whole decode steps of one batch, the modes in turn.

Random weights in the shape of Qwen3-0.6B unless --model names a checkpoint. The ratio in the last
column is the median over rounds of a mode's time over greedy's in the same round.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from nanovllm import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).parent.parent))
from bench import QWEN3_06B

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature=0.6": {"temperature": 0.6},
    "top_k=20, top_p=0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "top_p=0.95": {"temperature": 0.6, "top_p": 0.95},
    "repetition_penalty=1.1": {"temperature": 0.6, "repetition_penalty": 1.1},
    "logprobs=1": {"temperature": 0.6, "logprobs": 1},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    rng = random.Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(args.input_len)] for _ in range(args.batch)]
    seconds: dict[str, list[float]] = {name: [] for name in MODES}
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(QWEN3_06B))
        load_format = "auto" if args.model else "dummy"
        llm = LLM(args.model or directory, load_format=load_format, enable_prefix_caching=False)
    for round_ in range(args.rounds + 1):  # the first warms up
        for name, options in MODES.items():
            params = SamplingParams(
                max_tokens=args.output_len, ignore_eos=True, seed=round_, **options
            )
            for prompt in prompts:
                llm.engine.add_request(prompt, params)
            llm.engine.step()  # the prompts
            start = time.perf_counter()
            while not llm.engine.is_finished():
                llm.engine.step()
            if round_:
                seconds[name].append((time.perf_counter() - start) / (args.output_len - 1))
    print(f"{args.batch} sequences, {args.rounds} rounds: milliseconds a decode step")
    for name, times in seconds.items():
        ratio = median(t / g for t, g in zip(times, seconds["greedy"], strict=True))
        print(f"  {name:24} {1e3 * median(times):8.2f}  {ratio:6.3f} of greedy")


if __name__ == "__main__":
    main()
