"""Requests with one field more than clients send today, in each kind of object in them."""

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

Body = dict[str, Any]


class Planted(NamedTuple):
    """A request with a field in one of its objects. place: of which kind, and the field."""

    path: str
    body: Body
    place: str


# Names that no release knows, that some know of such an object, and that all know of another.
FIELDS: tuple[tuple[str, Any], ...] = (
    ("kvsteer_new", True),
    ("kvsteer_new", None),
    ("kvsteer_new", {"a": [1, "b"]}),
    ("cache_control", {"type": "ephemeral"}),
    ("defer_loading", True),
    ("defer_loading", False),
    ("strict", True),
    ("strict", None),
    ("annotations", {"readOnlyHint": True}),
    ("input_examples", [{"a": 1}]),
    ("name", "n_1"),
    ("description", "d"),
    ("task", "t"),
    ("thinking", "hm"),
    ("uuid", None),
    ("status", "completed"),
    ("id", "x_1"),
)

# What stands below these is the user's own.
_SCHEMAS = ("input_schema", "parameters", "input", "arguments")

_SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}}
_FUNCTION = {"name": "look_up", "description": "Looks a word up.", "parameters": _SCHEMA}
_USER = {"role": "user", "content": "Hello there."}
_CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "look_up", "arguments": '{"word": "fox"}'},
}
_RESULT = [{"type": "text", "text": "an animal"}]
_USE = {"type": "tool_use", "id": "c1", "name": "look_up", "input": {"word": "fox"}}

REQUESTS: tuple[tuple[str, Body], ...] = (
    (
        "/v1/chat/completions",
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "A fox?"}, *_RESULT]},
                {"role": "assistant", "content": "I look.", "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "an animal"},
                _USER,
            ],
            "tools": [{"type": "function", "function": _FUNCTION}],
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    (
        "/v1/messages",
        {
            "model": "m",
            "max_tokens": 9,
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "A fox?"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "I look."}, _USE]},
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c1", "content": _RESULT}],
                },
            ],
            "tools": [{"name": "look_up", "description": "d", "input_schema": _SCHEMA}],
            "metadata": {"user_id": "u"},
        },
    ),
    (
        "/v1/responses",
        {
            "model": "m",
            "instructions": "Be brief.",
            "input": [
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "A fox?"}],
                },
                {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "an animal"},
                _USER,
            ],
            "tools": [
                {"type": "function", **_FUNCTION},
                {
                    "type": "namespace",
                    "name": "words",
                    "description": "d",
                    "tools": [{"type": "function", **_FUNCTION}],
                },
                {"type": "custom", "name": "patch", "description": "d"},
            ],
        },
    ),
)


def planted() -> Iterator[Planted]:
    """Yields each request as it is, and with each field in each kind of object in it."""
    for path, body in REQUESTS:
        yield Planted(path, body, f"{path} as it is")
        for shape, steps in _kinds(body, (), "").items():
            for name, value in FIELDS:
                changed = copy.deepcopy(body)
                target: Any = changed
                for step in steps:
                    target = target[step]
                if name not in target:
                    target[name] = value
                    yield Planted(path, changed, f"{path}{shape} {name}={value!r}")


def _kinds(value: Any, at: tuple[Any, ...], shape: str) -> dict[str, tuple[Any, ...]]:
    """Returns where the first object of each kind is, by the names and types that lead to it."""
    found: dict[str, tuple[Any, ...]] = {}
    if isinstance(value, list):
        for place, one in enumerate(value):
            found = _kinds(one, (*at, place), shape) | found
    elif isinstance(value, dict) and not (at and at[-1] in _SCHEMAS):
        kind = value.get("type") or value.get("role")
        own = f"{shape}<{kind}>" if isinstance(kind, str) and at else shape
        found[own] = at
        for name, one in value.items():
            found = _kinds(one, (*at, name), f"{own} {name}") | found
    return found
