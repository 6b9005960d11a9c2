"""Errors of grammars: llguidance's own, so that new sentences of a new version are noticed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nanovllm import StructuredOutputsParams, demo_model
from nanovllm.errors import InvalidRequestError
from nanovllm.features.structured.grammar import GrammarCompiler

pytest.importorskip("llguidance")

TOKENIZER = (Path(demo_model.MODEL) / "tokenizer.json").read_text(encoding="utf-8")
COMPILER = GrammarCompiler(lambda: TOKENIZER, 1024, (1021,))
A_OR_B = {"properties": {"a": {}, "b": {}}, "additionalProperties": False}
MANY = {"type": "object", "properties": {f"k{i}": {"const": i} for i in range(700)}}

SCHEMAS: list[tuple[Any, str]] = [
    ({"not": {}, "if": {}}, 'the keywords "if" and "not" of JSON Schema cannot be enforced'),
    ({"minProperties": 2, **A_OR_B}, "only where all properties are required"),
    ({"type": "foo"}, "'foo' is no type of JSON Schema: string, number"),
    ({"type": 5}, "type must be a string or array of strings"),
    ({"$ref": "#/$defs/x"}, "a $ref names '#/$defs/x', which the schema does not have"),
    ({"$ref": "http://x/y"}, "the schema at 'http://x/y' is not fetched: put it into $defs"),
    ({"properties": {"a": {"$ref": "#"}}, "$ref": "#"}, "a $ref that leads back to itself"),
    ({"patternProperties": {"a.*": {}, ".*b": {}}}, "a name may fit both /a.*/ and /.*b/"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "no value fits the schema: minimum (5) is"),
    ({"enum": []}, "no value fits the schema"),
    ({"multipleOf": 0}, "multipleOf must be above 0"),
    ({"minimum": "5"}, 'minimum must be a number, got "5"'),
    ({"minItems": -1}, "minItems must be a whole number of at least 0, got -1"),
    ({"format": 5}, "format must be of type string, got 5"),
    ({"pattern": "a(?=b)"}, "is not supported at '(?=b)'"),
    ({"x-guidance": {"a": 1}}, "x-guidance has no field `a`"),
    (MANY, "it is too complex: 2799 ways to go on at one place, the limit is 2000"),
    ("5", "a schema must be an object"),
    ("{", "it is not JSON: EOF while parsing an object, line 1, column 1"),
]
GRAMMARS = [
    ("start: x\nx: y", "line 2, column 4: it has no rule or token named y"),
    ('start: "a', "line 1, column 10: this is not Lark's notation"),
    ("start: <foo>", "line 1, column 8: the model has no special token <foo>"),
    ("start: /(/", "line 1, column 8: unclosed group at '('"),
    ('start: start "a"', "no text has this form"),
    ('start: %json {"not": {}}', 'line 1, column 8: the keyword "not" of JSON Schema cannot'),
    ('start: %json {"oneOf": [{}, {}]}', 'write anyOf, or give the schema "x-guidance": {"coerce'),
    ('start: %json {"format": "a"}', "the format a is not known: leave it out, or give the"),
    ('start[stop="b"]: "a"', 'a rule with "stop" takes text back, which is not supported'),
]
EXPRESSIONS = [
    ("a(b", "unclosed group at '(b'"),
    (r"(a)\1", "backreferences are not supported at '\\\\1'"),
    ("(a|aa){900}{900}", "it is too complex: too many expressions"),
    (r"[^\s\S]", "no text has this form"),
]


@pytest.mark.parametrize(
    ("form", "text", "words"),
    [("json", text, words) for text, words in SCHEMAS]
    + [("grammar", text, words) for text, words in GRAMMARS]
    + [("regex", text, words) for text, words in EXPRESSIONS],
)
def test_errors_are_in_our_words(form: str, text: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(words)) as caught:
        COMPILER.compile(StructuredOutputsParams(**{form: text}))
    found = str(caught.value).split(" cannot be used: ", 1)[1]
    assert not re.search(r"non-verbose|\^| \| |backtrace|Unimplemented|NoExtension", found)
    assert json.dumps(found).count(r"\n") == 0
