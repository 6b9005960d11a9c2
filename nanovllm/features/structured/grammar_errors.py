"""What llguidance says of a grammar, in our words: what is wrong, where, and what to write instead.

Knows llguidance's sentences, and no grammar. A sentence that is not known is told as it is.
"""

import re
from collections.abc import Callable, Iterable

from nanovllm.options.validation import shown

_COERCED = (
    "oneOf is used as anyOf, since its schemas may overlap: an output may fit several of them"
)
_NOT_UNIQUE = "uniqueItems is not enforced: an output's array may have equal items"
NO_TEXT = "NoExtensionBias"  # llguidance's name of a place in a grammar that no token can follow

_LOCATION = re.compile(r"(?s)(?:at )?(\d+)\((\d+)\): (.*?)\n *\d+ \| .*")
"""Of an error in Lark's notation: line, column, error; then some lines of the grammar."""
_REGEX = re.compile(
    r"(?s)(?:invalid regex .*\(in regex\): )?regex parse error:\n(?P<shown>.*)error: (?P<reason>.*)"
)
_Rewritten = str | Callable[[re.Match[str]], str]


def _keywords(match: re.Match[str]) -> str:
    names = match[1].split(", ")
    return (
        f"the keyword{'s' * (len(names) > 1)} {' and '.join(names)} of JSON Schema cannot be "
        "enforced: write the schema without"
    )


_WORDS: tuple[tuple[str, _Rewritten], ...] = (
    (r"Unimplemented keys: \[(.*)\]", _keywords),
    (
        r"oneOf constraints are not supported.*",
        "the schemas of a oneOf may overlap: write anyOf, or give the schema "
        '"x-guidance": {"coerce_one_of": true}',
    ),
    (
        r"Unknown format: (.*)",
        r"the format \1 is not known: leave it out, or give the schema "
        '"x-guidance": {"lenient": true}',
    ),
    (
        r"min/maxProperties only supported.*",
        "minProperties and maxProperties can be enforced only where all properties are required: "
        "write the schema without",
    ),
    (
        r"Invalid type: (.*)",
        r"'\1' is no type of JSON Schema: string, number, integer, boolean, null, array, object",
    ),
    (r"Pointer '(.*)' does not exist", r"a $ref names '#\1', which the schema does not have"),
    (
        r"Resource '(.*)' is not present in a registry.*",
        r"the schema at '\1' is not fetched: put it into $defs",
    ),
    (
        r"circular references with sibling keys are not supported.*",
        "a $ref that leads back to itself has other keywords beside it: put them elsewhere",
    ),
    (
        r"patternProperty regexes (/.*/) and (/.*/) are not disjoint",
        r"patternProperties: a name may fit both \1 and \2: make them exclude each other",
    ),
    (r"Unsatisfiable schema: (.*)", r"no value fits the schema: \1"),
    (r"Expecting object schema to apply options", "a schema must be an object"),
    (r"invalid multiple of", "multipleOf must be above 0"),
    (r"Expected f64 for (?:numeric )?'?(\w+)'?, got (.*)", r"\1 must be a number, got \2"),
    (
        r"Expected positive integer for '(.*)', got (.*)",
        r"\1 must be a whole number of at least 0, got \2",
    ),
    (r"Expected (string|array|object) for '(.*)', got (.*)", r"\2 must be of type \1, got \3"),
    (r"recursion limit exceeded.*", "it is nested too deeply"),
    (r"(.*) at line (\d+) column (\d+)", r"it is not JSON: \1, line \2, column \3"),
    (r"unknown name: \"(.*)\"", r"it has no rule or token named \1"),
    (r"unknown special token: \"(<.*>)\"; .*", r"the model has no special token \1"),
    (
        r"(?:panic: assertion failed: bt == 0|unexpected backtracking)\b.*",
        'a rule with "stop" takes text back, which is not supported: write "suffix"',
    ),
    (r"panic: (.*?) <backtrace>.*", r"llguidance failed: \1"),
    (r"unknown field (.*)", r"x-guidance has no field \1"),
    (r"lexer error", "this is not Lark's notation"),
    (rf"{NO_TEXT}\b.*", "no text has this form"),
    (
        r".*Current row has (\d+) items; max is (\d+).*",
        r"it is too complex: \1 ways to go on at one place, the limit is \2",
    ),
    (r"lexer precomputation failed.*", "it is too complex: too many expressions constructed"),
    (
        r"Unable to determine if regex is empty.*",
        "it is too complex: a string that must fit several patterns",
    ),
    (r"(?:lexer error|parser error|Parser Error): (.*)", r"it is too complex: \1"),
    (r"(.*(?:\bfuel\b|too large|too many|exceed).*)", r"it is too complex: \1"),
)
"""llguidance's sentences, and ours. The first that matches as a whole counts."""


def in_our_words(error: str, *, places: bool = False) -> str:
    """Return what llguidance's error means, on one line of 300 characters at most.

    `places` is whether its lines and columns say something to a user.
    """
    error = error.replace("<non-verbose/>", "").strip()
    place = ""
    if located := _LOCATION.fullmatch(error):
        place = f"line {located[1]}, column {located[2]}: " if places else ""
        error = located[3].removeprefix("failed to compile JSON schema: ").strip()
    if found := _REGEX.fullmatch(error):
        return _on_one_line(f"{place}{_regex_error(found)}")
    line = " ".join(error.split())
    for pattern, words in _WORDS:
        if match := re.fullmatch(pattern, line):
            return _on_one_line(place + (words(match) if callable(words) else match.expand(words)))
    return _on_one_line(place + line)


def what_is_not_enforced(warnings: Iterable[str]) -> tuple[list[str], str]:
    """Return what of schemas with `X_GUIDANCE` is not enforced and only told once; and why they are
    refused, or "". An unknown format is neither: JSON Schema has it as an annotation.
    """
    told: list[str] = []
    for warning in warnings:
        text = re.sub(r" \(\d+ times\)$", "", warning)
        if text.startswith("oneOf "):
            told.append(_COERCED)
        elif text == 'Unimplemented keys: ["uniqueItems"]':
            told.append(_NOT_UNIQUE)
        elif not text.startswith("Unknown format: "):
            return told, in_our_words(text)
    return told, ""


def _regex_error(found: re.Match[str]) -> str:
    """Return why a regular expression is none, and where, if it has one line."""
    pattern, _, marks = found["shown"].rstrip("\n").partition("\n")
    mark = marks.find("^") - (len(pattern) - len(pattern.lstrip()))
    is_one_line = mark >= 0 and "\n" not in marks
    place = f" at {shown(pattern.strip()[mark:])}" if is_one_line else ""
    return f"{found['reason'].strip()}{place}"


def _on_one_line(text: str) -> str:
    return " ".join(text.split())[:300]
