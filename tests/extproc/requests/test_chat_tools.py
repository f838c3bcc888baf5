import json
from typing import Any

import pytest

from extproc.errors import RequestError
from extproc.requests.chat_request import tools_of

FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}


def test_tools_have_the_order_of_keys_in_which_engines_print_them() -> None:
    backwards = {"function": {"strict": True, **dict(reversed(FUNCTION.items()))}}
    expected = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
    assert json.dumps(tools_of([backwards], "auto")) == json.dumps(expected)


def test_what_a_tool_leaves_out_is_printed_as_null() -> None:
    (tool,) = tools_of([{"function": {"name": "f"}}], None)
    assert tool["function"] == {"name": "f", "description": None, "parameters": None}


@pytest.mark.parametrize(
    "choice", [None, "auto", "required", {"type": "function", "function": {"name": "f"}}]
)
def test_the_choice_of_a_tool_leaves_the_prompt_alone(choice: object) -> None:
    assert tools_of([TOOL], choice) == [TOOL]


@pytest.mark.parametrize("choice", ["none", "other", {"type": "function"}, {}])
def test_other_choices_are_not_claimed(choice: object) -> None:
    with pytest.raises(RequestError, match="unsupported_tool_choice"):
        tools_of([TOOL], choice)


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
def test_tools_that_releases_print_differently_are_not_claimed(tool: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="unsupported_tools"):
        tools_of([TOOL, tool], None)


def test_no_tools_are_not_an_empty_list() -> None:
    with pytest.raises(RequestError, match="unsupported_tools"):
        tools_of([], None)
