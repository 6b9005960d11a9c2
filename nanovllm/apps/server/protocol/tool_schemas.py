"""Checks the schemas of tools: their size, and the form of the keywords that are read.

Unknown types of values pass, since models are shown the schema as it is.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from nanovllm.apps.server.protocol.common import refused
from nanovllm.options.validation import shown

MAX_VALUES = 2**15
"""JSON values in the schemas of a request's tools: each is looked at."""
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "unevaluatedProperties", "not", "if", "then", "else")


def check_size(schemas: Iterable[Any], field: str) -> None:
    """Refuse schemas that have too many values in all.

    Args:
        field: that of the model which has them.

    Raises:
        PydanticCustomError: it says how many values there may be.
    """
    unread = list(schemas)
    num_values = len(unread)
    while unread:
        value = unread.pop()
        if isinstance(value, dict | list):
            num_values += len(value)
            if num_values > MAX_VALUES:
                raise refused(
                    field,
                    f"the schemas of tools have more than {MAX_VALUES} values: send fewer tools, "
                    "or simpler ones",
                )
            unread += value.values() if isinstance(value, dict) else value


def check_keywords(schema: Mapping[str, Any], field: str) -> None:
    """Refuse the schema of a tool's parameters in which a keyword has no value that it can have.

    An empty value counts as absent.

    Args:
        field: what the request calls the schema.

    Raises:
        PydanticCustomError: it names the place and the rule.
    """
    unread: list[tuple[str, Any]] = [(field, schema)]
    while unread:
        place, part = unread.pop()
        if not isinstance(part, dict):
            continue
        for key, rule, is_right in _RULES:
            if (value := part.get(key)) and not is_right(value):
                raise refused(f"{place}.{key}", f"{place}.{key} must be {rule}, got {shown(value)}")
        for key in _BY_NAME:
            if named := part.get(key):
                unread += [(f"{place}.{key}.{name}", each) for name, each in named.items()]
        for key in _LISTS:
            if parts := part.get(key):
                unread += [(f"{place}.{key}[{index}]", each) for index, each in enumerate(parts)]
        unread += [(f"{place}.{key}", part[key]) for key in _SCHEMAS if key in part]


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return all(isinstance(name, str) for name in names)


_RULES = (
    ("type", 'the name of a type such as "string", or a list of them', _is_type),
    ("$ref", 'a text such as "#/$defs/name"', _is_text),
    ("enum", "a list of values", _is_list),
    *((key, "a list of schemas", _is_list) for key in _LISTS),
    *((key, "an object of schemas by name", _is_dict) for key in _BY_NAME),
)
