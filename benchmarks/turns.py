"""How much of a chat does an engine compute again, turn by turn?

    python -m benchmarks.turns nanovllm vllm=PYTHON

A conversation has a system prompt and turns; each prompt is everything so far plus a new question,
of random tokens. An engine is NAME or NAME=PYTHON, of nanovllm and vllm, in a separate process.
Both cache prefixes. With --tools, nanovllm's chat template renders an agent's conversation from the
start in each turn: a system prompt with tools, then calls and their results. Answers come whole, so
that the first token has the seconds of the turn. Without a tokenizer the tokens are random.

It ends with 1 if nanovllm computes more in a later turn than what its prompt adds to all that came
before, plus 1,024 tokens: the longest distance of snapshots of a state.
"""

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks.shapes import checkpoint, described

SLACK = 1024
_TEMPLATE = 2048
"""Room for tools and what the template writes."""
_NAMES = ("read_file", "write_file", "list_files", "run_command", "search", "fetch_page")
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Do what {name.replace('_', ' ')} says, and return its output as text.",
            "parameters": {
                "type": "object",
                "properties": {"target": {"type": "string"}, "limit": {"type": "integer"}},
                "required": ["target"],
            },
        },
    }
    for name in _NAMES
]


class Sizes(NamedTuple):
    """Tokens of a conversation's parts."""

    system: int
    question: int
    answer: int

    def longest(self, num_turns: int) -> int:
        """Return the positions that so many turns may need."""
        return self.system + 2 * num_turns * (self.question + self.answer) + _TEMPLATE


class Turn(NamedTuple):
    """Numbers of tokens, and seconds."""

    prompt: int
    new: int
    """Those after what the prompt has in common with the turn before and its answer."""
    computed: int
    first: float
    """To the first token."""
    seconds: float

    def is_good(self) -> bool:
        """Return whether the turn computes hardly more than what is new."""
        return self.computed <= self.new + SLACK


class Step(NamedTuple):
    """What an engine says after a step, of one request."""

    prompt: list[int]
    new_tokens: list[int]
    num_cached: int


Ask = Callable[[list[int], int], Iterator[Step]]
"""Called with a prompt and the number of tokens to generate."""


def nanovllm(llm: Any) -> Ask:
    """Return the function that asks nanovllm."""
    from nanovllm import SamplingParams

    def ask(prompt: list[int], length: int) -> Iterator[Step]:
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        for output in llm.stream(prompt, params):
            new = list(output.outputs[0].token_ids)
            yield Step(prompt, new, output.num_cached_tokens or 0)

    return ask


