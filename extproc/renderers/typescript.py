"""Tools as TypeScript, in the words of the harmony format that gpt-oss was trained on.

Source: the harmony format, as oss-harmony 0.0.11 and openai-harmony 0.0.8 write it; tests compare
the two. Written here since the library tokenizes what it writes while it holds the interpreter's
lock, in a time that grows with the square of a word's length.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from extproc.base.errors import RequestError

# The parser of the library refuses deeper values; a conversation takes some of its levels.
MAX_DEPTH = 100

_NAMES = {"number": "number", "integer": "number", "boolean": "boolean", "array": "Array<any>"}

# Larger integers are read as floating-point numbers.
_MAX_INTEGER, _MIN_INTEGER = 2**64 - 1, -(2**63)


def namespace(functions: Iterable[Mapping[str, Any]]) -> str:
    """Returns functions as the namespace `functions`, each with its parameters' type.

    functions: of tools, with `name`, `description` and `parameters`.

    Raises:
        RequestError: parameters are nested too deeply; the engine refuses that too.
    """
    lines = ["## functions\n", "namespace functions {\n"]
    for function in functions:
        lines += [f"// {line}" for line in lines_of(function.get("description") or "")]
        parameters = function.get("parameters")
        given = "" if parameters is None else f"_: {_type(parameters, '', 0)}"
        lines.append(f"type {function['name']} = ({given}) => any;\n")
    lines.append("} // namespace functions")
    return "\n".join(lines)


def lines_of(text: str) -> list[str]:
    """Returns the lines of a text, without their ends; an end of line ends the last one."""
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def _type(schema: object, indent: str, depth: int) -> str:
    """Returns a JSON schema as a type."""
    if depth > MAX_DEPTH:
        raise RequestError("template_failed")
    if not isinstance(schema, dict):
        return "any"
    variants, kind = schema.get("oneOf"), schema.get("type")
    if isinstance(variants, list):
        return "".join(_variant(one, indent, depth) for one in variants)
    if isinstance(kind, list):
        names = ["number" if one == "integer" else one for one in kind if isinstance(one, str)]
        return " | ".join(names) if names else "any"
    return _named(str(kind), schema, indent, depth)


def _named(kind: str, schema: dict[str, Any], indent: str, depth: int) -> str:
    """Returns a schema as a type that its `type` names."""
    if kind == "object":
        return "".join(_object(schema, indent, depth))
    if kind == "string":
        return _text(schema)
    if kind == "array" and "items" in schema:
        return f"{_type(schema['items'], indent, depth + 1)}[]"
    return _NAMES.get(kind, "any")


def _text(schema: Mapping[str, Any]) -> str:
    values = schema.get("enum")
    texts = [one for one in values if isinstance(one, str)] if isinstance(values, list) else []
    return " | ".join(f'"{one}"' for one in texts) or "string"


def _variant(schema: object, indent: str, depth: int) -> str:
    """Returns a variant of a type, on a line of its own."""
    fields = schema if isinstance(schema, dict) else {}
    comments = []
    if isinstance(fields.get("description"), str):
        comments.append(fields["description"])
    if "default" in fields:
        default = fields["default"]
        is_bare = isinstance(default, str) and not _has_enum(fields)
        comments.append(f'default: "{default}"' if is_bare else f"default: {in_json(default)}")
    comment = f" // {' '.join(comments)}" if comments else ""
    return f"\n{indent} | {_nullable(schema, indent + '   ', depth)}{comment}"


def _nullable(schema: object, indent: str, depth: int) -> str:
    """Returns a type, or null if the schema says so."""
    written = _type(schema, indent, depth + 1)
    is_nullable = isinstance(schema, dict) and schema.get("nullable") is True
    return f"{written} | null" if is_nullable and "null" not in written else written


def _object(schema: Mapping[str, Any], indent: str, depth: int) -> Iterator[str]:
    yield from _comment(schema.get("description"), indent)
    yield "{\n"
    properties, required = schema.get("properties"), schema.get("required")
    names = [one for one in required if isinstance(one, str)] if isinstance(required, list) else []
    for name, value in properties.items() if isinstance(properties, dict) else ():
        key = f"{indent}{name}{'' if name in names else '?'}:"
        fields = value if isinstance(value, dict) else {}
        yield from _notes(fields, indent)
        if isinstance(fields.get("oneOf"), list):
            yield from _choice(fields, key, indent, depth)
            continue
        yield f"{key} {_nullable(value, indent + '    ', depth)},"
        if "oneOf" not in fields and "default" in fields:
            yield f" // {_default(fields)}"
        yield "\n"
    yield f"{indent}}}"


def _comment(text: object, indent: str) -> Iterator[str]:
    if isinstance(text, str):
        yield f"{indent}// {text}\n"


def _notes(fields: Mapping[str, Any], indent: str) -> Iterator[str]:
    """Yields the comments before a property."""
    if isinstance(fields.get("title"), str):
        yield f"{indent}// {fields['title']}\n{indent}//\n"
    if "oneOf" not in fields:
        yield from _comment(fields.get("description"), indent)
    examples = fields.get("examples")
    if isinstance(examples, list) and examples:
        yield f"{indent}// Examples:\n"
        for example in examples:
            if isinstance(example, str):
                yield f'{indent}// - "{example}"\n'


def _choice(fields: Mapping[str, Any], key: str, indent: str, depth: int) -> Iterator[str]:
    """Yields a property that has variants."""
    variants, description = fields["oneOf"], fields.get("description")
    firsts = [one.get("description") for one in variants[:1] if isinstance(one, dict)]
    is_above = isinstance(description, str) and firsts != [description]
    if is_above:
        yield from _comment(description, indent)
    if "default" in fields:
        yield f"{indent}// {_default(fields)}\n"
    yield f"{key}\n"
    for place, variant in enumerate(variants):
        yield f"{indent} | {_nullable(variant, indent + '   ', depth)}"
        comments = []
        values = variant if isinstance(variant, dict) else {}
        own = values.get("description")
        if not (is_above and place == 0) and isinstance(own, str) and own != description:
            comments.append(own)
        if "default" in values:
            comments.append(_default(values))
        yield f" // {' '.join(comments)}\n" if comments else "\n"
    yield f"{indent},\n"


def _default(fields: Mapping[str, Any]) -> str:
    """Returns the comment on a default value; that of an enumeration is written bare."""
    default = fields["default"]
    if not isinstance(default, str):
        return f"default: {in_json(default)}"
    return f"default: {default}" if _has_enum(fields) else f'default: "{default}"'


def _has_enum(fields: Mapping[str, Any]) -> bool:
    values = fields.get("enum")
    return isinstance(values, list) and bool(values)


def in_json(value: object) -> str:
    """Returns a value as serde_json writes it: compact, with its own form of numbers."""
    if isinstance(value, dict):
        pairs = (f"{in_json(key)}:{in_json(one)}" for key, one in value.items())
        return f"{{{','.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(in_json, value))}]"
    if isinstance(value, float) or _is_large(value):
        return _float(float(value))  # type: ignore[arg-type]
    return json.dumps(value, ensure_ascii=False)


def _is_large(value: object) -> bool:
    return type(value) is int and not _MIN_INTEGER <= value <= _MAX_INTEGER


# Between these, a number is written without an exponent: places before the point.
_LEAST_POINT, _MOST_POINT = -5, 16


def _float(value: float) -> str:
    """Returns a floating-point number in its shortest form. Source: oss-harmony 0.0.11."""
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int)
    text = "".join(map(str, digits))
    minus = "-" if sign else ""
    if value == 0:
        return f"{minus}0.0"
    point = len(text) + exponent
    if exponent >= 0 and point <= _MOST_POINT:
        return f"{minus}{text}{'0' * exponent}.0"
    if 0 < point <= _MOST_POINT:
        return f"{minus}{text[:point]}.{text[point:]}"
    if _LEAST_POINT < point <= 0:
        return f"{minus}0.{'0' * -point}{text}"
    rest = f".{text[1:]}" if len(text) > 1 else ""
    return f"{minus}{text[0]}{rest}e{point - 1:+}"
