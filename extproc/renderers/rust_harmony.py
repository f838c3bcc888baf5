"""The conversations of gpt-oss as vLLM's Rust front end puts them into the harmony format.

Source: vLLM 0.33.0, rust/src/chat/src/renderer/harmony/mod.rs. Unlike the Python front end, it
joins the parts of a content, names the type of a call's arguments with a control token, lets a
developer's turn describe tools, leaves out empty instructions but not a later turn that has
nothing else, and takes an effort from template arguments. It adds no request for an answer if the
client wants none. The date in it is that of its own start.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from extproc.base.errors import RequestError
from extproc.renderers.harmony_format import (
    HarmonyMessage,
    call_message,
    developer_message,
    result_message,
    system_message,
    thinking_message,
)
from extproc.renderers.rust_input import control, decided, joined_texts
from extproc.requests.prompt import Chat

Message = Mapping[str, Any]


def rust_messages(chat: Chat, now: datetime) -> tuple[list[HarmonyMessage], int]:
    """Returns the messages of a chat, and the forms that its dialect decided.

    now: the date of the front end's start.

    Raises:
        RequestError: the front end refuses the chat, or a name of a function could be misread in a
            header.
    """
    if chat.variables["continue_final_message"]:
        raise RequestError("template_failed")
    given = control(chat)
    if given["thinking"] is False:
        raise RequestError("template_failed")
    names = {
        call["id"]: call["function"]["name"]
        for message in chat.messages
        for call in message.get("tool_calls", ())
    }
    offered = chat.variables.get("tools", [])
    preamble, later = _parted(chat.messages)
    own = sum(len(message.get("tools", ())) for message in chat.messages)
    functions = [*_functions(offered[: len(offered) - own]), *_functions_in(preamble)]
    instructions = "".join(map(joined_texts, preamble)) or None
    messages = [system_message(now, given["reasoning_effort"], has_functions=bool(offered))]
    if instructions or functions:
        messages.append(developer_message(instructions, functions))
    for message, sent in zip(later, chat.sent[len(preamble) :], strict=True):
        messages += _messages(message, sent, names)
    return messages, decided(chat)


def _parted(messages: Sequence[Message]) -> tuple[Sequence[Message], Sequence[Message]]:
    """Returns the turn that begins a chat with instructions, if one does, and the others."""
    place = 1 if messages[0]["role"] in ("system", "developer") else 0
    return messages[:place], messages[place:]


def _functions(tools: Sequence[Message]) -> list[Message]:
    """Returns the functions of tools; parameters that are not there are of any type."""
    functions = [tool["function"] for tool in tools]
    return [{**one, "parameters": one["parameters"] or {}} for one in functions]


def _functions_in(messages: Sequence[Message]) -> list[Message]:
    return [one for message in messages for one in _functions(message.get("tools", ()))]


def _messages(
    message: Message, sent: Message, names: Mapping[str, str]
) -> Iterator[HarmonyMessage]:
    """Yields the messages of a turn. sent: as the client sent it. names: of functions, by call."""
    role, text = message["role"], joined_texts(message)
    if role in ("system", "developer"):
        yield developer_message(text or None, _functions_in([message]))
    elif role == "user":
        yield HarmonyMessage("user", [text])
    elif role == "assistant":
        yield from _turn(message, sent, text)
    elif role == "tool" and message["tool_call_id"] in names:
        yield result_message(names[message["tool_call_id"]], text)
    else:
        raise RequestError("template_failed")


def _turn(message: Message, sent: Message, text: str) -> Iterator[HarmonyMessage]:
    """Yields the messages of a turn of the model."""
    calls = sent.get("tool_calls")
    if calls and text:
        yield HarmonyMessage("assistant", [text], "commentary")
    if "reasoning" in message:
        yield thinking_message(message["reasoning"])
    for call in calls or ():
        function = call["function"]
        arguments = function.get("arguments") or "{}"
        yield call_message(function["name"], arguments, is_constrained=True)
    if text and not calls:
        yield HarmonyMessage("assistant", [text], "final")