def vllm(llm: Any) -> Ask:
    """Return the function that asks vLLM."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine

    def ask(prompt: list[int], length: int) -> Iterator[Step]:
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
                new = list(output.outputs[0].token_ids)
                yield Step(prompt, new, output.num_cached_tokens or 0)

    return ask


class RandomTokens:
    """A conversation of random prompts and the answers to them.

    Args:
        vocab_size: token ids are below it.
    """

    def __init__(self, ask: Ask, sizes: Sizes, vocab_size: int = 10_000) -> None:
        self._ask = ask
        self._sizes = sizes
        self._vocab_size = vocab_size
        self._rng = random.Random(0)
        self._prompt = self._tokens(sizes.system)

    def next_answer(self) -> Iterator[Step]:
        """Ask the next question."""
        self._prompt += self._tokens(self._sizes.question)
        for step in self._ask(list(self._prompt), self._sizes.answer):
            yield step
            self._prompt += step.new_tokens

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(self._vocab_size) for _ in range(count)]


class Calls:
    """A conversation by the chat template: each answer calls a tool, whose result comes back.

    What the model writes stays in the answer; the call is made up.
    """

    def __init__(self, llm: Any, sizes: Sizes) -> None:
        self._llm = llm
        self._sizes = sizes
        self._messages: list[dict[str, Any]] = [
            {"role": "system", "content": self._text(sizes.system, "Rule")},
            {"role": "user", "content": "Find out why the tests fail."},
        ]

    def next_answer(self) -> Iterator[Step]:
        """Let the model answer the result of the last call, or the user."""
        from nanovllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=self._sizes.answer, ignore_eos=True)
        [output] = self._llm.chat(self._messages, params, use_tqdm=False, tools=TOOLS)
        number = len(self._messages)
        arguments = {"target": f"tests/part_{number}.py"}
        call = {"name": _NAMES[number % len(_NAMES)], "arguments": arguments}
        called = {"id": f"call{number:05}", "type": "function", "function": call}
        answer = output.outputs[0]
        result = self._text(self._sizes.question, f"Line of {number}")
        self._messages += [
            {"role": "assistant", "content": answer.text, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": called["id"], "content": result},
        ]
        yield Step(output.prompt_token_ids, answer.token_ids, output.num_cached_tokens or 0)

    def _text(self, num_tokens: int, word: str) -> str:
        """Return numbered sentences of at least that many tokens."""
        tokenizer = self._llm.engine.input_processor.tokenizer
        lines: list[str] = []
        count = 0
        while count < num_tokens:
            lines.append(f"{word} {len(lines)}: keep step {len(lines) * 37 % 101} in mind.")
            count += len(tokenizer.encode(lines[-1] + "\n", add_special_tokens=False))
        return "\n".join(lines)


def turns(next_answer: Callable[[], Iterator[Step]], count: int) -> list[Turn]:
    """Return what each of `count` turns computes."""
    before: list[int] = []
    found = []
    for _ in range(count):
        start = time.perf_counter()
        first, cached, prompt, answer = 0.0, 0, [], []
        for step in next_answer():
            first = first or time.perf_counter() - start
            cached = max(cached, step.num_cached)
            prompt = step.prompt
            answer += step.new_tokens
        seconds = time.perf_counter() - start
        same = (one == other for one, other in zip(before, prompt, strict=False))
        known = sum(itertools.takewhile(bool, same))
        computed = len(prompt) - cached
        found.append(Turn(len(prompt), len(prompt) - known, computed, first, seconds))
        before = prompt + answer
    return found


def converse(llm: Any, name: str, sizes: Sizes, count: int, *, tools: bool = False) -> list[Turn]:
    """Return the turns of a conversation with `llm`, of engine `name`."""
    if name == "vllm":
        ask, vocab_size = vllm(llm), 10_000
    else:
        ask, vocab_size = nanovllm(llm), min(10_000, llm.engine.worker_info.vocab_size)
        if tools and llm.engine.input_processor.tokenizer is not None:
            return turns(Calls(llm, sizes).next_answer, count)
    list(ask([1] * 32, 4))  # warm-up
    return turns(RandomTokens(ask, sizes, vocab_size).next_answer, count)


def serve(args: argparse.Namespace, sizes: Sizes) -> None:
    """Have a conversation in this process; print its turns."""
    [name], [model] = args.engines, args.model
    options: dict[str, Any] = {"load_format": args.serve}
    options["max_model_len"] = sizes.longest(args.turns)
    if name == "vllm":
        from vllm import LLM

        options |= {"skip_tokenizer_init": True, "enable_prefix_caching": True}
    else:
        from nanovllm import LLM
    found = converse(LLM(model, **options), name, sizes, args.turns, tools=args.tools)
    print("\n" + json.dumps({"turns": found}), flush=True)


def parse_args() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turns", description=__doc__)
    parser.add_argument("engines", nargs="+", metavar="NAME[=PYTHON]")
    parser.add_argument(
        "--model", nargs="+", default=["Qwen3.5-0.8B"], help="each as for benchmarks.versus"
    )
    parser.add_argument("--tools", action="store_true", help="an agent's conversation")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--system", type=int, default=2000, help="tokens of the system prompt")
    parser.add_argument("--question", type=int, default=100, help="of a question or a result")
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run the conversation on each engine and print a row for each turn."""
    args = parse_args()
    sizes = Sizes(args.system, args.question, args.answer)
    if args.serve:
        serve(args, sizes)
        return
    print("| model | engine | turn | prompt | new | computed | first token, s | turn, s | |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    failed = False
    for given, name in itertools.product(args.model, args.engines):
        engine, _, python = name.partition("=")
        with tempfile.TemporaryDirectory() as directory:
            model, load_format = checkpoint(given, directory)
            command = [python or sys.executable, "-m", "benchmarks.turns", engine]
            command += ["--model", model, "--serve", load_format, "--turns", str(args.turns)]
            command += ["--tools"] * args.tools
            for option, size in sizes._asdict().items():
                command += [f"--{option}", str(size)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        printed = [line for line in done.stdout.splitlines() if line.startswith('{"turns"')]
        for number, fields in enumerate(json.loads(printed[-1])["turns"], 1):
            turn = Turn(*fields)
            verdict = "" if number == 1 or turn.is_good() else "too many"
            failed |= engine == "nanovllm" and bool(verdict)
            cells = f"{number} | {turn.prompt} | {turn.new} | {turn.computed} | {turn.first:.2f}"
            cells += f" | {turn.seconds:.2f} | {verdict}"
            print(f"| {described(given)} | {engine} | {cells} |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
