"""The prompts that an engine makes of agents' requests, made without the router's code.

It takes the forms that the recorded clients send, and no others, as vLLM 0.33 does it
(entrypoints/anthropic/serving.py, openai/responses/utils.py, openai/engine/protocol.py); a test
compares its prompts with those of vLLM's own renderer.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvtools.simulator.anthropic_messages import MessagesRequest
from kvtools.simulator.openai_responses import ResponsesRequest
from kvtools.simulator.tokens import ModelTokens
from tests.clients.rendering import RefusedError
from tests.clients.scripted_model import CHAT, MESSAGES, RESPONSES

Body = dict[str, Any]

# What a tool says besides what it is called and takes, in the order of vLLM's FunctionDefinition.
_FLAGS = ("strict", "defer_loading")


class EnginePrompts:
    """The prompts of one model; has the interface of `tests.clients.rendering`'s front ends."""

    release = "0.33.0"

    def __init__(self, model: Path) -> None:
        self._tokens = ModelTokens(model)

    async def ids_of(self, path: str, body: Body) -> list[int]:
        """Returns a prompt's token ids.

        Raises:
            RefusedError: it is no such request.
        """
        try:
            return self.prompt(path, body)
        except (ValueError, KeyError, TypeError) as error:
            raise RefusedError(f"{path}: {error}") from error

    def prompt(self, path: str, body: Body) -> list[int]:
        """Returns a prompt's token ids.

        Raises:
            KeyError: no such API is known here.
        """
        effort = _EFFORTS[path](body)
        return self._tokens.of_chat(
            [_with_read_arguments(turn) for turn in turns_of(path, body)],
            tools=list(_TOOLS[path](body)) or None,
            template_arguments={"reasoning_effort": effort} if effort else None,
        )


def turns_of(path: str, body: Body) -> list[Body]:
    """Returns the turns that a template gets of a request."""
    if path == CHAT:
        return [dict(turn) for turn in body["messages"]]
    kind = {MESSAGES: MessagesRequest, RESPONSES: ResponsesRequest}[path]
    asked: MessagesRequest | ResponsesRequest = msgspec.convert(body, kind)
    return asked.as_chat().messages


def _with_read_arguments(turn: Body) -> Body:
    """Returns a turn with its calls' arguments as objects, as templates get them."""
    if not turn.get("tool_calls"):
        return turn
    return {**turn, "tool_calls": [_read_call(one) for one in turn["tool_calls"]]}


def _read_call(call: Body) -> Body:
    function = call["function"]
    given = function.get("arguments")
    arguments = json.loads(given) if isinstance(given, str) else given
    return {**call, "function": {**function, "arguments": arguments}}


def _chat_tools(body: Body) -> Iterator[Body]:
    for tool in body.get("tools") or ():
        yield _function(tool["function"], "parameters")


def _messages_tools(body: Body) -> Iterator[Body]:
    for tool in body.get("tools") or ():
        yield _function(tool, "input_schema")


def _responses_tools(body: Body) -> Iterator[Body]:
    """Yields functions, those of a namespace under its name; what runs elsewhere is left out."""
    for tool in body.get("tools") or ():
        if tool["type"] == "function":
            yield _function(tool, "parameters")
        elif tool["type"] == "namespace":
            for one in tool["tools"]:
                yield _function({**one, "name": f"{tool['name']}__{one['name']}"}, "parameters")


def _function(tool: Body, schema: str) -> Body:
    described = {key: tool.get(key) for key in ("name", "description")}
    flags = {key: tool[key] for key in _FLAGS if tool.get(key) is not None}
    parameters = tool.get(schema)
    if schema == "input_schema":
        parameters = {**(parameters or {})}
        parameters.setdefault("type", "object")
    return {"type": "function", "function": {**described, "parameters": parameters, **flags}}


def _effort_in(section: object) -> str:
    return str((section or {}).get("effort") or "") if isinstance(section, Mapping) else ""


_TOOLS = {CHAT: _chat_tools, MESSAGES: _messages_tools, RESPONSES: _responses_tools}
_EFFORTS = {
    CHAT: lambda body: str(body.get("reasoning_effort") or ""),
    MESSAGES: lambda body: _effort_in(body.get("output_config")),
    RESPONSES: lambda body: _effort_in(body.get("reasoning")),
}


def first_difference(before: Sequence[int], after: Sequence[int]) -> int:
    """Returns the number of leading tokens that two prompts share."""
    pairs = enumerate(zip(before, after, strict=False))
    shorter = min(len(before), len(after))
    return next((at for at, (one, other) in pairs if one != other), shorter)
