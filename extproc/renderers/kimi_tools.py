"""Tools as TypeScript, in the words of Kimi's models from K2.5 on.

Source: behaviour of the code that these checkpoints ship (tool_declaration_ts.py, with tools whose
keys were sorted before), as the package tinker-cookbook 0.6.1 has it; tests compare the two. What
that code cannot write, the chat template gets as JSON alone.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from extproc.base.errors import RequestError

# Deeper parameters are refused; Python's own limit ends the engine's code somewhere behind.
MAX_DEPTH = 50

_INDENT = "  "
_DEFINITIONS = "#/$defs/"

# Names of the types that a list of types may have.
_UNION = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}

# What is told about the values of a type.
_LIMITS: Mapping[str, Sequence[str]] = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}

# The keys by which a schema is read, before its type; and the kind of one with several types.
_KEYS = ("$ref", "anyOf", "enum")
_SEVERAL = ""

# What an enumeration's values must be, by its type.
_CLASSES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
}


class _UnwrittenError(Exception):
    """The engine's code fails, and leaves the tools to the template."""


def declarations(tools: Iterable[Mapping[str, Any]]) -> str | None:
    """Returns tools as declarations of functions; None if Kimi's code cannot write them.

    tools: of chat completions, with all keys in order.

    Raises:
        RequestError: they have a form of which it is not known what the code makes
            (unsupported_tools).
    """
    try:
        functions = [_function(tool["function"]) for tool in tools]
    except _UnwrittenError:
        return None
    written = "\n".join(functions)
    return f"# Tools\n\n## functions\nnamespace functions {{\n{written}\n}}\n"


def _function(function: Mapping[str, Any]) -> str:
    parameters = function.get("parameters") or {}
    schemas = _Schemas()
    schemas.check(parameters, "object", 0)
    names_itself = schemas.has_self
    interfaces = []
    if names_itself:
        fields = schemas.fields(parameters, _INDENT)
        body = "\n{}\n".format(",\n".join(fields)) if fields else ""
        interfaces.append(f"interface parameters {{{body}}}")
    for name, schema in list(schemas.definitions.items()):
        schemas.check_any(schema, 0)
        if not isinstance(schema, dict):
            raise _UnwrittenError
        description = "".join(f"{line}\n" for line in _comment(schema, ""))
        interfaces.append(f"{description}interface {name} {schemas.written(schema, '')}")
    given = "parameters" if names_itself else schemas.object(parameters, "")
    parts = ["\n".join(interfaces), "\n".join(_comment(function, ""))]
    parts.append(f"type {function['name']} = (_: {given}) => any;")
    return "\n".join(filter(None, parts))


class _Schemas:
    """The JSON schemas of one function.

    definitions: by name, those that were found so far. has_self: whether the parameters name
    themselves.
    """

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self.has_self = False

    def check_any(self, schema: Any, depth: int) -> None:
        """Reads a schema: notes its definitions, and whether it names the parameters.

        Raises:
            _UnwrittenError: the engine's code cannot read it. RequestError: as `declarations`.
        """
        if isinstance(schema, bool):
            return
        if isinstance(schema, list) and not any(key in schema for key in (*_KEYS, "type")):
            raise _UnwrittenError
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            raise _unknown()
        self.check(schema, _kind_of(schema), depth)

    def check(self, schema: dict[str, Any], kind: str, depth: int) -> None:
        """Does the same for a schema of a kind."""
        if kind == "$ref":
            self._check_reference(schema["$ref"])
        elif kind == "anyOf":
            for one in _list_in(schema, "anyOf"):
                self.check_any(one, depth + 1)
        elif kind == "enum":
            _check_values(schema)
        elif kind == "object":
            self._check_object(schema, depth)
        elif kind == "array" and schema.get("items"):
            self.check_any(schema["items"], depth + 1)

    def _check_reference(self, name: Any) -> None:
        if name == "#":
            self.has_self = True
            return
        is_name = isinstance(name, str) and name.startswith(_DEFINITIONS)
        if not is_name or not isinstance(self.definitions.get(_last(name)), dict):
            raise _UnwrittenError

    def _check_object(self, schema: dict[str, Any], depth: int) -> None:
        definitions = schema.get("$defs") or {}
        more = schema.get("additionalProperties")
        if not isinstance(definitions, dict) or not isinstance(more, dict | bool | None):
            raise _unknown()
        self.definitions.update(definitions)
        self.check_any(more or False, depth + 1)
        _required(schema)
        for one in _properties(schema).values():
            self.check_any(one, depth + 1)

    def written(self, schema: Any, indent: str) -> str:
        """Returns a schema that was read as a type."""
        if isinstance(schema, bool):
            return "any" if schema else "null"
        kind = _kind_of(schema)
        if kind == "$ref":
            return self._reference(schema["$ref"])
        if kind == "anyOf":
            return " | ".join([self.written(one, indent) for one in schema["anyOf"]])
        if kind == "object":
            return self.object(schema, indent)
        return self._array(schema, indent) if kind == "array" else _plain(schema, kind)

    def _reference(self, name: str) -> str:
        named = {"$self_ref": True} if name == "#" else self.definitions[_last(name)]
        return "parameters" if named.get("$self_ref") else _last(name)

    def object(self, schema: dict[str, Any], indent: str) -> str:
        """Returns an object's schema as a type, with what it requires first."""
        inner = indent + _INDENT
        fields = self.fields(schema, inner, sorts=True)
        more = schema.get("additionalProperties")
        if more is not None:
            kind = "never" if more is False else self.written(more, inner)
            fields.append(f"{inner}[k: string]: {kind}")
        return "{{\n{}\n{}}}".format(",\n".join(fields), indent) if fields else "{}"

    def fields(self, schema: dict[str, Any], indent: str, *, sorts: bool = False) -> list[str]:
        """Returns the properties of an object. sorts: what it requires first, each by name."""
        required, properties = _required(schema), list(_properties(schema).items())
        if sorts:
            properties.sort(key=lambda one: (one[0] not in required, one[0]))
        return [self._field(name, one, name in required, indent) for name, one in properties]

    def _field(self, name: str, schema: Any, is_required: bool, indent: str) -> str:
        lines = list(_comments(schema, indent))
        default = schema.get("default") if isinstance(schema, dict) else None
        if default is not None:
            is_number = isinstance(default, int | float)
            shown = repr(default) if is_number else json.dumps(default, ensure_ascii=False)
            lines.append(f"{indent}// Default: {shown}")
        mark = "" if is_required else "?"
        return "\n".join([*lines, f"{indent}{name}{mark}: {self.written(schema, indent)}"])

    def _array(self, schema: dict[str, Any], indent: str) -> str:
        item, inner = schema.get("items") or True, indent + _INDENT
        comments = list(_comments(item, inner))
        if not comments:
            return f"Array<{self.written(item, indent)}>"
        return "\n".join(["Array<", *comments, f"{inner}{self.written(item, inner)}", f"{indent}>"])


