"""What the renderers in code of vLLM's Rust front end are given of a conversation.

Source: vLLM 0.33.0, rust/src/chat/src/reasoning.rs and renderer/deepseek.rs, deepseek_v32,
harmony.
"""

from collections.abc import Mapping
from typing import Any

from extproc.base.errors import RequestError
from extproc.renderers.deepseek import ASSISTANT, END_THINK, EOS, THINK, refusal
from extproc.renderers.render_input import RenderInput
from extproc.requests.chat_request import Messages
from extproc.requests.prompt import DEVELOPER, EFFORT, PARTS, REASONING, Chat

# The fields of a function that are written, if they are there.
_FIELDS = ("name", "description", "parameters", "strict")

# By which a request switches thinking; the first one that is there counts.
_SWITCHES = ("thinking", "enable_thinking")


def is_rust(chat: Chat) -> bool:
    """Returns whether a chat is rendered by the Rust front end."""
    return chat.dialect is not None and chat.dialect.is_rust


def rust_input(chat: Chat, separator: str) -> RenderInput:
    """Returns what a renderer is given of a chat, with each content as a text.

    `thinking` is there if the request says whether the model thinks, `reasoning_effort` if it says
    how much.

    separator: between the texts of a content.

    Raises:
        RequestError: the front end refuses the chat, or it has a developer's tools.
    """
    if any(one.get("tools") for one in chat.messages):
        raise RequestError("unsupported_tools")
    variables = {**chat.variables, **control(chat)}
    tools = variables.get("tools")
    if tools:
        variables["tools"] = [{"function": _schema(tool["function"])} for tool in tools]
    return RenderInput([_flat(one, separator) for one in chat.messages], variables, decided(chat))


def decided(chat: Chat) -> int:
    """Returns the forms of a chat that the front end reads in its own way."""
    forms = chat.forms
    if chat.effort or "reasoning_effort" in chat.variables:
        forms |= EFFORT
    if any("reasoning" in one for one in chat.messages):
        forms |= REASONING
    if any(one["role"] == "developer" for one in chat.messages):
        forms |= DEVELOPER
    if any(isinstance(one["content"], list) for one in chat.messages):
        forms |= PARTS
    return forms


def control(chat: Chat) -> dict[str, Any]:
    """Returns what a chat says of thinking: whether, and how much; None where it says nothing.

    Raises:
        RequestError: it says something else.
    """
    given = chat.variables
    switch = next((given[name] for name in _SWITCHES if name in given), None)
    if not isinstance(switch, bool | None):
        raise refusal()
    effort = chat.effort or given.get("reasoning_effort")
    if effort == "none":
        switch, effort = bool(switch), None
    elif effort is not None:
        switch = switch is not False
    if not switch:
        effort = None
    return {"thinking": switch, "enable_thinking": switch, "reasoning_effort": effort}


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: function[name] for name in _FIELDS if function.get(name) is not None}
    return {**fields, "parameters": None} if "parameters" not in fields else fields


def _flat(message: dict[str, Any], separator: str) -> dict[str, Any]:
    for call in message.get("tool_calls", ()):
        if not isinstance(call["function"]["arguments"], dict):
            raise RequestError("unsupported_tool_arguments")
    if isinstance(message["content"], str):
        return message
    return {**message, "content": joined_texts(message, separator)}


def joined_texts(message: Mapping[str, Any], separator: str = "") -> str:
    """Returns the content of a message as one text."""
    content = message["content"]
    return content if isinstance(content, str) else separator.join(one["text"] for one in content)


def in_call_order(messages: Messages) -> list[dict[str, Any]]:
    """Returns the messages with the results of tools in the order of their calls.

    Raises:
        RequestError: the results are not one of each call of the turn before.
    """
    ordered: list[dict[str, Any]] = []
    results: dict[str, dict[str, Any]] = {}
    calls: list[str] = []
    for message in [*messages, {"role": ""}]:
        if message["role"] == "tool":
            name = message["tool_call_id"]
            if name in results or name not in calls:
                raise refusal()
            results[name] = message
            continue
        if results:
            if len(results) < len(calls):
                raise refusal()
            ordered += [results[name] for name in calls]
            results = {}
        calls = [call["id"] for call in message.get("tool_calls", ())]
        if len(set(calls)) < len(calls):
            raise refusal()
        ordered.append(message)
    return ordered[:-1]


def as_asked(text: str, chat: Chat) -> str:
    """Returns a prompt without its end, if the request asks for none, or goes on with an answer."""
    if chat.variables["continue_final_message"]:
        return text.removesuffix(EOS)
    if chat.variables["add_generation_prompt"] or chat.messages[-1]["role"] == "assistant":
        return text
    for end in (THINK, END_THINK):
        text = text.removesuffix(ASSISTANT + end)
    return text
