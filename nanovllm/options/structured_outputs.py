"""What form a request's output must have: a JSON schema, a regular expression, a choice, a grammar.

A value, checked for its types when made. features/structured/grammar.py compiles it.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from nanovllm.errors import InvalidRequestError
from nanovllm.options.validation import (
    Error,
    as_class,
    check_bool,
    check_text,
    checked_dataclass,
    plain_text,
    shown,
)

_FORMS = ("json", "regex", "choice", "grammar", "json_object")
_LONGEST_SHOWN = 200
MAX_CHARS = 1 << 16
"""Longest text of a schema without its annotations, an expression, a choice or a grammar."""
UNFINISHED = "the output cannot be finished"
"""With this begins the reason of an output that its grammar has ended: a limit, or a dead end."""
_IS_LARK = re.compile(
    r"""(?mx) ^[ \t]* (
        %llguidance\b
        | !?\??start[ \t]*
          (\.[ \t]*\d+[ \t]*)?                              # a priority
          (\[ ("(\\.|[^"\\\n])*" | [^"\]\n])* \] [ \t]*)?  # attributes
          : (?!:=)                                          # ::= is GBNF's
    )"""
)


def _schema_text(error: Error, name: str, value: Any) -> str:
    if isinstance(value, str):
        return plain_text(value)
    rule = f"{name} must be a JSON schema, as a text or a dictionary"
    if not isinstance(value, Mapping):
        raise error(f"{rule}, got {shown(value)}")
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as cause:
        reason = str(cause)[:_LONGEST_SHOWN]
        raise error(f"{rule}: {reason}, got {shown(value)}") from cause


def _choice(error: Error, name: str, value: Any) -> tuple[str, ...]:
    rule = f"{name} must be a list of strings, not empty"
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or not value:
        raise error(f"{rule}, got {shown(value)}")
    for item in value:
        if not isinstance(item, str) or not item:
            raise error(f"{rule}: each has a character at least, got {shown(item)}")
    return tuple(map(plain_text, value))


@checked_dataclass(InvalidRequestError, "structured_outputs.")
class StructuredOutputsParams:
    """The form of an output. Exactly one of json, regex, choice, grammar, json_object is given.

    Names and meanings are vLLM's.

    Raises:
        InvalidRequestError: a field is unknown, of the wrong type or too long, or not exactly one
            is given.
    """

    json: Annotated[str | dict[str, Any] | None, _schema_text] = None
    """A JSON schema: its text, or a dictionary, which is kept as text."""
    regex: Annotated[str | None, check_text] = None
    """A regular expression that the whole output matches, without look-around."""
    choice: Annotated[Sequence[str] | None, _choice] = None
    """Strings, one of which is the output; kept as a tuple."""
    grammar: Annotated[str | None, check_text] = None
    """A grammar in Lark's notation, or in GBNF."""
    json_object: Annotated[bool | None, check_bool] = None
    """True for any JSON object."""
    disable_any_whitespace: bool = False
    """For json and json_object: no white space between the parts of the JSON text."""
    source: str = dataclasses.field(default="", init=False, repr=False, compare=False)
    """What errors call it; `made_grammar` sets another source than the field that is given."""

    def __post_init__(self) -> None:
        error = InvalidRequestError
        given = [name for name in _FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise error(f"structured_outputs must have one of {', '.join(_FORMS)}, got {found}")
        if self.json is not None and len(self.text) > MAX_CHARS:
            from nanovllm.options.json_schema import grammar_schema_text

            object.__setattr__(self, "json", grammar_schema_text(self.text))
        if len(self.text) > MAX_CHARS:
            raise error(
                f"structured_outputs.{self.form} has {len(self.text)} characters; "
                f"the limit is {MAX_CHARS}: {shown(self.text)}"
            )
        object.__setattr__(self, "source", f"structured_outputs.{self.form} {shown(self.text)}")

    @property
    def form(self) -> str:
        """The name of the field that is given."""
        return next(name for name in _FORMS if getattr(self, name) not in (None, False))

    @property
    def text(self) -> str:
        """The field that is given, as a text."""
        value = getattr(self, self.form)
        return value if isinstance(value, str) else json.dumps(value)

    @property
    def is_lark(self) -> bool:
        """Whether a grammar is in Lark's notation; otherwise it should be GBNF."""
        return _IS_LARK.search(self.text) is not None


def made_grammar(grammar: str, source: str) -> StructuredOutputsParams:
    """Return the form of a grammar that was made of what a request has, and is not limited.

    Args:
        source: what errors call it.
    """
    made = StructuredOutputsParams(grammar="start:")
    object.__setattr__(made, "grammar", grammar)
    object.__setattr__(made, "source", source)
    return made


def structured_outputs(value: Any) -> StructuredOutputsParams:
    """Return `value` as StructuredOutputsParams, which may be a dictionary of its fields.

    Raises:
        InvalidRequestError: it is neither, or a field is invalid.
    """
    if isinstance(value, StructuredOutputsParams):
        return as_class(value, StructuredOutputsParams)
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise InvalidRequestError(
            "structured_outputs must be StructuredOutputsParams or a dictionary such as "
            f'{{"json": {{...}}}}, got {shown(value)}'
        )
    return StructuredOutputsParams(**value)
