"""The prompts of gpt-oss, in the harmony format.

Source: behaviour of vLLM 0.32.0 (entrypoints/openai/parser/harmony_utils.py, responses/harmony.py)
with oss-harmony 0.0.11. Every text is tokenized by itself, and no text becomes a control token. The
system turn of a conversation is its developer's instructions; a system turn of the format's own has
the date. Of what the model thought, only what follows its last answer is rendered. Media are left
out.

Earlier releases were not compared; no such prompt counts before its worker proves it.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from extproc.base.errors import RequestError
from extproc.renderers.harmony_format import (
    ASKED,
    MARKS,
    HarmonyMessage,
    call_message,
    developer_message,
    result_message,
    system_message,
    thinking_message,
    without_old_thoughts,
)
from extproc.renderers.render_input import dialect_of, render_input
from extproc.renderers.rust_harmony import rust_messages
from extproc.renderers.rust_input import is_rust
from extproc.renderers.segments import ControlMarks
from extproc.requests.chat_request import Messages
from extproc.requests.prompt import (
    DATE,
    EFFORT,
    EVEN_DAY,
    ITEMS,
    NO_TOOLS,
    ODD_DAY,
    PARTS,
    REASONING,
    Chat,
    Response,
)

# By which thinking, which cannot be switched off, is made least. Source: vLLM 0.31 and 0.32.
_OFF_EFFORT = "low"

# Kinds of parts that chat completions do not have, and that vLLM accepts beside others.
_READ_LATE = frozenset(("input_text", "output_text"))

# Types of tools that run in the engine, if it has a server for them, as it has not by default.
_BUILT_IN = frozenset(("web_search_preview", "code_interpreter", "container"))


class Harmony:
    """Renders conversations for gpt-oss (`extproc.renderers.renderer.Renderer`).

    POST /tokenize of vLLM's Python front end renders the chat template that gpt-oss also has, and
    not this format.

    now: returns the time, in the time zone that the engines have. keeps_later_systems: as in
        `render_input`.
    """

    is_shown_by_tokenize = False
    drops_media = True

    def __init__(
        self, now: Callable[[], datetime], keeps_later_systems: Callable[[], bool] = lambda: False
    ) -> None:
        self.marks: ControlMarks | None = MARKS
        self._now = now
        self._keeps_later_systems = keeps_later_systems

    def render(self, chat: Chat, *, budget_seconds: float) -> tuple[str, int]:
        """Returns the prompt of a conversation, as `Renderer.render`."""
        del budget_seconds  # it takes microseconds a message
        if chat.is_truncated:
            raise RequestError("unsupported_truncation")  # the engine does not truncate it
        now = self._now()
        if is_rust(chat):
            return _of_rust(chat, now)
        if chat.response is None:
            messages, forms = self._of_chat(chat, now)
        else:
            messages, forms = _of_response(chat, chat.response, now)
        if not has_certain_date(now):
            forms |= DATE
        return _joined(messages) + ASKED, forms

    @property
    def start_forms(self) -> int:
        """The form of what a Rust front end renders that has started today."""
        return _form_of_day(self._now())

    def _of_chat(self, chat: Chat, now: datetime) -> tuple[list[HarmonyMessage], int]:
        inputs = render_input(
            chat,
            chat.sent,
            _OFF_EFFORT,
            self._keeps_later_systems,
            drops_billing_lines=False,
        )
        if inputs.forms & PARTS and any(map(_is_read_late, inputs.messages)):
            raise RequestError("unsupported_content")
        instructions, turns = _instructions_in(inputs.messages)
        tools = [tool["function"] for tool in inputs.variables.get("tools") or ()]
        # unlike a template, the format takes no effort from template arguments
        effort = inputs.variables.get("reasoning_effort") if chat.effort else None
        before = _beginning(now, instructions, tools, effort)
        return [*before, *_turns(turns)], inputs.forms


def _joined(messages: Sequence[HarmonyMessage]) -> str:
    return "".join(message.joined() for message in without_old_thoughts(messages))


def _of_rust(chat: Chat, now: datetime) -> tuple[str, int]:
    """Returns the prompt of a chat for a Rust front end, which may have started on another day."""
    messages, forms = rust_messages(chat, now)
    asked = ASKED if chat.variables["add_generation_prompt"] else ""
    return _joined(messages) + asked, forms | _form_of_day(now)


def _form_of_day(now: datetime) -> int:
    return ODD_DAY if now.toordinal() % 2 else EVEN_DAY


# How much the clocks of the router and of an engine may differ.
_CLOCKS_APART = timedelta(minutes=5)


def has_certain_date(now: datetime) -> bool:
    """Returns whether an engine writes the date of a moment, as the router does.

    Not about midnight, since clocks differ; nor while it is another day in UTC, which is the time
    zone of most containers.

    now: with the router's time zone.
    """
    moments = (now - _CLOCKS_APART, now + _CLOCKS_APART)
    dates = {zoned.date() for one in moments for zoned in (one, one.astimezone(UTC))}
    return len(dates) == 1


def _beginning(
    now: datetime, instructions: str | None, functions: list[dict[str, Any]], effort: str | None
) -> Iterator[HarmonyMessage]:
    """Yields what precedes the conversation: the system turn, and the developer's."""
    yield system_message(now, effort, has_functions=bool(functions))
    if instructions or functions:
        yield developer_message(instructions, functions)


