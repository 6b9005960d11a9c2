"""What a grammar may cost, where llguidance's own limits do not hold: bounds and a trial.

llguidance counts its work after each step of a lexer, and one step can take minutes. So texts that
make such steps are refused, and those that may make them are tried in a process that can be ended.

This file is the program of that process, too. So it imports only the standard library at its top.
"""

import json
import re
import signal
import subprocess
from collections.abc import Iterable
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from nanovllm.utils.limited_process import Limits

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 25_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""Fields of llguidance's LLParserLimits: some 100 ms of compiling, 20 ms for a mask, and
50 MB for a request."""
MAX_PARTS = 1000
"""Of an expression. As many parts that may be empty, one after the other, are one step of a lexer:
its time and memory grow with the square of their number. 1,000 of \\w? take 0.3 s and 70 MB."""
MANY_PATTERNS = 3  # more of them that one text must match may take a time that doubles with each
_MANY_LEVELS = 500
"""More rules or brackets may stand in one another. llguidance goes into them by calls, and 2,500
end the process."""
_TRIAL_SECONDS = 1.0  # of processor time
_TRIAL_BYTES = 512 * 2**20
_TRIAL_STACK = 5 * 2**20  # less than the 8 MiB of a thread that compiles
_TRIAL_TOKENS = 64
_LITERALS = re.compile(r'(?s)(?:#|//)[^\n]*+|"(?:\\.|[^"\\\n])*+"?|/(?:\\.|[^/\\])++/?')
"""Comments, strings and expressions. Like `_DEFINITION`, it takes linear time."""
_DEFINITION = re.compile(
    r"\b([A-Za-z_][\w-]*+)[ \t]*+(?:\.[ \t]*+-?\d++[ \t]*+)?(?:\[[^\[\]]*+\][ \t]*+)?(?<!:):(?!:)"
)


def num_classes(expression: str) -> int:
    """Return how many large classes of Unicode an expression names. Each takes 6 to 15 KB."""
    return sum(map(expression.count, (r"\w", r"\W", r"\p", r"\P")))


def num_parts(expression: str) -> int:
    """Return how many parts of an expression may be empty or repeat; four large classes are one."""
    parts = sum(map(re.sub(r"(?s)\\.", "", expression).count, "?*{("))
    return parts + num_classes(expression) // 4


def check_parts(expressions: Iterable[str]) -> None:
    """Raise ValueError if a regular expression has too many parts."""
    for expression in expressions:
        _check_number("an expression", num_parts(expression))


def check_terminals(lark: str) -> bool:
    """Refuse terminals of too many parts, with the parts of the terminals that they name.

    Returns:
        Whether the grammar needs a trial: it may be deep, many parts of its rules may be empty, or
        several expressions meet in a text.

    Raises:
        ValueError: a terminal or an expression in a rule has too many.
    """
    check_parts(found for found in _LITERALS.findall(lark) if _is_expression(found))
    # An expression leaves its number of parts, and neither names nor colons.
    text = _LITERALS.sub(lambda found: "(" * num_parts(found[0]) * _is_expression(found[0]), lark)
    starts = list(_DEFINITION.finditer(text))
    ends = [start.start() for start in starts[1:]] + [len(text)]
    bodies = {
        start[1]: text[start.end() : end]
        for start, end in zip(starts, ends, strict=True)
        if start[1].lstrip("_")[:1].isupper()
    }
    counts: dict[str, int] = {}

    def count(name: str) -> int:
        if name not in counts:
            counts[name] = 0  # llguidance refuses one that names itself
            body = bodies[name]
            number = 1 + num_parts(body) + body.count("[")
            for other in re.findall(r"[\w-]+", body):
                if other in bodies:
                    number += count(other)
            counts[name] = number
        return counts[name]

    try:
        for name in bodies:
            _check_number(f"the terminal {name}", count(name))
    except RecursionError:
        raise ValueError("recursion limit exceeded") from None
    num_levels = len(starts) + sum(map(text.count, "(?*"))
    return num_levels > _MANY_LEVELS or text.count("&") > MANY_PATTERNS


def _is_expression(literal: str) -> bool:
    return literal[0] == "/" and literal[:2] != "//"


def _check_number(what: str, number: int) -> None:
    if number > MAX_PARTS:
        raise ValueError(
            f"{what} has {number} parts that may be empty or repeat, counting each ? * {{ and ( "
            f"and a quarter of each \\w and \\p; the limit is {MAX_PARTS}: write fewer, or several "
            "terminals of a grammar"
        )


def try_grammar(tokenizer: str, vocab_size: int, eos: tuple[int, ...], grammar: str) -> str:
    """Compile a grammar in a process that can be ended; return why it takes too much, or ""."""
    from nanovllm.utils.limited_process import Watch, start

    request = json.dumps([tokenizer, vocab_size, eos, LIMITS, grammar]).encode()
    with start(__file__, subprocess.DEVNULL) as process:
        try:
            with Watch(process, _TRIAL_SECONDS, _TRIAL_BYTES):
                process.communicate(request)
        except BaseException:
            process.kill()
            raise
    if process.returncode == 0:
        return ""
    if process.returncode == -signal.SIGSEGV:
        return "recursion limit exceeded"
    limits = f"{_TRIAL_SECONDS:g} s of processor time or {_TRIAL_BYTES >> 20} MiB of memory"
    return f"it is too complex: it takes more than {limits}"


def main(limits: "Limits", requests: IO[bytes], replies: IO[bytes]) -> None:
    """Compile the grammar, and follow it for some tokens that it allows."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    text, vocab_size, eos, settings, grammar = json.loads(requests.read())
    tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=eos or None)
    limits.memory(_TRIAL_BYTES, _TRIAL_STACK)
    with limits.time(_TRIAL_SECONDS):
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**settings))
        _follow(matcher, vocab_size, eos)


def _follow(matcher: "LLMatcher", vocab_size: int, eos: list[int]) -> None:
    ends = sum(1 << token for token in eos)
    for step in range(_TRIAL_TOKENS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little") & ~ends
        if matcher.is_error() or matcher.is_stopped() or not mask:
            break
        allowed = [token for token in range(vocab_size) if mask >> token & 1]
        matcher.consume_token(allowed[step * 7919 % len(allowed)])
