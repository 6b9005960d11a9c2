"""JSON schemas as grammars get them: closed where they declare properties, without annotations."""

import json
from typing import Any

import pytest

from nanovllm.options.json_schema import grammar_schema, grammar_schema_text

A, B = {"properties": {"a": {}}}, {"properties": {"b": {}}}
CLOSED = {"additionalProperties": False}


def test_annotations_go_and_what_has_their_names_stays() -> None:
    schema = {
        "$comment": "c",
        "title": "t",
        "type": "object",
        "properties": {"title": {"type": "string", "description": "d", "examples": [1]}},
        "required": ["title"],
        "$defs": {"default": {"enum": [{"title": "x"}], "default": 3, "deprecated": True}},
    }
    before = json.dumps(schema)
    assert grammar_schema(schema) == {
        "type": "object",
        "properties": {"title": {"type": "string"}},
        "required": ["title"],
        "$defs": {"default": {"enum": [{"title": "x"}]}},
        **CLOSED,
    }
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object"},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "string"}},
        {**A, "unevaluatedProperties": False},
        {**A, "patternProperties": {"^x": {}}},
        {**A, "required": ["a", "b"]},
        {**A, "minProperties": 2},
        {"allOf": [A, B]},
        {**A, "allOf": [B]},
        {**A, "anyOf": [B, {"required": ["a"]}]},
        {**A, "$ref": "#/$defs/b", "$defs": {"b": B}},
        {"allOf": [{"$ref": "#/$defs/a"}, B], "$defs": {"a": A}},
        {"allOf": [{"$ref": "#/$defs/c"}, B], "$defs": {"a": A, "c": {"$ref": "#/$defs/a"}}},
        {"allOf": [{"anyOf": [A, {"type": "null"}]}, B]},
        {"allOf": [{"$ref": "#/$defs/u"}, B], "$defs": {"u": {"anyOf": [A, B]}}},
        {"allOf": [{"$ref": "#/$defs/x~1%20y"}, B], "$defs": {"x/ y": A}},
        {"if": A, "then": B, "else": {"not": A}},
        {"const": {"properties": {}}},
        {"properties": 5, "items": 5, "anyOf": 5, "$ref": 5},
    ],
)
def test_what_stays_as_it_is(schema: Any) -> None:
    """It says itself what other properties there are, or others say it with it."""
    assert grammar_schema(schema) == schema


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, {**A, **CLOSED}),
        ({"properties": {}}, {"properties": {}, **CLOSED}),
        ({"items": A}, {"items": {**A, **CLOSED}}),
        ({"items": [A, B]}, {"items": [{**A, **CLOSED}, {**B, **CLOSED}]}),
        ({"anyOf": [A, B]}, {"anyOf": [{**A, **CLOSED}, {**B, **CLOSED}]}),
        ({"allOf": [A]}, {"allOf": [{**A, **CLOSED}]}),
        (
            {"allOf": [{"properties": {"x": A}}, B]},
            {"allOf": [{"properties": {"x": {**A, **CLOSED}}}, B]},
        ),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": A}},
            {"$ref": "#/$defs/a", "$defs": {"a": {**A, **CLOSED}}},
        ),
        (
            {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": A}},
            {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {**A, **CLOSED}}},
        ),
    ],
)
def test_objects_are_closed(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert grammar_schema(schema) == expected
    assert grammar_schema(expected) == expected


def test_recursive_schemas() -> None:
    tree = {"properties": {"left": {"$ref": "#"}, "right": {"anyOf": [{"$ref": "#"}]}}}
    assert grammar_schema(tree) == {**tree, **CLOSED}


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"minimum": 1e999}', '{"const": NaN}'])
def test_a_text_that_is_no_json_is_left_to_the_compiler(text: str) -> None:
    assert grammar_schema_text(text) == text


def test_deep_schemas_are_left_to_the_compiler() -> None:
    text = '{"items":' * 5000 + "{}" + "}" * 5000
    assert grammar_schema_text(text) == text
