"""Tools of chat completions as vLLM's request models print them for templates.

The models name five fields of a function and three of a tool, and print them in their own order:
`strict` and `defer_loading` only where they are not null. What they do not name is left out from
vLLM 0.27 on; before, it is printed last. So a field that nobody knows yet keys no tool otherwise
than the engine prints it, and a request that has one is of a form of its own
(`extproc.requests.prompt.TOOL_FIELDS`).

Source: FunctionDefinition and ChatCompletionToolsParam of vLLM 0.14.1, 0.19.1, 0.24.0 to 0.27.0 and
0.30.0 to 0.33.0. Those of 0.19.1 and earlier name no flags.
"""

from collections.abc import Mapping
from typing import Any

from extproc.base.errors import RequestError
from extproc.requests.dialect import ToolFields
from extproc.requests.known_tools import PrintedTools, Tools
from extproc.requests.lax_values import flag
from extproc.requests.prompt import TOOL_FIELDS

# The fields that any release prints alike, as most clients send them.
_USUAL_TOOL = frozenset(("type", "function"))
_USUAL_FUNCTION = frozenset(("name", "description", "parameters", "strict"))

# What the models name besides, from vLLM 0.24 on.
FLAGS = ("strict", "defer_loading")


def printed_tools(tools: Tools, fields: ToolFields = ToolFields.NAMED) -> PrintedTools:
    """Returns the tools as the chat template gets them.

    Raises:
        RequestError: an engine would refuse them too.
    """
    printed = [_tool(tool, fields) for tool in tools]
    return PrintedTools(printed, TOOL_FIELDS if any(map(_has_more, tools)) else 0)


def _has_more(tool: dict[str, Any]) -> bool:
    """Returns whether a tool has a field that releases print differently."""
    function = tool["function"]
    is_usual = tool.keys() <= _USUAL_TOOL and function.keys() <= _USUAL_FUNCTION
    return not is_usual or not isinstance(function.get("strict", False), bool)


def _tool(tool: dict[str, Any], fields: ToolFields) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise RequestError("unsupported_tools")
    if fields is ToolFields.ALL_WITHOUT_FLAGS:
        printed: dict[str, Any] = {
            "type": "function",
            "function": function_of(function, fields),
        }
        return {**printed, **{key: tool[key] for key in tool if key not in _USUAL_TOOL}}
    deferred = as_flag(tool.get("defer_loading"))
    if deferred is not None and function.get("defer_loading") is None:
        function = {**function, "defer_loading": deferred}
    named: dict[str, Any] = {"type": "function", "function": function_of(function, fields)}
    if deferred is not None:
        named["defer_loading"] = deferred
    if fields is ToolFields.NAMED:
        return named
    others = {key: tool[key] for key in tool if key not in (*_USUAL_TOOL, "defer_loading")}
    return {**named, **others}


def function_of(
    function: Mapping[str, Any], fields: ToolFields = ToolFields.NAMED
) -> dict[str, Any]:
    """Returns a function with null for missing keys, but flags only if they are set.

    Raises:
        RequestError: an engine would refuse it too.
    """
    name, description = function.get("name"), function.get("description")
    parameters = function.get("parameters")
    is_typed = isinstance(description, str | None) and isinstance(parameters, dict | None)
    if not isinstance(name, str) or not is_typed:
        raise RequestError("unsupported_tools")
    printed = {"name": name, "description": description, "parameters": parameters}
    if fields is ToolFields.ALL_WITHOUT_FLAGS:
        return {**printed, **function}
    for key in FLAGS:
        if function.get(key) is not None:
            printed[key] = as_flag(function[key])
    if fields is ToolFields.NAMED:
        return printed
    return {**printed, **{key: function[key] for key in function if key not in FLAGS}}


def as_flag(value: object) -> bool | None:
    """Returns what the engine's models make of a value that is to be a boolean, or null.

    Raises:
        RequestError: they refuse it.
    """
    try:
        return flag(value)
    except RequestError:
        raise RequestError("unsupported_tools") from None
