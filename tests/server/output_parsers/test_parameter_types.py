"""The types of parameters follow from the schema of their function, whatever form it has."""

from typing import Any

import pytest

from nanovllm.apps.server.output_parsers.parameter_types import ParameterTypes
from nanovllm.apps.server.protocol import Tool

CITY: dict[str, Any] = {"properties": {"a": {"type": "integer"}}}
STRING = {"string"}


def types(schema: Any, name: str = "a") -> set[str]:
    return set(ParameterTypes(schema).of(name))


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (CITY, {"integer"}),
        # Behind what the root refers to, or consists of.
        ({"$ref": "#/$defs/City", "$defs": {"City": CITY}}, {"integer"}),
        ({"$ref": "#/definitions/A~1b%20c", "definitions": {"A/b c": CITY}}, {"integer"}),
        ({"allOf": [{"properties": {"b": {}}}, CITY]}, {"integer"}),
        ({"$ref": "#/allOf/1", "allOf": [{}, CITY]}, {"integer"}),
        ({"anyOf": [{"properties": {"a": {"type": "null"}}}, CITY]}, {"integer", "null"}),
        ({"oneOf": [CITY, {"$ref": "#/$defs/x"}], "$defs": {"x": CITY}}, {"integer"}),
        (
            {"if": {}, "then": CITY, "else": {"properties": {"a": {"type": "null"}}}},
            {"integer", "null"},
        ),
        ({"dependentSchemas": {"b": CITY}}, {"integer"}),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, {"object"}),
        ({"properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "boolean"}}}, {"boolean"}),
        # By the name of the property, or the lack of one.
        ({"patternProperties": {"^a": {"type": "integer"}}}, {"integer"}),
        ({"patternProperties": {"^a": {"type": "integer"}}, "properties": {"a": {}}}, STRING),
        ({"properties": {"b": {}}, "additionalProperties": {"type": "integer"}}, {"integer"}),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "integer"}}, STRING),
        ({"allOf": [CITY, {"additionalProperties": {"type": "null"}}]}, {"integer"}),
        ({"unevaluatedProperties": {"type": "integer"}}, {"integer"}),
        # What is no schema says nothing.
        (None, STRING),
        ({}, STRING),
        ({"properties": [1]}, STRING),
        ({"properties": {"a": True}}, STRING),
        ({"$ref": "elsewhere#/x"}, STRING),
        ({"type": "object", "properties": {"a": {"$ref": "#City"}}}, STRING),
        ({"$ref": "#/allOf/7", "allOf": 5, "anyOf": {}, "patternProperties": []}, STRING),
        ({"$ref": 5}, STRING),
    ],
)
def test_where_a_parameter_is_declared(schema: Any, expected: set[str]) -> None:
    assert types(schema) == expected


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"type": "float"}, {"number"}),
        ({"type": "int64"}, {"integer"}),
        ({"type": "Dict[str, Any]"}, {"object"}),
        ({"type": "list[int]"}, {"array"}),
        ({"type": ["bool", "None"]}, {"boolean", "null"}),
        ({"type": "any"}, STRING),
        ({"type": 5}, STRING),
        ({"type": [5, {}]}, STRING),
        ({"type": "integer", "nullable": True}, {"integer", "null"}),
        ({"enum": [1, "x", None]}, {"integer", "string", "null"}),
        ({"enum": 5}, STRING),
        ({"const": True}, {"boolean"}),
        ({"items": {}}, {"array"}),
        ({"minimum": 0}, {"number"}),
        ({"additionalProperties": False}, {"object"}),
        # All of what a schema says holds at once.
        ({"anyOf": [{"type": "number"}, {"type": "string"}], "type": "integer"}, {"integer"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": ["null", "array"]}]}, {"null"}),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"anyOf": [{"type": "integer"}, {}, True]}, {"integer"}),
        ({"anyOf": 5, "oneOf": [5], "allOf": None}, STRING),
    ],
)
def test_types_of_a_schema(schema: Any, expected: set[str]) -> None:
    assert types({"properties": {"a": schema}}) == expected


def test_schemas_that_branch_without_end_take_no_time() -> None:
    refs = [{"$ref": f"#/$defs/{index}"} for index in range(50)]
    defs = {str(index): {"anyOf": refs} for index in range(50)}
    assert types({"$defs": defs, "properties": {"a": refs[0]}}) == STRING
    assert types({"$defs": defs, "anyOf": refs}) == STRING


def test_a_long_chain_of_references_ends() -> None:
    defs = {str(index): {"$ref": f"#/$defs/{index + 1}"} for index in range(5000)}
    assert types({"$defs": defs, "properties": {"a": {"$ref": "#/$defs/0"}}}) == STRING


def test_declared_names() -> None:
    schema = {"allOf": [CITY, {"$ref": "#/$defs/x"}], "$defs": {"x": {"properties": {"b": {}}}}}
    assert ParameterTypes(schema).declared == {"a", "b"}
    assert ParameterTypes(None).declared == set()


def test_answers_can_share_what_was_found() -> None:
    tool = Tool(name="f", parameters=CITY)
    assert tool.types.of("a") == {"integer"}
    assert tool.types is tool.types
