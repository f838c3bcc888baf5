"""The parts of a request: its tools, its system's texts and its turns, in the order of the body.

By them a place in a prompt is named ("tool 3", "turn 17"), and a conversation whose beginning has
changed is found again: its turns are as they were.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import xxhash

from extproc.base.errors import RequestError
from extproc.requests.costly_json import refuse_costly
from extproc.requests.messages_request import BILLING_LINE
from extproc.requests.outline import SaidBody, said_body, session_of

# Longer bodies are not read for this.
MAX_BYTES = 4 * 1024 * 1024

# Fields that hold a text, or a list of parts, in the order in which templates write them.
_TEXTS = ("reasoning_content", "reasoning", "thinking", "content", "text", "output", "summary")
_ARGUMENTS = ("arguments", "input")


class Place(StrEnum):
    """Where a part stands in a request."""

    TOOLS = "tools"
    SYSTEM = "system"
    TURN = "turn"


class Part(msgspec.Struct, frozen=True, dict=True):
    """One part of a request.

    index: its number among those of its place, from 0. role: of a turn, `OTHER_ROLE` for one that
    is not known; "" for a tool. texts: what templates write of it, in their order.
    """

    place: Place
    index: int
    texts: tuple[str, ...]
    role: str = ""

    @cached_property
    def digest(self) -> int:
        """64 bits of its texts."""
        digest = xxhash.xxh3_64()
        for text in (self.place, self.role, *self.texts):
            digest.update(text.encode("utf-8", "surrogatepass"))
            digest.update(b"\x00")
        return digest.intdigest()


class Said(NamedTuple):
    """What a body says: its parts, and the client's name for its session, "" without one."""

    parts: Sequence[Part] = ()
    session: str = ""


_SYSTEM_ROLES = frozenset(("system", "developer"))

# Roles, and types of items, that are shown; what else a client writes there is not.
_ROLES = _SYSTEM_ROLES | frozenset(
    (
        "user",
        "assistant",
        "model",
        "tool",
        "function",
        "reasoning",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
    )
)
OTHER_ROLE = "other"


def parts_of(body: bytes) -> Said:
    """Returns the parts of a request's body, of any API, and its session.

    Raises:
        RequestError: it is too long, no JSON object, or too costly to read.
    """
    if len(body) > MAX_BYTES:
        raise RequestError("body_too_large")
    refuse_costly(body)
    try:
        said = said_body.decode(body)
        parts = [*_tools(said), *_systems(said), *_turns(said)]
        return Said(parts, session_of(said.metadata, said.conversation, said.prompt_cache_key))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise RequestError("bad_json") from None


def _tools(body: SaidBody) -> Iterator[Part]:
    index = 0
    for tools in (body.tools, body.functions):
        for tool in tools if isinstance(tools, list) else ():
            yield Part(Place.TOOLS, index, tuple(_of_tool(tool)))
            index += 1


def _of_tool(tool: object) -> Iterator[str]:
    """Yields the name of a tool, and then all that it says."""
    if not isinstance(tool, dict):
        return
    inner = tool.get("function")
    said = inner if isinstance(inner, dict) else tool
    name = said.get("name")
    yield name if isinstance(name, str) else ""
    shown = {key: value for key, value in said.items() if key not in ("name", "cache_control")}
    yield msgspec.json.encode(shown, order="sorted").decode("utf-8", "replace")


def _systems(body: SaidBody) -> Iterator[Part]:
    texts = [text for said in (body.system, body.instructions) for text in _texts(said)]
    for index, text in enumerate(filter(None, map(_stable, texts))):
        yield Part(Place.SYSTEM, index, (text,), "system")


def _turns(body: SaidBody) -> Iterator[Part]:
    """Yields the turns; one of the system at their head is a part of the system."""
    index = systems = 0
    for turns in (body.messages, body.input, body.prompt):
        for turn in turns if isinstance(turns, list) else (turns,):
            if not isinstance(turn, (dict, str)):  # such as a token id
                continue
            role, texts = _said(turn)
            if role in _SYSTEM_ROLES and not index:
                yield Part(Place.SYSTEM, systems, texts, "system")
                systems += 1
                continue
            yield Part(Place.TURN, index, texts, role)
            index += 1


def _said(turn: object) -> tuple[str, tuple[str, ...]]:
    if not isinstance(turn, dict):
        return "user", tuple(_texts(turn))
    role = turn.get("role") or turn.get("type")
    shown = role if isinstance(role, str) and role in _ROLES else OTHER_ROLE
    return shown, tuple(filter(None, _of_turn(turn)))


def _of_turn(turn: dict[str, Any]) -> Iterator[str]:
    for name in _TEXTS:
        yield from _texts(turn.get(name))
    calls = turn.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        inner = call.get("function") if isinstance(call, dict) else None
        if isinstance(inner, dict):
            yield from _of_call(inner)
    if "name" in turn:  # an item that is a call by itself
        yield from _of_call(turn)


def _of_call(call: dict[str, Any]) -> Iterator[str]:
    name = call.get("name")
    if isinstance(name, str):
        yield name
    for field in _ARGUMENTS:
        value = call.get(field)
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from (one for one in value.values() if isinstance(one, str))


def _texts(content: object) -> Iterator[str]:
    """Yields the texts of a content: a text, an object with texts, or a list of these."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for one in content:
            yield from _texts(one)
    elif isinstance(content, dict):
        yield from _of_turn(content)


def _stable(text: str) -> str:
    """Returns a system's text without the line that some clients change with every request."""
    return text.partition("\n")[2] if text.startswith(BILLING_LINE) else text
