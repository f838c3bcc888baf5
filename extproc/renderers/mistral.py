"""Mistral's way to write conversations, as Mistral's own library writes them for vLLM.

Written from the behaviour of mistral-common 1.13 (instruct tokenizers v3 to v15, with their
normalizers) behind vLLM 0.32.0 (tokenizers/mistral.py): it gets the messages as the client sent
them, and tokenizes every text by itself. Versions differ in where tools stand, how calls and
results are written, and what becomes of system turns.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, groupby
from typing import Any, NamedTuple

from extproc.base.errors import RequestError
from extproc.renderers.render_input import dialect_of, render_input
from extproc.renderers.segments import ControlMarks, Segment
from extproc.requests.chat_request import Messages
from extproc.requests.costly_json import refuse_costly
from extproc.requests.dialect import Effort
from extproc.requests.prompt import DISABLED, Chat

# Characters of an id of a call that count, the last ones: vLLM shortens ids. It does not in
# responses, but where ids are written, the library accepts none that is longer.
_ID_CHARACTERS = 9

_NEEDED = (
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
)
_OF_SYSTEMS = ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
_OF_THOUGHTS = ("[THINK]", "[/THINK]")
_OF_SETTINGS = ("[MODEL_SETTINGS]", "[/MODEL_SETTINGS]")

# What a request may set besides its messages, without effect on the prompt or with one known here.
_VARIABLES = frozenset(("add_generation_prompt", "continue_final_message", "tools", "documents"))


class _Version(NamedTuple):
    """The rules of a version.

    number: a release knows the rules of all numbers before its own. needs: control tokens besides
    those of all versions. between_parts: what joins the parts of a text.
    """

    number: int
    needs: tuple[str, ...] = ()
    between_parts: str = "\n\n"


_VERSIONS = {
    "v3": _Version(3),
    "v7": _Version(7, (*_OF_SYSTEMS, "[TOOL_CONTENT]")),
    "v11": _Version(11, (*_OF_SYSTEMS, "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]")),
    "v13": _Version(13, (*_OF_SYSTEMS, "[ARGS]")),
    "v15": _Version(15, (*_OF_SYSTEMS, *_OF_SETTINGS, "[ARGS]"), ""),
}

_BETWEEN_MESSAGES = "\n\n"


class _Thought(NamedTuple):
    """What a model thought before an answer."""

    text: str


# A text, or texts and thoughts in turn.
_Content = str | list[str | _Thought]


class _Turn(NamedTuple):
    """Messages of one role that follow each other, as one. call_id: of a tool's result."""

    role: str
    content: _Content
    calls: tuple[dict[str, Any], ...] = ()
    call_id: str = ""


def _refusal() -> RequestError:
    """Returns the error for a conversation that the engine refuses as well."""
    return RequestError("template_failed")


