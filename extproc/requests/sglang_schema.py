"""Types in the schemas of tools' parameters, as SGLang replaces them before templates get them.

Databases and libraries name types that JSON Schema does not have; the engine writes the nearest of
its own. What is no schema (examples, defaults, values of `enum`) stays.

Source: normalize_json_schema_types of SGLang 0.5.13 to 0.5.23 (srt/function_call/utils.py), for
chat completions and messages; earlier releases refuse such types, and responses keep them.
"""

from collections.abc import Mapping
from typing import Any

_STANDARD = frozenset(("null", "boolean", "object", "array", "number", "string", "integer"))

_NAMED: Mapping[str, tuple[str, ...]] = {
    "string": (
        *("str", "text", "varchar", "char", "enum", "uuid", "date", "datetime", "time"),
        *("timestamp", "binary", "blob", "bytea", "bytes", "varbinary"),
    ),
    "boolean": ("bool",),
    "integer": ("bigint", "smallint", "tinyint"),
    "number": ("double", "decimal", "real", "numeric"),
    "array": ("arr", "tuple", "set"),
    "object": ("map",),
}
_ALIASES = {alias: standard for standard, names in _NAMED.items() for alias in names}

# Beginnings of names that go on with a digit, a bracket or a space, or end there.
_BEGINNINGS = {
    **dict.fromkeys(("int", "uint", "long", "short", "unsigned"), "integer"),
    **dict.fromkeys(("num", "float"), "number"),
    "list": "array",
    "dict": "object",
}
_BOUNDARIES = frozenset("0123456789[<( \t")

# Keywords with schemas by name, lists of schemas, and one schema (or a list of them).
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = (
    *("items", "additionalProperties", "not", "if", "then", "else", "contains"),
    *("propertyNames", "unevaluatedItems", "unevaluatedProperties"),
)


def with_standard_types(schema: Any) -> Any:
    """Returns a schema with the types that templates get, in the order of its keys."""
    return schema if _is_standard(schema) else _replaced(schema)


def _is_standard(schema: object) -> bool:
    """Returns whether every `type` in it is a standard one, so that nothing is replaced."""
    if isinstance(schema, list):
        return all(map(_is_standard, schema))
    if not isinstance(schema, dict):
        return True
    kind = schema.get("type")
    if isinstance(kind, str) and kind not in _STANDARD:
        return False
    if isinstance(kind, list) and kind != _list_of_types(kind):
        return False
    return all(map(_is_standard, schema.values()))


def _replaced(schema: Any) -> Any:
    if isinstance(schema, list):
        return list(map(_replaced, schema))
    if not isinstance(schema, dict):
        return schema
    return {key: _of_keyword(key, value) for key, value in schema.items()}


def _of_keyword(key: str, value: Any) -> Any:
    """Returns the value of a keyword of a schema."""
    if key == "type":
        return _type_or_types(value)
    if key in _SCHEMAS or (key in _LISTS and isinstance(value, list)):
        return _replaced(value)
    if key in _BY_NAME and isinstance(value, dict):
        return {name: _replaced(one) for name, one in value.items()}
    return value


def _type_or_types(value: Any) -> Any:
    if isinstance(value, list):
        return _list_of_types(value)
    return _type(value) if isinstance(value, str) else value


def _list_of_types(kinds: list[Any]) -> list[Any]:
    found: list[Any] = []
    for kind in kinds:
        one = _type(kind) if isinstance(kind, str) else kind
        if one not in found:
            found.append(one)
    return found


def _type(kind: str) -> str:
    if kind in _STANDARD:
        return kind
    base = kind.partition("(")[0].strip().lower()
    if base in _STANDARD:
        return base
    if base in _ALIASES:
        return _ALIASES[base]
    for beginning, standard in _BEGINNINGS.items():
        rest = base.removeprefix(beginning)
        if base.startswith(beginning) and (not rest or rest[0] in _BOUNDARIES):
            return standard
    return kind
