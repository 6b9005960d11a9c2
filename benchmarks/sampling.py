"""What a sampling method costs: the time of a decode step of one batch, relative to greedy.

The methods run in turn. The ratio in the last column is the median over rounds of a method's time
divided by greedy's in the same round. Without --model: random weights in the shape of Qwen3-0.6B.
"""

import time
from functools import partial
from statistics import median
from typing import Any

from bench import workload
from benchmarks.harness import Table, in_turns, loadable, make_parser, ratio
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
    """Run the rounds and print a row for each method."""
    parser = make_parser("sampling", __doc__, rounds=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=24)
    args = parser.parse_args()
    prompts, _ = workload(args.batch, (args.input_len,) * 2, (1, 1), 0)
    with loadable(args.model) as (model, load_format):
        llm = LLM(model, load_format=load_format, enable_prefix_caching=False)

    def run(options: dict[str, Any], number: int) -> float:
        given = {"ignore_eos": True, "seed": number + 1, **options}
        return step_seconds(llm, prompts, SamplingParams(max_tokens=args.output_len, **given))

    seconds = in_turns(
        {name: partial(run, options) for name, options in METHODS.items()}, args.rounds
    )
    table = Table("sampling", "ms a step", "over greedy")
    for name, times in seconds.items():
        table.row(name, 1e3 * median(times), ratio(times, seconds["greedy"]))


if __name__ == "__main__":
    main()
