"""The prompts of Kimi K3.

Source: behaviour of vLLM 0.32.0 (renderers/kimi_k3.py) with the code that the checkpoint ships
(encoding_k3.py, tokenization_kimi.py). Elements have tags of four control tokens, and each piece of
text between these is tokenized by itself. A developer's turn is left out. Thinking is on, with the
effort `max`, unless the request says otherwise.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from extproc.base.errors import RequestError
from extproc.renderers.render_input import render_input
from extproc.renderers.segments import ControlMarks, Segment
from extproc.requests.chat_request import Messages, flat
from extproc.requests.prompt import Chat
from extproc.templates.conversions import with_sorted_keys

CONTROLS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")

_EFFORTS = ("low", "high", "max")
_USUAL_EFFORT = "max"

_ABOUT_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_ABOUT_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
_ABOUT_CHOICES = {
    "required": "call tools",
    "none": "NOT call any tools",
}
_ABOUT_FORMAT = (
    "The system is invoked with `response_format={}`.\nYour response must be raw JSON data without "
    "markdown code blocks (```json) or any additional formatting."
)
_ABOUT_SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{}\n```"

# What a client would change by template arguments besides.
_UNKNOWN = frozenset(("image_prompts", "response_format", "tool_choice"))

Attributes = Sequence[tuple[str, object]]


class KimiK3:
    """Renders conversations for Kimi K3 (`extproc.renderers.renderer.Renderer`).

    controls: the ids of the control tokens, by name. marks: of these.
    """

    is_shown_by_tokenize = True
    drops_media = False

    def __init__(self, controls: Mapping[str, int], marks: ControlMarks) -> None:
        self.marks: ControlMarks | None = marks
        self._marks = marks
        self._open, self._close, self._end, self._end_of_message = (
            controls[name] for name in CONTROLS
        )

    def render(self, chat: Chat, *, budget_seconds: float) -> tuple[str, int]:
        """Returns the joined segments of a conversation, as `Renderer.render`."""
        del budget_seconds  # it takes microseconds a message
        if not _UNKNOWN.isdisjoint(chat.variables):
            raise RequestError("unsupported_template_kwargs")
        shown = render_input(chat, chat.messages)
        thinking = _KimiThinking.read(shown.variables)
        messages = list(_by_ids([*_by_names([flat(message) for message in shown.messages])]))
        segments = [
            *self._beginning(shown.variables.get("tools"), thinking),
            *self._turns(messages, thinking),
            *self._orders(chat),
        ]
        if chat.variables.get("add_generation_prompt", True):
            segments += self._tag("message", [("role", "assistant")])
            segments += self._tag("think" if thinking.is_on else "response")
        return self._marks.joined(segments), shown.forms

    def _tag(self, name: str, attributes: Attributes = ()) -> Iterator[Segment]:
        yield self._open
        yield name
        for key, value in attributes:
            escaped = str(value).replace("&", "&amp;").replace('"', "&quot;")
            yield f' {key}="{escaped}"'
        yield self._end

    def _element(
        self, name: str, attributes: Attributes, inner: Sequence[Segment]
    ) -> Iterator[Segment]:
        yield from self._tag(name, attributes)
        yield from inner
        yield self._close
        yield name
        yield self._end

    def _message(self, attributes: Attributes, inner: Sequence[Segment]) -> Iterator[Segment]:
        yield from self._element("message", attributes, inner)
        yield self._end_of_message

    def _order(self, kind: str, text: str) -> Iterator[Segment]:
        """Yields a system message of the format's own."""
        yield from self._message([("role", "system"), ("type", kind)], [text])

    def _beginning(
        self, tools: list[dict[str, Any]] | None, thinking: "_KimiThinking"
    ) -> Iterator[Segment]:
        if tools:
            yield from self._order("tool-declare", _ABOUT_TOOLS.format(_in_json(tools)))
        if thinking.is_on and thinking.effort:
            yield from self._order("thinking-effort", _ABOUT_EFFORT.format(thinking.effort))

    def _turns(self, messages: Messages, thinking: "_KimiThinking") -> Iterator[Segment]:
        calls: Sequence[Mapping[str, Any]] = ()
        results = 0
        for message in messages:
            role, content = message["role"], message["content"]
            if role in ("user", "system"):
                name = message.get("name")
                attributes = [("role", role), *([("name", name)] if name else [])]
                yield from self._message(attributes, [content])
            elif role == "assistant":
                calls, results = message.get("tool_calls") or (), 0
                inner = [*self._answer(message, calls, thinking)]
                yield from self._message([("role", role)], inner)
            elif role == "tool":
                results += 1
                name = message.get("tool", message.get("name"))
                if name is None and results <= len(calls):
                    name = calls[results - 1]["function"]["name"]
                if name is None:
                    raise RequestError("template_failed")
                attributes = [("role", role), ("tool", name), ("index", results)]
                yield from self._message(attributes, [content])

    def _answer(
        self,
        message: Mapping[str, Any],
        calls: Sequence[Mapping[str, Any]],
        thinking: "_KimiThinking",
    ) -> Iterator[Segment]:
        if thinking.is_on:
            thought = message.get("reasoning_content") or message.get("reasoning") or ""
            is_shown = bool(str(thought).strip())
            yield from self._element("think", (), [str(thought)] if is_shown else [])
        yield from self._element("response", (), [message["content"]])
        if calls:
            inner = [
                one for number, call in enumerate(calls, 1) for one in self._call(call, number)
            ]
            yield from self._element("tools", (), inner)

    def _call(self, call: Mapping[str, Any], number: int) -> Iterator[Segment]:
        function = call["function"]
        inner: list[Segment] = []
        for key, value in function["arguments"].items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            inner += self._element("argument", [("key", key), ("type", _type_of(value))], [text])
        yield from self._element("call", [("tool", function["name"]), ("index", number)], inner)

    def _orders(self, chat: Chat) -> Iterator[Segment]:
        """Yields what the request demands of the answer."""
        if chat.tool_choice:
            text = (
                f"The system is invoked with `tool_choice={chat.tool_choice}`.\n"
                f"You MUST {_ABOUT_CHOICES[chat.tool_choice]} in the next message."
            )
            yield from self._order("tool-choice", text)
        match chat.response_format:
            case None | {"type": "text"}:
                return
            case {"type": "json_object"}:
                yield from self._order("response-format", _ABOUT_FORMAT.format("json_object"))
            case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
                text = _ABOUT_FORMAT.format("json_schema")
                shown = _ABOUT_SCHEMA.format(_in_json(schema))
                yield from self._order("response-format", text + shown)
            case _:
                raise RequestError("unsupported_response_format")


