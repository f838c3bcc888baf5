"""Tools as TypeScript, compared with what oss-harmony 0.0.11 wrote of the same random schemas."""

import json
from pathlib import Path
from typing import Any

import pytest

from extproc.base.errors import RequestError
from extproc.renderers.typescript import MAX_DEPTH, in_json, lines_of, namespace

RECORDING = Path(__file__).with_name("oss_harmony_0.0.11_tools.jsonl")
LINES = [json.loads(line) for line in RECORDING.read_text().splitlines()]


def test_tools_are_written_as_the_library_writes_them() -> None:
    assert len(LINES) > 100
    for line in LINES:
        assert namespace(line["functions"]) == line["text"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0"),
        (-0.0, "-0.0"),
        (1.5, "1.5"),
        (1e15, "1000000000000000.0"),
        (1.25e16, "1.25e+16"),
        (5e-05, "0.00005"),
        (1.5e-06, "1.5e-6"),
        (5e-324, "5e-324"),
        (2**64 - 1, "18446744073709551615"),
        (2**64, "1.8446744073709552e+19"),
        ({"a": [1, "é\n", None, True]}, '{"a":[1,"é\\n",null,true]}'),
    ],
)
def test_values_are_written_as_the_library_writes_them(value: object, text: str) -> None:
    assert in_json(value) == text


@pytest.mark.parametrize(
    ("text", "lines"), [("", []), ("a", ["a"]), ("a\r\nb\n", ["a", "b"]), ("\n\n", ["", ""])]
)
def test_lines_end_as_in_the_library(text: str, lines: list[str]) -> None:
    assert lines_of(text) == lines


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def test_parameters_are_refused_that_are_nested_too_deeply() -> None:
    function = {"name": "f", "parameters": nested(MAX_DEPTH)}
    assert "string" + "[]" * MAX_DEPTH in namespace([function])
    with pytest.raises(RequestError, match="template_failed"):
        namespace([{"name": "f", "parameters": nested(MAX_DEPTH + 1)}])
