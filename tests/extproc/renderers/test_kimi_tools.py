"""Kimi's tools as TypeScript, compared with what the code of its checkpoints wrote.

The recording has random schemas, and what the copy of that code in tinker-cookbook 0.6.1 made of
them; None where it fails.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from extproc.base.errors import RequestError
from extproc.renderers.kimi_tools import MAX_DEPTH, declarations

RECORDING = Path(__file__).with_name("kimi_k2.5_tools.jsonl")
LINES = [json.loads(line) for line in RECORDING.read_text().splitlines()]


def declared(*functions: dict[str, Any]) -> str | None:
    return declarations([{"type": "function", "function": one} for one in functions])


def of(schema: Any) -> str | None:
    """The declaration of a function with one argument."""
    return declared({"name": "f", "parameters": {"properties": {"a": schema}}})


def test_tools_are_written_as_kimis_code_writes_them() -> None:
    assert sum(line["written"] is None for line in LINES) > 10
    for line in LINES:
        assert declared(*line["tools"]) == line["written"], line["tools"]


def test_functions_follow_each_other() -> None:
    first, second = {"name": "f", "description": "Does.\n\nIt."}, {"name": "g"}
    text = "// Does.\n\n// It.\ntype f = (_: {}) => any;\ntype g = (_: {}) => any;\n"
    assert declared(first, second) == f"# Tools\n\n## functions\nnamespace functions {{\n{text}}}\n"


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        nested(MAX_DEPTH + 1),
        {"type": "array", "items": "type"},
        {"type": "array", "items": ["type"]},
        {"anyOf": {"type": "string"}},
        {"enum": "ab"},
        {"type": 5},
        {"type": "$ref"},
        {"type": "object", "$defs": ["a"]},
        {"type": "object", "additionalProperties": 1},
        {"type": "object", "properties": {}, "required": [1]},
        {"type": "string", "description": ["a"]},
    ],
)
def test_schema_is_refused_of_which_nothing_is_known(schema: Any) -> None:
    with pytest.raises(RequestError, match="unsupported_tools"):
        of(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"description": "no type"},
        {"type": "array", "items": [{"type": "string"}]},
        {"type": ["string", "any"]},
        {"type": "object", "properties": ["a"]},
        {"$ref": "#/properties/a"},
        {"$ref": "#/$defs/missing"},
        {"enum": [1], "type": "string"},
        {"enum": [1], "type": ["string", "number"]},
        {"type": "object", "$defs": {"A": True}},
    ],
)
def test_schema_that_kimis_code_fails_at_leaves_the_tools_to_the_template(schema: Any) -> None:
    assert of(schema) is None
