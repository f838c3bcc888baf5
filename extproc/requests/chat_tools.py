"""Tools as vLLM hands them to templates, which print them as JSON: in this order of keys.

Source: ChatCompletionToolsParam of vLLM 0.10.2 to 0.32.0. What else a tool may have is written
differently from one release to the next, and is not keyed.
"""

from typing import Any

from extproc.errors import RequestError

_KEYS = {"name", "description", "parameters", "strict"}


def tools_of(tools: list[dict[str, Any]], choice: object) -> list[dict[str, Any]]:
    """The tools that the template sees.

    choice: the request's tool_choice. Templates do not see it, but with "none" engines leave the
        tools out where --exclude-tools-when-tool-choice-none is set.

    Raises:
        RequestError: releases or settings differ.
    """
    if choice not in (None, "auto", "required") and not _names_a_tool(choice):
        raise RequestError("unsupported_tool_choice")
    if not tools:
        raise RequestError("unsupported_tools")
    return [_tool(tool) for tool in tools]


def _names_a_tool(choice: object) -> bool:
    match choice:
        case {"type": "function", "function": {"name": str()}}:
            return True
    return False


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    is_plain = tool.keys() <= {"type", "function"} and tool.get("type", "function") == "function"
    if not is_plain or not isinstance(function, dict):
        raise RequestError("unsupported_tools")
    return {"type": "function", "function": _function(function)}


def _function(function: dict[str, Any]) -> dict[str, Any]:
    """With null for what is left out; `strict` only where it is set, as all releases print it."""
    name = function.get("name")
    description = function.get("description")
    parameters = function.get("parameters")
    is_typed = isinstance(description, str | None) and isinstance(parameters, dict | None)
    if not isinstance(name, str) or not is_typed or not function.keys() <= _KEYS:
        raise RequestError("unsupported_tools")
    printed = {"name": name, "description": description, "parameters": parameters}
    if "strict" in function:
        if not isinstance(function["strict"], bool):
            raise RequestError("unsupported_tools")
        printed["strict"] = function["strict"]
    return printed
