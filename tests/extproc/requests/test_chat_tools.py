import json
from typing import Any

import pytest

from extproc.base.errors import RequestError
from extproc.requests.chat_request import form_of_tools
from extproc.requests.dialect import ToolFields
from extproc.requests.function_tools import printed_tools
from extproc.requests.prompt import NO_TOOLS, TOOL_FIELDS

FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}


def test_tools_have_the_key_order_of_engines() -> None:
    backwards = {"function": {"strict": True, **dict(reversed(FUNCTION.items()))}}
    expected = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
    assert json.dumps(printed_tools([backwards]).tools) == json.dumps(expected)


def test_tool_fields_left_out_are_null() -> None:
    (tool,) = printed_tools([{"function": {"name": "f"}}]).tools
    assert tool["function"] == {"name": "f", "description": None, "parameters": None}


@pytest.mark.parametrize(
    "choice", [None, "auto", "required", {"type": "function", "function": {"name": "f"}}]
)
def test_tool_choice_leaves_the_tools_unchanged(choice: object) -> None:
    assert form_of_tools([TOOL], choice) == 0


def test_tools_that_must_not_be_used_are_kept_and_are_a_form_of_their_own() -> None:
    assert form_of_tools([TOOL], "none") == NO_TOOLS


@pytest.mark.parametrize("choice", ["other", {"type": "function"}, {}])
def test_tool_choices_of_other_kinds_are_refused(choice: object) -> None:
    with pytest.raises(RequestError, match="unsupported_tool_choice"):
        form_of_tools([TOOL], choice)


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function"},
        {**TOOL, "type": "custom"},
        {**TOOL, "defer_loading": "maybe"},
        {"function": {"description": "no name"}},
        {"function": {**FUNCTION, "description": 5}},
        {"function": {**FUNCTION, "parameters": "p"}},
        {"function": {**FUNCTION, "strict": 2}},
    ],
)
def test_tools_that_engines_refuse_are_refused(tool: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="unsupported_tools"):
        printed_tools([TOOL, tool])


@pytest.mark.parametrize(
    ("tool", "printed"),
    [
        ({**TOOL, "new": 1, "cache_control": {}}, TOOL),
        ({"function": {"new": 1, **FUNCTION, "strict": None}}, TOOL),
        (
            {"defer_loading": True, **TOOL},
            {
                "type": "function",
                "function": {**FUNCTION, "defer_loading": True},
                "defer_loading": True,
            },
        ),
        (
            {**TOOL, "defer_loading": True, "function": {**FUNCTION, "defer_loading": False}},
            {
                "type": "function",
                "function": {**FUNCTION, "defer_loading": False},
                "defer_loading": True,
            },
        ),
        (
            {"function": {"strict": "YES", "defer_loading": 0, **FUNCTION}},
            {"type": "function", "function": {**FUNCTION, "strict": True, "defer_loading": False}},
        ),
    ],
)
def test_tools_are_printed_with_the_fields_that_the_models_name(
    tool: dict[str, Any], printed: dict[str, Any]
) -> None:
    made = printed_tools([TOOL, tool])
    assert json.dumps(made.tools) == json.dumps([TOOL, printed])
    assert made.forms == TOOL_FIELDS


def test_older_releases_print_other_fields_last() -> None:
    tool = {"new": 1, "function": {"more": 2, **FUNCTION, "strict": True}, "defer_loading": None}
    (printed,) = printed_tools([tool], ToolFields.ALL).tools
    function = {**FUNCTION, "strict": True, "more": 2}
    assert json.dumps(printed) == json.dumps({"type": "function", "function": function, "new": 1})


def test_oldest_releases_print_flags_as_other_fields() -> None:
    tool = {"defer_loading": True, "function": {"more": 2, "strict": None, **FUNCTION}}
    (printed,) = printed_tools([tool], ToolFields.ALL_WITHOUT_FLAGS).tools
    function = {**FUNCTION, "more": 2, "strict": None}
    expected = {"type": "function", "function": function, "defer_loading": True}
    assert json.dumps(printed) == json.dumps(expected)


def test_empty_list_of_tools_is_refused_unless_the_engine_passes_it_on() -> None:
    with pytest.raises(RequestError, match="unsupported_tools"):
        form_of_tools([], None)
    assert form_of_tools([], "auto", may_be_empty=True) == 0