class Mistral:
    """Renders the conversations of a model with Mistral's tokenizer.

    version: of the tokenizer, such as "v13". controls: the ids of its control tokens. marks: of
    these. settings: what a request may set from version 15 on, as tekken.json lists it.

    Raises:
        ValueError: the version is not known, or a control token or a setting is missing.
    """

    is_shown_by_tokenize = True
    drops_media = False

    def __init__(
        self,
        version: str,
        controls: Mapping[str, int],
        marks: ControlMarks,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if version not in _VERSIONS:
            raise ValueError(f"Mistral's tokenizers of version {version[:16]} are not known here")
        self._version = _VERSIONS[version]
        missing = {*_NEEDED, *self._version.needs} - controls.keys()
        if missing:
            raise ValueError(f"it has no control tokens {', '.join(sorted(missing))}")
        self._ids = controls
        self._thinks = self._version.number >= 13 and controls.keys() >= set(_OF_THOUGHTS)
        self._efforts = _Efforts.read(settings) if self._version.number >= 15 else None
        self.marks: ControlMarks | None = marks
        self._marks = marks

    def render(self, chat: Chat, *, budget_seconds: float) -> tuple[str, int]:
        """Returns the joined segments of a conversation, as `Renderer.render`.

        budget_seconds: unused; the time grows as the conversation does.
        """
        del budget_seconds
        dialect = dialect_of(chat)
        if not dialect.takes_mistral or dialect.sglang is not None:
            raise RequestError("unsupported_by_engine")
        if not _VARIABLES.issuperset(chat.variables):
            raise _refusal()
        # the library gets messages as they were sent, billing headers included
        shown = render_input(chat, chat.messages, drops_billing_lines=False)
        messages = shown.messages
        is_open = bool(chat.variables.get("continue_final_message"))
        if (messages[-1].get("role") == "assistant") is not is_open:
            raise _refusal()
        segments = self._segments(self._turns(messages), chat, is_open=is_open)
        return self._marks.joined(segments), shown.forms

    def _segments(self, turns: list[_Turn], chat: Chat, *, is_open: bool) -> Iterator[Segment]:
        number = self._version.number
        askings = [place for place, turn in enumerate(turns) if turn.role == "user"]
        tools_at = askings[0 if number >= 13 else -1] if askings else -1
        last = len(turns) - 1
        yield self._ids["<s>"]
        for place, turn in enumerate(turns):
            if turn.role == "user":
                if place == tools_at:
                    yield from self._tools(chat.variables.get("tools"))
                    yield from self._settings(chat)
                yield from self._between("[INST]", self._written(turn.content), "[/INST]")
            elif turn.role == "system":
                yield from self._between(
                    "[SYSTEM_PROMPT]", self._written(turn.content), "[/SYSTEM_PROMPT]"
                )
            elif turn.role == "tool":
                yield from self._between("[TOOL_RESULTS]", self._result(turn), "[/TOOL_RESULTS]")
            else:
                yield from self._answer(turn)
                if not (is_open and place == last):
                    yield self._ids["</s>"]

    def _between(self, before: str, inner: Iterable[Segment], after: str) -> Iterator[Segment]:
        yield self._ids[before]
        yield from inner
        yield self._ids[after]

    def _tools(self, tools: list[dict[str, Any]] | None) -> Iterator[Segment]:
        if not tools:
            return
        written = json.dumps([_tool(tool["function"]) for tool in tools], ensure_ascii=False)
        yield from self._between("[AVAILABLE_TOOLS]", (written,), "[/AVAILABLE_TOOLS]")

    def _settings(self, chat: Chat) -> Iterator[Segment]:
        if self._efforts is None:
            return
        effort = self._efforts.chosen(chat)
        if effort is not None:
            written = json.dumps({"reasoning_effort": effort}, ensure_ascii=False)
            yield from self._between("[MODEL_SETTINGS]", (written,), "[/MODEL_SETTINGS]")

    def _written(self, content: _Content) -> Iterable[Segment]:
        return (content,) if isinstance(content, str) else self._with_thoughts(content)

    def _with_thoughts(self, content: list[str | _Thought]) -> Iterator[Segment]:
        for part in content:
            if isinstance(part, str):
                yield part
            elif not self._thinks:
                raise _refusal()
            else:
                yield from self._between("[THINK]", (part.text,), "[/THINK]")

    def _answer(self, turn: _Turn) -> Iterator[Segment]:
        content = turn.content
        if not content and not turn.calls:
            raise _refusal()
        if self._version.number < 7 and turn.calls and content:
            raise _refusal()
        yield from self._written(content.rstrip(" ") if isinstance(content, str) else content)
        if not turn.calls:
            return
        if self._version.number < 11:
            calls = [
                {
                    "name": call["function"]["name"],
                    "arguments": call["function"]["arguments"],
                    "id": _call_id(call.get("id")),
                }
                for call in turn.calls
            ]
            yield self._ids["[TOOL_CALLS]"]
            yield json.dumps(calls, ensure_ascii=False)
            return
        for call in turn.calls:
            yield self._ids["[TOOL_CALLS]"]
            yield call["function"]["name"]
            if self._version.number < 13:
                yield self._ids["[CALL_ID]"]
                yield _call_id(call.get("id"))
            yield self._ids["[ARGS]"]
            yield json.dumps(call["function"]["arguments"], ensure_ascii=False)

    def _result(self, turn: _Turn) -> Iterator[Segment]:
        if self._version.number >= 13:
            yield from self._written(turn.content)
            return
        content = str(turn.content)  # no thought is in a result
        if self._version.number >= 7:
            yield turn.call_id
            yield self._ids["[TOOL_CONTENT]"]
            yield content
        else:
            result = {"content": _parsed(content), "call_id": turn.call_id}
            yield json.dumps(result, ensure_ascii=False)

    def _turns(self, messages: Messages) -> list[_Turn]:
        """Returns the conversation with messages of one role that follow each other as one."""
        number = self._version.number
        turns: list[_Turn] = []
        call_ids: list[str] = []
        for role, group in groupby(messages, key=_role):
            made = self._made(role, list(group))
            if role == "assistant":
                call_ids += [_call_id(call.get("id")) for call in made[0].calls]
            elif role == "tool":
                if number >= 11:
                    made = _in_order(made, call_ids)
                call_ids = []
            turns += made
        return turns if number >= 7 else _with_system_last(turns)

    def _made(self, role: str, messages: list[dict[str, Any]]) -> list[_Turn]:
        """Returns the turns that messages of one role become."""
        if role == "user":
            return [_Turn(role, self._joined(messages))]
        if role == "assistant":
            called = [one["tool_calls"] for one in messages if one.get("tool_calls")]
            calls = tuple(chain.from_iterable(called))
            if self._version.number < 7 and any(
                one.get("tool_calls") and one.get("content") for one in messages
            ):
                raise _refusal()
            return [_Turn(role, self._joined(messages), calls)]
        return [
            _Turn(role, self._joined([one]), call_id=_call_id(one.get("tool_call_id")))
            if role == "tool"
            else _Turn(role, self._joined([one]))
            for one in messages
        ]

    def _joined(self, messages: list[dict[str, Any]]) -> _Content:
        """Returns the contents of messages as one: texts joined, thoughts between them."""
        if len(messages) == 1 and "reasoning" not in messages[0]:
            content = messages[0].get("content")
            if isinstance(content, str):  # as in most messages
                return content
        found: list[str | _Thought] = []
        texts: list[str] = []
        for message in messages:
            between = _BETWEEN_MESSAGES
            for part in _parts(message):
                if isinstance(part, _Thought):
                    if texts:
                        found.append("".join(texts))
                        texts = []
                    found.append(part)
                elif part:
                    if texts:
                        texts.append(between)
                    texts.append(part)
                    between = self._version.between_parts
        if not found:
            return "".join(texts)
        return [*found, "".join(texts)] if texts else found


class _Efforts(NamedTuple):
    """The efforts that a model has. accepted: none means that none need be set."""

    accepted: frozenset[str]
    default: str | None
    may_be_unset: bool

    @classmethod
    def read(cls, settings: Mapping[str, Any] | None) -> "_Efforts":
        """Returns the efforts that a tekken.json lists.

        Raises:
            ValueError: it has other settings, or lists them in another form.
        """
        match settings:
            case {
                "reasoning_effort": {
                    "type": "enum",
                    "values": list(values),
                    "accepts_none": bool(unset),
                    "default": str() | None as default,
                }
            } if settings is not None and len(settings) == 1:
                return cls(frozenset(map(str, values)), default, unset)
        raise ValueError("its model settings are not known here")

    def chosen(self, chat: Chat) -> str | None:
        """Returns the effort that a conversation is written with, None for none.

        Raises:
            RequestError: the model does not have it.
        """
        effort = chat.effort if chat.effort_rule is not Effort.IGNORED else ""
        if effort == DISABLED:
            effort = "none"
        if effort and effort not in self.accepted:
            raise _refusal()
        if not effort and not self.may_be_unset:
            raise _refusal()
        return effort or self.default


def _role(message: Mapping[str, Any]) -> str:
    role = message.get("role")
    if role == "developer":
        return "system"
    if role not in ("user", "assistant", "tool", "system"):
        raise _refusal()
    return str(role)


def _parts(message: Mapping[str, Any]) -> Iterator[str | _Thought]:
    """Yields the texts of a message, after what the model thought before."""
    role, content = message.get("role"), message.get("content")
    if role == "assistant":
        thought = message.get("reasoning")
        if thought is not None:
            if not isinstance(thought, str):
                raise _refusal()
            yield _Thought(thought)
    elif content is None:
        raise _refusal()
    if isinstance(content, str):
        yield content
    else:
        for part in content or ():
            if part["type"] != "text":
                raise _refusal()
            yield part["text"]


def _call_id(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _refusal()
    return value[-_ID_CHARACTERS:]


def _in_order(results: list[_Turn], call_ids: list[str]) -> list[_Turn]:
    """Returns results in the order of the calls, others behind them."""
    place = {call_id: number for number, call_id in enumerate(call_ids)}
    return sorted(results, key=lambda turn: place.get(turn.call_id, len(place)))


def _with_system_last(turns: list[_Turn]) -> list[_Turn]:
    """Returns the turns with the texts of system turns before the last user's."""
    texts = [str(turn.content) for turn in turns if turn.role == "system" and turn.content]
    others = [turn for turn in turns if turn.role != "system"]
    if not others or others[0].role != "user":
        others.insert(0, _Turn("user", ""))
    if texts:
        last = max(place for place, turn in enumerate(others) if turn.role == "user")
        content = "\n\n".join((*texts, str(others[last].content)))
        others[last] = others[last]._replace(content=content)
    return others


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": function["name"],
            "description": function.get("description") or "",
            "parameters": function.get("parameters") or {},
        },
    }


def _parsed(content: str) -> Any:
    """Returns the value of a result that is JSON, else its text; an empty one is an empty object.

    Raises:
        RequestError: it is costly to read, or the engine fails on it.
    """
    refuse_costly(content.encode("utf-8", "surrogatepass"))
    try:
        return json.loads(content or "{}")
    except json.JSONDecodeError:
        return content
    except (ValueError, RecursionError):
        raise _refusal() from None
