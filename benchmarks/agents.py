"""How much of an agent's conversation is computed again, turn by turn?

    python -m benchmarks.agents MODEL...

A model is a directory, or a name of benchmarks.shapes for random weights. Its chat template renders
each turn from the start: a system prompt with tools, then calls and their results. Without a
tokenizer the tokens are random. It ends with 1 if a later turn computes more than what its prompt
adds to all that came before, plus 1,024 tokens: the longest distance of snapshots of a state.
"""

import argparse
import itertools
import random
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.shapes import checkpoint, described
from nanovllm import LLM, SamplingParams
from nanovllm.outputs import RequestOutput

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


class Turn(NamedTuple):
    """Numbers of tokens."""

    prompt: int
    new: int
    """Those after what the prompt has in common with the turn before and its answer."""
    computed: int

    def is_good(self) -> bool:
        """Return whether the turn computes hardly more than what is new."""
        return self.computed <= self.new + SLACK


class RandomTokens:
    """A conversation without a tokenizer: random prompts, and the answers to them.

    Args:
        sizes: tokens of the system prompt, of a question and of an answer.
    """

    def __init__(self, llm: LLM, sizes: tuple[int, int, int], vocab_size: int) -> None:
        self._llm = llm
        self._rng = random.Random(0)
        system, self._question, answer = sizes
        self._params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        self._vocab_size = vocab_size
        self._prompt = self._tokens(system)

    def next_answer(self) -> RequestOutput:
        """Ask the next question."""
        self._prompt += self._tokens(self._question)
        [output] = self._llm.generate([self._prompt], self._params, use_tqdm=False)
        self._prompt = self._prompt + output.outputs[0].token_ids
        return output

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(self._vocab_size) for _ in range(count)]


class Calls:
    """A conversation by the chat template: each answer calls a tool, whose result comes back.

    What the model writes stays in the answer; the call is made up.
    """

    def __init__(self, llm: LLM, sizes: tuple[int, int, int]) -> None:
        self._llm = llm
        system, self._question, answer = sizes
        self._params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        self._messages: list[dict[str, Any]] = [
            {"role": "system", "content": self._text(system, "Rule")},
            {"role": "user", "content": "Find out why the tests fail."},
        ]

    def next_answer(self) -> RequestOutput:
        """Let the model answer the result of the last call, or the user."""
        [output] = self._llm.chat(self._messages, self._params, use_tqdm=False, tools=TOOLS)
        number = len(self._messages)
        arguments = {"target": f"tests/part_{number}.py"}
        call = {"name": _NAMES[number % len(_NAMES)], "arguments": arguments}
        called = {"id": f"call{number:05}", "type": "function", "function": call}
        text = output.outputs[0].text
        self._messages += [
            {"role": "assistant", "content": text, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": called["id"], "content": self._result(number)},
        ]
        return output

    def _result(self, number: int) -> str:
        return self._text(self._question, f"Line of {number}")

    def _text(self, num_tokens: int, word: str) -> str:
        """Return numbered sentences of at least that many tokens."""
        tokenizer = self._llm.engine.input_processor.tokenizer
        assert tokenizer is not None
        lines: list[str] = []
        count = 0
        while count < num_tokens:
            lines.append(f"{word} {len(lines)}: keep step {len(lines) * 37 % 101} in mind.")
            count += len(tokenizer.encode(lines[-1] + "\n", add_special_tokens=False))
        return "\n".join(lines)


def turns(next_answer: Callable[[], RequestOutput], count: int) -> list[Turn]:
    """Return what each of `count` turns computes."""
    before: list[int] = []
    found = []
    for _ in range(count):
        output = next_answer()
        prompt = output.prompt_token_ids
        same = (one == other for one, other in zip(before, prompt, strict=False))
        known = sum(itertools.takewhile(bool, same))
        computed = len(prompt) - (output.num_cached_tokens or 0)
        found.append(Turn(len(prompt), len(prompt) - known, computed))
        before = prompt + output.outputs[0].token_ids
    return found


def converse(llm: LLM, sizes: tuple[int, int, int], count: int) -> list[Turn]:
    """Return the turns of a conversation with `llm`."""
    if llm.engine.input_processor.tokenizer is not None:
        return turns(Calls(llm, sizes).next_answer, count)
    vocab_size = llm.engine.worker_info.vocab_size
    return turns(RandomTokens(llm, sizes, vocab_size).next_answer, count)


def main() -> None:
    """Print a row for each turn of each model."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agents", description=__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--system", type=int, default=6000, help="tokens of the system prompt")
    parser.add_argument("--question", type=int, default=200, help="tokens of a tool's result")
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer")
    args = parser.parse_args()
    longest = args.system + 2 * args.turns * (args.question + args.answer) + _TEMPLATE
    print("| model | turn | prompt | new | computed | |")
    print("| --- | --- | --- | --- | --- | --- |")
    failed = False
    for name in args.models:
        with tempfile.TemporaryDirectory() as directory:
            model, load_format = checkpoint(name, directory)
            llm = LLM(model, load_format=load_format, max_model_len=longest)
            found = converse(llm, (args.system, args.question, args.answer), args.turns)
            llm.shutdown()
        for number, turn in enumerate(found, 1):
            verdict = "" if number == 1 or turn.is_good() else "too many"
            failed |= bool(verdict)
            cells = f"{number} | {turn.prompt} | {turn.new} | {turn.computed} | {verdict}"
            print(f"| {described(name)} | {cells} |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
