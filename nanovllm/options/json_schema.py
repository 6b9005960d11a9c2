"""JSON schemas as grammars get them: without annotations, and with closed objects.

Knows what keywords hold schemas, and not what they mean. A value: nothing here is changed.
"""

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

_ANNOTATIONS = {
    "title",
    "description",
    "examples",
    "default",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
}
X_GUIDANCE = {
    "lenient": True,
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""For llguidance, in the schemas of grammars that are made of what a request has: JSON with the
spaces that models know, and no others. What it then does not enforce comes as a warning."""
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
"""Keywords that hold schemas by name."""
_LISTS = {"allOf", "anyOf", "oneOf", "prefixItems", "items"}
"""Keywords that hold lists of schemas."""
_SINGLE = {
    "items",
    "additionalItems",
    "unevaluatedItems",
    "contains",
    "additionalProperties",
    "unevaluatedProperties",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
}
"""Keywords that hold one schema."""
_IN_PLACE = {"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas"}
"""Keywords whose schemas are about the same value as the schema that has them."""
_OTHERS = {
    "properties",
    "patternProperties",
    "allOf",
    "anyOf",
    "oneOf",
    "if",
    "dependentSchemas",
    "$ref",
}
"""Keywords that may name properties of the value next to a schema of `_IN_PLACE` or a `$ref`."""
_SAYS_MORE = _OTHERS - {"properties"} | {
    "additionalProperties",
    "unevaluatedProperties",
    "minProperties",
    "not",
    "$dynamicRef",
}
"""Keywords with which a schema says itself what other properties there are, or may say it."""

_Place = tuple[str, ...]
"""Where a schema stands: the keys and indices that lead to it."""


def grammar_schema(schema: Any) -> Any:
    """Return a schema without what asks for nothing, whose objects have declared properties only.

    An object is closed if its schema has `properties` and leaves open whether there are others. It
    stays open where several schemas say together what it is, such as those of an `allOf`, and where
    it requires a property that it does not declare.

    Raises:
        RecursionError: it is nested too deeply.
    """
    shared = _shared_places(schema)
    copied = json.loads(json.dumps(schema))
    _convert(copied, (), shared)
    return copied


def grammar_schema_text(text: str) -> str:
    """Return `grammar_schema` of a JSON text; the text itself if it is not JSON."""
    try:
        return json.dumps(grammar_schema(json.loads(text)), allow_nan=False)
    except (ValueError, RecursionError):
        return text


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, _Place, Any]]:
    """Yield the schemas in a schema: the keyword, their place in it, and themselves."""
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):
            for name, part in value.items():
                yield key, (key, name), part
        elif key in _LISTS and isinstance(value, list):
            for index, part in enumerate(value):
                yield key, (key, str(index)), part
        elif key in _SINGLE:
            yield key, (key,), value


def _shared_places(schema: Any) -> set[_Place]:
    """Return the schemas in a schema that speak of a value together with others."""
    shared: set[_Place] = set()
    aliases: dict[_Place, list[_Place]] = {}  # by schema: what speaks of the same value

    def note(place: _Place, owner: _Place, is_shared: bool) -> None:
        if is_shared:
            shared.add(place)
        else:
            aliases.setdefault(owner, []).append(place)

    def visit(schema: Any, place: _Place, owner: _Place, is_shared: bool) -> None:
        """Note what is in a schema. `owner` is the outermost one that speaks of the same value, and
        `is_shared` says whether others describe it besides those between `owner` and this one.
        """
        if not isinstance(schema, dict):
            return
        note(place, owner, is_shared)
        others = schema.keys() & _OTHERS
        if isinstance(ref := schema.get("$ref"), str) and ref.startswith("#"):
            keys = (unquote(key) for key in ref[1:].split("/")[1:])
            target = tuple(key.replace("~1", "/").replace("~0", "~") for key in keys)
            note(target, owner, is_shared or len(others) > 1)
        for key, inner, part in _parts(schema):
            if key not in _IN_PLACE:
                visit(part, place + inner, place + inner, False)
            else:
                alone = key in ("anyOf", "oneOf") or (key == "allOf" and len(schema[key]) == 1)
                visit(part, place + inner, owner, is_shared or not alone or len(others) > 1)

    visit(schema, (), (), False)
    unread = list(shared)
    while unread:
        new = set(aliases.get(unread.pop(), ())) - shared
        shared |= new
        unread += new
    return shared


def _convert(schema: Any, place: _Place, shared: set[_Place]) -> None:
    if not isinstance(schema, dict):
        return
    for key in schema.keys() & _ANNOTATIONS:
        del schema[key]
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    for _, inner, part in _parts(schema):
        _convert(part, place + inner, shared)
    if place not in shared and _declares_all(schema):
        schema["additionalProperties"] = False


def _declares_all(schema: dict[str, Any]) -> bool:
    """Whether a schema names all properties of its objects, as far as it says."""
    declared = schema.get("properties")
    required = schema.get("required", [])
    if not isinstance(declared, dict) or not isinstance(required, list):
        return False
    # What is no name is left to the compiler, which refuses it.
    known = all(isinstance(name, str) and name in declared for name in required)
    return known and not schema.keys() & _SAYS_MORE