def _unknown() -> RequestError:
    return RequestError("unsupported_tools")


def _kind_of(schema: Mapping[str, Any]) -> str:
    """Returns which kind of schema one is: a key of it, _SEVERAL, or its type.

    Raises:
        _UnwrittenError: it is of none. RequestError: as `declarations`.
    """
    for key in _KEYS:
        if key in schema:
            return key
    if not schema:
        return "any"
    if "type" not in schema:
        raise _UnwrittenError
    kind = schema["type"]
    if isinstance(kind, list):
        if not all(isinstance(one, str) and one in _UNION for one in kind):
            raise _UnwrittenError
        return _SEVERAL
    if not isinstance(kind, str) or kind in _KEYS:
        raise _unknown()
    return kind


def _plain(schema: Mapping[str, Any], kind: str) -> str:
    """Returns a type in which there is no other."""
    if kind == "enum":
        return " | ".join(
            [f'"{one}"' if isinstance(one, str) else str(one) for one in schema["enum"]]
        )
    if kind == _SEVERAL:
        return " | ".join([_UNION[one] for one in schema["type"]])
    return "number" if kind == "integer" else kind


def _list_in(schema: Mapping[str, Any], key: str) -> list[Any]:
    found = schema[key]
    if not isinstance(found, list):
        raise _unknown()
    return found


def _check_values(schema: Mapping[str, Any]) -> None:
    """Raises an error as `_Schemas.check_any` if values are not of the type that is named."""
    values, kind = _list_in(schema, "enum"), schema.get("type")
    if isinstance(kind, list):
        if len(kind) not in (1, 2) or (len(kind) == 2 and "null" not in kind):
            raise _UnwrittenError
        kind = kind[-1] if kind[0] == "null" else kind[0]
    wanted = _CLASSES.get(kind, object) if isinstance(kind, str) else object
    if not all(isinstance(value, wanted) for value in values if value is not None):
        raise _UnwrittenError


def _properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    found = schema.get("properties", {})
    if not isinstance(found, dict):
        raise _UnwrittenError
    return found


def _required(schema: Mapping[str, Any]) -> frozenset[str]:
    found = schema.get("required", []) if "properties" in schema else []
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise _unknown()
    return frozenset(found)


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _comment(schema: Mapping[str, Any], indent: str) -> Iterator[str]:
    """Yields the lines of a description."""
    description = schema.get("description") or ""
    if not isinstance(description, str):
        raise _unknown()
    if description:
        for line in description.split("\n"):
            yield f"{indent}// {line}" if line else ""


def _comments(schema: Any, indent: str) -> Iterator[str]:
    """Yields the lines before a type: its description, and its limits."""
    if not isinstance(schema, dict):
        return
    yield from _comment(schema, indent)
    named = _LIMITS.get(_kind_of(schema), ())
    limits = ", ".join([f"{key}: {schema[key]}" for key in named if key in schema])
    if limits:
        yield f"{indent}// {limits}"