def _of_response(chat: Chat, response: Response, now: datetime) -> tuple[list[HarmonyMessage], int]:
    forms = chat.forms & (ITEMS | NO_TOOLS)
    dialect_of(chat)
    effort = None
    if chat.effort:
        forms |= EFFORT
        effort = chat.effort
    instructions, items = response.instructions, response.items
    if instructions is None and isinstance(items, list):
        instructions, items = _instructions_in(items)
    before = _beginning(now, instructions, _functions(response.tools), effort)
    if isinstance(items, str):
        return [*before, HarmonyMessage("user", [items])], forms
    if any(item.get("type") == "reasoning" for item in items):
        forms |= REASONING
    return [*before, *_items(items)], forms


def _instructions_in(messages: Messages) -> tuple[str | None, list[dict[str, Any]]]:
    """Returns the instructions, if the first message has them, and the other messages."""
    if messages and messages[0].get("role") in ("system", "developer"):
        return _flat(messages[0].get("content")), list(messages[1:])
    return None, list(messages)


def _flat(content: str | list[Any] | None) -> str | None:
    """Returns the texts of a content as one; None if there is none."""
    if content is None or isinstance(content, str):
        return content
    texts = [text for part in content if (text := _text_of(part)) is not None]
    return "".join(texts) if texts else None


def _texts(content: str | list[Any]) -> list[str]:
    """Returns the texts of a content in parts, each empty for a part without one, as of media."""
    if isinstance(content, str):
        return [content]
    return [_text_of(part) or "" for part in content]


def _is_read_late(message: Mapping[str, Any]) -> bool:
    """Returns whether vLLM loses a content, or refuses it late.

    Of a chat completion, it first takes parts that are all of these kinds for others, and reads
    them only after it has looked for texts.
    """
    content = message.get("content")
    return (
        isinstance(content, list)
        and bool(content)
        and all(part.get("type") in _READ_LATE for part in content)
    )


def _text_of(part: Mapping[str, Any]) -> str | None:
    """Returns the text of a part, None if it has none.

    Raises:
        RequestError: it has something else in its place.
    """
    text = part.get("text")
    if not isinstance(text, str) and "text" in part:
        raise RequestError("unsupported_content")
    return text


def _turns(messages: Messages) -> Iterator[HarmonyMessage]:
    """Yields the turns of a chat completion."""
    names = {
        call.get("id"): call["function"].get("name")
        for message in messages
        if "tool_calls" in message
        for call in message["tool_calls"] or ()
    }
    for message in messages:
        role, content = message["role"], message.get("content")
        if role == "user":
            yield HarmonyMessage("user", _texts(content or ""))
        elif role == "assistant":
            yield from _answer(message)
        elif role == "tool":
            name = names.get(message.get("tool_call_id", ""), "")
            yield result_message(name, _flat(content) or "")
        elif role in ("system", "developer"):
            text = _flat(content)
            if text is not None:
                yield developer_message(text)
        else:
            raise RequestError("template_failed")


def _answer(message: Mapping[str, Any]) -> Iterator[HarmonyMessage]:
    """Yields the messages of a turn of the model."""
    reasoning, content, calls = map(message.get, ("reasoning", "content", "tool_calls"))
    thoughts = [thinking_message(reasoning)] if reasoning else []
    if not calls:
        yield from thoughts
        texts = _texts(content or "")
        if texts and texts[0]:
            yield HarmonyMessage("assistant", texts, "final")
        return
    text = _flat(content)
    if text:
        yield HarmonyMessage("assistant", [text], "commentary")
    yield from thoughts
    for call in calls:
        function = call["function"]
        yield call_message(function.get("name", ""), _arguments_as_json(function.get("arguments")))


def _arguments_as_json(arguments: object) -> str:
    """Returns the arguments of a call as JSON; text is what the client wrote.

    Anthropic's API has an object instead, which the engine writes as Python does.
    """
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments or {})


def _functions(tools: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the functions among a response's tools.

    Raises:
        RequestError: a tool is of a kind that the engine refuses with this model.
    """
    functions = []
    for tool in tools:
        kind = tool.get("type")
        if kind == "function":
            functions.append(dict(tool))
        elif kind not in _BUILT_IN:
            raise RequestError("template_failed")
    return functions


def _items(items: Iterable[Mapping[str, Any]]) -> Iterator[HarmonyMessage]:
    """Yields the messages of a response's items."""
    names: dict[object, object] = {}
    for item in items:
        kind, content = item.get("type", "message"), item.get("content")
        if kind == "message":
            yield from _messages_of(item["role"], content)
        elif kind == "reasoning":
            texts = _texts(content or [])
            if texts:
                yield thinking_message("\n".join(texts))
        elif kind == "function_call":
            names[item.get("call_id")] = item.get("name")
            yield call_message(item.get("name"), str(item.get("arguments")))
        elif kind == "function_call_output":
            output = item.get("output")
            if item.get("call_id") not in names or not isinstance(output, str):
                raise RequestError("template_failed")
            yield result_message(names[item.get("call_id")], output)
        else:
            raise RequestError("template_failed")


def _messages_of(role: str, content: Any) -> Iterator[HarmonyMessage]:
    """Yields what an item of a role says."""
    if role in ("system", "developer"):
        text = _flat(content)
        if text:
            yield developer_message(text)
    elif role == "assistant":
        yield HarmonyMessage(role, _texts(content), "final")
    elif role == "user":
        yield HarmonyMessage(role, _texts(content))
    else:
        raise RequestError("template_failed")
