"""How much of a chat does an engine recompute, turn by turn?

A conversation has a system prompt and turns; each prompt is everything so far plus a new question.
An engine is NAME or NAME=PYTHON, of nanovllm and vllm, in a separate process. Weights are random,
so no answer ends early. Both engines cache prefixes.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.shapes import checkpoint, described

Turn = Callable[[list[int], int], Iterator[tuple[list[int], int]]]
"""Called with a prompt and the number of tokens to generate; yields new token ids and the number
of cached prompt tokens, step by step."""


def nanovllm(model: str, load_format: str) -> Turn:
    """Return the function that takes a turn with nanovllm."""
    from nanovllm import LLM, SamplingParams

    llm = LLM(model, load_format=load_format, max_model_len=8192)

    def turn(prompt: list[int], length: int) -> Iterator[tuple[list[int], int]]:
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        for output in llm.stream(prompt, params):
            yield list(output.outputs[0].token_ids), output.num_cached_tokens or 0

    return turn


def vllm(model: str, load_format: str) -> Turn:
    """Return the function that takes a turn with vLLM."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    options: dict[str, Any] = {"skip_tokenizer_init": True, "enable_prefix_caching": True}
    llm = LLM(model, load_format=load_format, max_model_len=8192, **options)
    engine = llm.llm_engine

    def turn(prompt: list[int], length: int) -> Iterator[tuple[list[int], int]]:
        params = SamplingParams(
            temperature=0,
            max_tokens=length,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        engine.add_request(str(time.perf_counter_ns()), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                yield list(output.outputs[0].token_ids), output.num_cached_tokens or 0

    return turn


ENGINES = {"nanovllm": nanovllm, "vllm": vllm}


def converse(turn: Turn, sizes: tuple[int, int, int], num_turns: int) -> list[dict[str, Any]]:
    """Return what each turn of a conversation computed, and its time to the first token.

    Args:
        sizes: tokens of the system prompt, of a question and of an answer.
    """
    rng = random.Random(0)
    system, question, answer = sizes
    list(turn([rng.randint(0, 10000) for _ in range(32)], 4))  # warm-up
    prompt = [rng.randint(0, 10000) for _ in range(system)]
    rows = []
    for number in range(1, num_turns + 1):
        prompt += [rng.randint(0, 10000) for _ in range(question)]
        num_tokens, start, first, cached = len(prompt), time.perf_counter(), None, 0
        for token_ids, hit in turn(list(prompt), answer):
            first = first or time.perf_counter() - start
            cached = max(cached, hit)
            prompt += token_ids
        rows.append(
            {
                "turn": number,
                "prompt": num_tokens,
                "computed": num_tokens - cached,
                "first": first,
                "seconds": time.perf_counter() - start,
            }
        )
    return rows


def main() -> None:
    """Run the conversation on each engine and print a row for each turn."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turns", description=__doc__)
    parser.add_argument("engines", nargs="+", metavar="NAME[=PYTHON]")
    parser.add_argument("--model", default="Qwen3.5-0.8B", help="as for benchmarks.versus")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--system", type=int, default=2000, help="tokens of the system prompt")
    parser.add_argument("--question", type=int, default=100, help="tokens of a question")
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = args.system, args.question, args.answer
    if args.serve:
        turn = ENGINES[args.engines[0]](args.model, args.serve)
        print("\n" + json.dumps(converse(turn, sizes, args.turns)), flush=True)
        return
    print(f"{described(args.model)}: {args.system} tokens of system prompt, {args.question} of a")
    print(f"question, {args.answer} of an answer.\n")
    print("| engine | turn | prompt | computed | first token, s | whole turn, s |")
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as directory:
        model, load_format = checkpoint(args.model, directory)
        for given in args.engines:
            name, _, python = given.partition("=")
            command = [python or sys.executable, "-m", "benchmarks.turns", name, "--model", model]
            command += ["--serve", load_format, "--turns", str(args.turns)]
            for option, size in zip(("--system", "--question", "--answer"), sizes, strict=True):
                command += [option, str(size)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            printed = [line for line in done.stdout.splitlines() if line.startswith('[{"turn"')]
            for row in json.loads(printed[-1]):  # an engine also prints other lines
                cells = f"{row['turn']} | {row['prompt']} | {row['computed']}"
                print(f"| {name} | {cells} | {row['first']:.2f} | {row['seconds']:.2f} |")


if __name__ == "__main__":
    main()
