"""What JSON types the parameters of a function may have, for calls that write values without types.

Reads any schema of a function: what it does not understand says nothing.
"""

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol
from urllib.parse import unquote

TYPES = frozenset(("string", "integer", "number", "boolean", "null", "object", "array"))
_OTHER_NAMES = {
    "str text varchar char enum": "string",
    "int long short uint unsigned": "integer",
    "float double decimal num": "number",
    "bool": "boolean",
    "none nil": "null",
    "dict map struct": "object",
    "list tuple set arr": "array",
}
"""Names of types in programming languages, which clients write."""
_BY_NAME = {
    **{name: name for name in TYPES},
    **{name: kind for names, kind in _OTHER_NAMES.items() for name in names.split()},
}
_NAME = re.compile(r"[a-z]+")
_OF_VALUE = {
    dict: "object",
    list: "array",
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
}
_IMPLIED = {
    "properties patternProperties additionalProperties required": "object",
    "items prefixItems minItems maxItems": "array",
    "minLength maxLength pattern": "string",
    "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf": "number",
}
"""Keywords that apply to one type only."""
_BRANCHES = ("allOf", "anyOf", "oneOf")
_MAX_DEPTH = 64  # depth of schemas and references that say of what type one value is

_Types = frozenset[str] | None  # None stands for any type


class ParameterTypes:
    """The types of the parameters in a schema, which must not change; None declares none."""

    def __init__(self, schema: Mapping[str, Any] | None) -> None:
        self._root: Mapping[str, Any] = schema or {}
        self._of_schema: dict[int, _Types] = {}  # by id
        self._of_name: dict[str, frozenset[str]] = {}

    def of(self, name: str) -> frozenset[str]:
        """Return the types that a parameter may have; a string if nothing is said of it."""
        if (found := self._of_name.get(name)) is None:
            declared: list[_Types] = []
            other: list[_Types] = []
            for schema in self._about_arguments:
                named = _named(schema, name)
                declared += [self._types(part, 0) for part in named]
                if not named:
                    rest = schema.get("additionalProperties", schema.get("unevaluatedProperties"))
                    other.append(self._types(rest, 0))
            found = _either(declared) or _either(other) or frozenset({"string"})
            self._of_name[name] = found
        return found

    @functools.cached_property
    def declared(self) -> frozenset[str]:
        """The names of the parameters that the schema declares."""
        declared = [schema.get("properties") for schema in self._about_arguments]
        return frozenset(name for names in declared if isinstance(names, Mapping) for name in names)

    @functools.cached_property
    def _about_arguments(self) -> list[Mapping[str, Any]]:
        """The schemas that may say what properties the arguments have; each once."""
        found: dict[int, Mapping[str, Any]] = {}  # by id
        unread: list[Any] = [self._root]
        while unread:
            schema = unread.pop()
            if not isinstance(schema, Mapping) or id(schema) in found:
                continue
            found[id(schema)] = schema
            unread += [part for key in _BRANCHES for part in _list(schema.get(key))]
            unread += [self._referred(schema), schema.get("then"), schema.get("else")]
            if isinstance(dependent := schema.get("dependentSchemas"), Mapping):
                unread += dependent.values()
        return list(found.values())

    def _types(self, schema: Any, depth: int) -> _Types:
        """Return the types of a value that fits a schema."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return None
        if id(schema) in self._of_schema:
            return self._of_schema[id(schema)]
        self._of_schema[id(schema)] = None  # a schema that refers to itself says nothing by that
        found = _named_types(schema.get("type"))
        values = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
        found = _both(found, _either(_OF_VALUE.get(type(value)) for value in values))
        found = _both(found, self._types(self._referred(schema), depth + 1))
        for part in _list(schema.get("allOf")):
            found = _both(found, self._types(part, depth + 1))
        for key in ("anyOf", "oneOf"):
            branches = _list(schema.get(key))
            found = _both(found, _either(self._types(part, depth + 1) for part in branches))
        if found is None:
            implied = (kind for keys, kind in _IMPLIED.items() if schema.keys() & set(keys.split()))
            found = _either(implied)
        if found is not None and schema.get("nullable") is True:
            found |= {"null"}
        self._of_schema[id(schema)] = found
        return found

    def _referred(self, schema: Mapping[str, Any]) -> Any:
        """Return the schema that a schema's reference, such as #/$defs/City, names; or None."""
        reference = schema.get("$ref", schema.get("$dynamicRef", schema.get("$recursiveRef")))
        if not isinstance(reference, str) or not (reference == "#" or reference[:2] == "#/"):
            return None
        part: Any = self._root
        for key in unquote(reference[1:]).split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(part, list) and key.isdecimal() and int(key[:9]) < len(part):
                part = part[int(key[:9])]
            else:
                part = part.get(key) if isinstance(part, Mapping) else None
        return part


class Function(Protocol):
    """A function that a model may call."""

    @property
    def name(self) -> str: ...
    @property
    def parameters(self) -> Mapping[str, Any] | None: ...
    @property
    def strict(self) -> bool | None: ...
    @property
    def types(self) -> ParameterTypes: ...


def _named(schema: Mapping[str, Any], name: str) -> list[Any]:
    """Return the schemas that a schema of an object may have for the property `name`."""
    properties = schema.get("properties")
    patterns = schema.get("patternProperties")
    if isinstance(properties, Mapping) and name in properties:
        return [properties[name]]
    # Which of the patterns match is not looked at.
    return list(patterns.values()) if isinstance(patterns, Mapping) else []


def _named_types(names: Any) -> _Types:
    """Return the types that the value of the keyword "type" names."""
    given = [names] if isinstance(names, str) else _list(names)
    words = [_NAME.match(name.lower()) for name in given if isinstance(name, str)]
    return _either(_BY_NAME.get(word[0]) for word in words if word is not None)


def _either(kinds: Iterable[str | _Types]) -> _Types:
    """Return the types of alternatives: sets of types, or types. None says nothing."""
    found: set[str] = set()
    for kind in kinds:
        found |= {kind} if isinstance(kind, str) else kind or set()
    return frozenset(found) or None


def _both(first: _Types, second: _Types) -> _Types:
    """Return the types that fit both, or either where none fits both."""
    if first is None or second is None:
        return second if first is None else first
    shared = first & second
    for one, other in ((first, second), (second, first)):
        if "integer" in one and "number" in other:
            shared |= {"integer"}
    return shared or first | second


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
