import json
from typing import Any

import pytest

from extproc.base.errors import RequestError
from extproc.requests.chat_request import form_of_tools, printed_tools
from extproc.requests.prompt import NO_TOOLS

FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}


def test_tools_have_the_key_order_of_engines() -> None:
    backwards = {"function": {"strict": True, **dict(reversed(FUNCTION.items()))}}
    expected = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
    assert json.dumps(printed_tools([backwards])) == json.dumps(expected)


def test_tool_fields_left_out_are_null() -> None:
    (tool,) = printed_tools([{"function": {"name": "f"}}])
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
        {**TOOL, "defer_loading": True},
        {"function": {"description": "no name"}},
        {"function": {**FUNCTION, "description": 5}},
        {"function": {**FUNCTION, "parameters": "p"}},
        {"function": {**FUNCTION, "strict": None}},
        {"function": {**FUNCTION, "other": 1}},
    ],
)
def test_tools_that_releases_print_differently_are_refused(tool: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="unsupported_tools"):
        printed_tools([TOOL, tool])


def test_empty_list_of_tools_is_refused_unless_the_engine_passes_it_on() -> None:
    with pytest.raises(RequestError, match="unsupported_tools"):
        form_of_tools([], None)
    assert form_of_tools([], "auto", may_be_empty=True) == 0
