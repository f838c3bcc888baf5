"""Tools of responses as releases of the OpenAI library print them, with vLLM 0.24 to 0.26."""

import json
from typing import Any

import msgspec
import pytest

from extproc.base.engine import VLLM, Engine, Release
from extproc.base.errors import RequestError
from extproc.requests.dialect import (
    BY_LIBRARY,
    NEWEST,
    Dialect,
    Printed,
    dialect_of,
    model_dialects,
    rivals_of,
)
from extproc.requests.prompt import ITEMS, PRINTED, TOOL_FIELDS, Chat
from extproc.requests.responses_request import parse

LOOK_UP = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}
NAMESPACE = {"type": "namespace", "name": "n", "tools": [LOOK_UP, {"type": "custom"}]}


def dialect(minor: int, printed: Printed = BY_LIBRARY[0]) -> Dialect:
    spoken = dialect_of(Engine(VLLM, Release(0, minor)))
    return msgspec.structs.replace(spoken, tools=printed)


def chat(rules: Dialect, *tools: dict[str, Any]) -> Chat:
    body = json.dumps({"input": "hello", "tools": tools}).encode()
    (prompt,) = parse(body, lambda _: rules).prompts
    assert isinstance(prompt, Chat)
    return prompt


def printed(rules: Dialect, *tools: dict[str, Any]) -> list[str]:
    """Returns the fields of the functions that a template gets, in their order."""
    found = chat(rules, *tools).variables["tools"]
    assert {one["type"] for one in found} == {"function"}
    return [" ".join(one["function"]) for one in found]


REST = {
    Printed.OPENAI_2_0: "",
    Printed.OPENAI_2_25: "defer_loading",
    Printed.OPENAI_2_50: "allowed_callers defer_loading output_schema",
    Printed.OPENAI_3_8: "allowed_callers async_ defer_loading output_schema",
}


@pytest.mark.parametrize(("release", "rest"), REST.items())
def test_functions_have_all_fields_of_their_release(release: Printed, rest: str) -> None:
    fields = rest.split()
    described = [*(one for one in fields if one != "output_schema"), "description"]
    described += [one for one in fields if one == "output_schema"]
    top = " ".join(["name", "parameters", "strict", "type", *described])
    inner = " ".join(["name", "type", *described, "parameters", "strict"])
    assert printed(dialect(24, release), LOOK_UP) == [top]
    assert printed(dialect(26, release), LOOK_UP, NAMESPACE) == [top, inner]
    made = chat(dialect(24, release), LOOK_UP)
    (tool,) = made.variables["tools"]
    given = {name: value for name, value in tool["function"].items() if value is not None}
    assert given == LOOK_UP
    assert made.forms == ITEMS | PRINTED


def test_other_fields_are_printed_by_their_release_and_last_if_it_does_not_know_them() -> None:
    tool = {"extra": 1, **LOOK_UP, "async": True, "defer_loading": False}
    known = "name parameters strict type allowed_callers async_ defer_loading description"
    made = chat(dialect(24, Printed.OPENAI_3_8), tool)
    (shown,) = made.variables["tools"]
    assert list(shown["function"]) == [*known.split(), "output_schema", "extra"]
    assert shown["function"]["async_"] is True
    assert made.forms == ITEMS | PRINTED | TOOL_FIELDS
    oldest = printed(dialect(24, Printed.OPENAI_2_0), tool)
    assert oldest == ["name parameters strict type description extra async_ defer_loading"]


@pytest.mark.parametrize(
    ("tool", "reason"),
    [
        ({"type": "web_search"}, "unsupported_tools"),
        (NAMESPACE, "unsupported_tools"),
        ({**LOOK_UP, "strict": "yes"}, "bad_request"),
        ({**LOOK_UP, "parameters": []}, "bad_request"),
        ({"type": "function"}, "bad_request"),
    ],
)
def test_tools_on_which_releases_differ_are_refused(tool: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(dialect(24), tool)
    assert caught.value.reason == reason


def test_rivals_come_in_turn_and_end_where_they_began() -> None:
    assert rivals_of(NEWEST) == ()
    first = spoken = dialect(24)
    seen = []
    for _ in BY_LIBRARY:
        assert len(rivals_of(spoken)) == len(BY_LIBRARY) - 1
        spoken = rivals_of(spoken)[0]
        seen.append(spoken.tools)
    assert set(seen) == set(BY_LIBRARY)
    assert spoken == first


def test_worker_that_has_shown_its_release_speaks_a_dialect_of_its_own() -> None:
    engines = {"a": Engine(VLLM, Release(0, 24)), "b": Engine(VLLM, Release(0, 24))}
    shown = {"b": Printed.OPENAI_3_8}
    spoken = model_dialects(engines, printed=shown)
    assert spoken.rest == ((dialect(24, Printed.OPENAI_3_8), frozenset("b")),) or (
        spoken.first == dialect(24, Printed.OPENAI_3_8)
    )
    newest = {"a": Engine(VLLM, Release(0, 33))}
    assert model_dialects(newest, printed={"a": Printed.OPENAI_3_8}).first == NEWEST