class _KimiThinking(NamedTuple):
    """Whether the model thinks, and how much; "" if nothing is said of that."""

    is_on: bool
    effort: str

    @classmethod
    def read(cls, variables: Mapping[str, Any]) -> "_KimiThinking":
        """Returns what a request's variables say.

        Raises:
            RequestError: there is no such effort.
        """
        is_on = variables.get("thinking", variables.get("enable_thinking"))
        effort = variables.get("reasoning_effort")
        if effort == "none":
            is_on = variables.get("thinking", variables.get("enable_thinking", False))
            effort = None
        effort = variables.get("thinking_effort", effort or _USUAL_EFFORT)
        if effort not in _EFFORTS:
            raise RequestError("template_failed")
        return cls(bool(is_on) if is_on is not None else True, effort)


def _in_json(value: Any) -> str:
    return json.dumps(with_sorted_keys(value), ensure_ascii=False, separators=(",", ":"))


def _type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, dict) else "array"


# By which name a result finds its call: the call's place, and its function.
_Targets = dict[str, tuple[int, Any]]


def _runs(messages: Messages) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Yields the messages in runs: those that are no results, and the results that follow them."""
    others: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(message)
            continue
        if results:
            yield others, results
            others, results = [], []
        others.append(message)
    yield others, results


def _by_names(messages: Messages) -> Iterator[dict[str, Any]]:
    """Yields the messages with results in the order of their calls, as vLLM orders them.

    A result names its call by the id, or by the function's name and the call's number. If one names
    none, its run stays as it is.
    """
    for others, results in _runs(messages):
        yield from others
        targets: _Targets = {}
        for place, call in enumerate((others and others[-1].get("tool_calls")) or ()):
            name = call["function"].get("name")
            if isinstance(name, str) and name:
                for alias in (call.get("id"), f"{name}:{place}"):
                    if alias:
                        targets.setdefault(str(alias), (place, name))
        found = _targets_of(results, targets)
        yield from results if None in found else _ordered(results, found)


def _by_ids(messages: Messages) -> Iterator[dict[str, Any]]:
    """Yields the messages as the checkpoint's code orders them: by the calls of the last answer."""
    targets: _Targets = {}
    for others, results in _runs(messages):
        yield from others
        answers = [one for one in others if one["role"] == "assistant"]
        if answers:
            targets = {}
            for place, call in enumerate(answers[-1].get("tool_calls") or ()):
                if call.get("id") is not None:
                    targets.setdefault(str(call["id"]), (place, call["function"].get("name")))
        yield from _ordered(results, _targets_of(results, targets))


def _targets_of(
    results: Messages, targets: Mapping[str, tuple[int, Any]]
) -> list[tuple[int, Any] | None]:
    ids = [one.get("tool_call_id") for one in results]
    return [None if one is None else targets.get(str(one)) for one in ids]


def _ordered(
    results: Messages, found: Sequence[tuple[int, Any] | None]
) -> Iterator[dict[str, Any]]:
    """Yields results with the names of what they are of; in its order, if all are of something."""
    pairs = list(zip(results, found, strict=True))
    if None not in found:
        pairs.sort(key=lambda pair: pair[1][0] if pair[1] else 0)
    for result, target in pairs:
        name = target[1] if target else None
        if name is None:
            yield result
        else:
            yield {**result, "tool": name, **({"name": name} if "name" in result else {})}
