"""Plants causes of misses into recorded conversations. Pure.

Each function takes the turns of a conversation and the number of one of them, and returns the turns
as a client would have sent them if that cause had begun there. `Change` is the part of the prompt
in which that turn leaves the one before; the token is found by rendering both
(`tests.misses.engine_prompts`).
"""

import copy
import json
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from tests.clients.scripted_model import CHAT, MESSAGES, RESPONSES
from tests.clients.sessions import LAST_WORDS
from tests.misses.recordings import Asked, Body, Conversation


class Change(NamedTuple):
    """Where a prompt leaves the one before it.

    part: tools, system, turn or template. indices: the numbers that the tool or turn may be given:
    in the request's list, and in what is rendered; empty where there is none. kinds: what may be
    said of it.
    """

    part: str
    indices: frozenset[int]
    kinds: frozenset[str]


class Planted(NamedTuple):
    """The turns with a cause in them. change: None if the prompt goes on as before."""

    turns: tuple[Asked, ...]
    change: Change | None


Turns = Sequence[Asked]
Edit = Callable[[Body, int], None]
"""Changes a body in place; also gets the number of its turn."""

_TASK = re.compile(r"Task [a-z-]+-\d+")
_ID = re.compile(r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b|(?<=ses_)[0-9a-f]{8}")


def renewed(conversation: Conversation, number: int) -> Conversation:
    """Returns a conversation as another one, with ids, a task, files and words of its own."""
    name = re.compile(rf"\b{re.escape(conversation.client)}-\d+\b")
    own = f"{conversation.client}-{number}"

    def of(found: re.Match[str]) -> str:
        made = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{own} {found[0]}"))
        return made[: len(found[0])]

    def again(asked: Asked) -> Asked:
        headers = {key: _ID.sub(of, value) for key, value in asked.headers.items()}
        said = json.dumps(asked.body).replace(LAST_WORDS, f"{LAST_WORDS[:-1]} of {own}.")
        return Asked(asked.path, headers, json.loads(name.sub(own, _ID.sub(of, said))))

    return conversation._replace(asked=tuple(map(again, conversation.asked)))


# Where clients name their sessions.
_NAMING_HEADERS = re.compile(".*session.*|.*thread.*|x-client-request-id|x-codex-.*")
_NAMING_FIELDS = ("metadata", "prompt_cache_key", "client_metadata")


def nameless(turns: Turns) -> tuple[Asked, ...]:
    """Returns the turns as a client would send them that names no session."""
    return tuple(
        Asked(
            one.path,
            {key: value for key, value in one.headers.items() if not _is_naming(key)},
            {key: value for key, value in one.body.items() if key not in _NAMING_FIELDS},
        )
        for one in turns
    )


def _is_naming(header: str) -> bool:
    return _NAMING_HEADERS.fullmatch(header) is not None


def _edited(turns: Turns, edit: Edit, since: int = 0) -> tuple[Asked, ...]:
    """Returns the turns with the bodies changed from one of them on."""
    made = []
    for at, asked in enumerate(turns):
        body = copy.deepcopy(asked.body)
        if at >= since:
            edit(body, at)
        made.append(asked._replace(body=body))
    return tuple(made)


def nothing(turns: Turns, _: int) -> Planted:
    """The conversation as it was."""
    return Planted(tuple(turns), None)


# How systems write the time of day into their prompts.
CLOCKS: Sequence[Callable[[datetime], str]] = (
    lambda now: f"Current time: {now.isoformat(timespec='seconds')}",
    lambda now: f"It is {now:%A, %d %B %Y, %H:%M:%S}.",
    lambda now: f"<time>{now:%a, %d %b %Y %H:%M:%S} GMT</time>",
    lambda now: f"Now: {now:%Y-%m-%d %H:%M:%S.%f}",
    lambda now: f"[{now:%H:%M:%S}]",
    lambda now: f"timestamp={now.timestamp():.0f}",
)
_BEGAN = datetime(2026, 11, 30, 9, 5, 37, 118_204, UTC)
_BETWEEN = timedelta(seconds=67, microseconds=341_901)


def clock(turns: Turns, number: int, form: int = 0, *, is_last: bool = False) -> Planted:
    """A clock at the head of the system prompt, or at its end; it stands still before the turn."""

    def edit(body: Body, at: int) -> None:
        now = _BEGAN + _BETWEEN * max(0, at - number + 1)
        holder, key = _system(body)
        words = CLOCKS[form % len(CLOCKS)](now)
        holder[key] = f"{holder[key]}\n\n{words}" if is_last else f"{words}\n\n{holder[key]}"

    return Planted(_edited(turns, edit), Change("system", frozenset(), frozenset(("time",))))


def _system(body: Body) -> tuple[Body, str]:
    """Returns the place of the first text of the system prompt that templates get."""
    if "system" in body:  # its first block is a line that engines drop
        return body["system"][1], "text"
    if "input" in body:
        return body["input"][0]["content"][0], "text"
    return body["messages"][0], "content"


def tools_reordered(turns: Turns, number: int, first: int = 0, second: int = 1) -> Planted:
    """Two tools change places; first: the one that comes first."""

    def edit(body: Body, _: int) -> None:
        tools = body["tools"]
        tools[first], tools[second] = tools[second], tools[first]

    tools = turns[number].body["tools"]
    change = Change("tools", _numbers_of_tool(tools, first), frozenset(("moved",)))
    return Planted(_edited(turns, edit, number), change)


def tool_added(turns: Turns, number: int, place: int = 0) -> Planted:
    """A tool comes before the one at a place, or last."""

    def edit(body: Body, _: int) -> None:
        body["tools"].insert(place, _new_tool(body))

    tools = turns[number].body["tools"]
    change = Change("tools", _numbers_of_tool(tools, place), frozenset(("inserted",)))
    return Planted(_edited(turns, edit, number), change)


def _numbers_of_tool(tools: Sequence[Body], place: int) -> frozenset[int]:
    """The number of a tool in the request, and in the prompt, which has those of a namespace."""
    printed = sum(len(tool.get("tools") or (0,)) for tool in tools[:place])
    unprinted = sum(tool.get("type") == "web_search" for tool in tools[:place])
    return frozenset((place, printed - unprinted))


def _new_tool(body: Body) -> Body:
    schema = {
        "type": "object",
        "properties": {"ticket": {"type": "string", "description": "Its number."}},
        "required": ["ticket"],
    }
    about = {"name": "look_up_ticket", "description": "Reads a ticket of the issue tracker."}
    if "system" in body:
        return {**about, "input_schema": schema}
    if "input" in body:
        return {"type": "function", **about, "parameters": schema, "strict": False}
    return {"type": "function", "function": {**about, "parameters": schema}}


_SUMMARY = (
    "1. Primary request, {task}: find out why add gives wrong results, and fix calc.py.\n"
    "2. Files: calc.py defines add, which subtracts; README.md names a calculator.\n"
    "3. What was done: the files were listed and read, and the cases were printed.\n"
    "4. Next: replace the minus by a plus, and look at the file again."
)


def compacted(turns: Turns, number: int) -> Planted:
    """What was said before a turn becomes a summary, in the client's own form."""
    form = {MESSAGES: _Compacted.by_claude_code, RESPONSES: _Compacted.by_codex}
    one = _Compacted(turns[number].path, turns[number].body)
    head, replaced, leads = form.get(one.path, _Compacted.by_opencode)(one)
    key = "input" if one.path == RESPONSES else "messages"
    length = len(turns[number].body[key])

    def edit(body: Body, _: int) -> None:
        body[key] = [*copy.deepcopy(head), *body[key][length:]]

    indices = frozenset((replaced, replaced - leads, replaced - leads + 1))
    change = Change("turn", indices, frozenset(("compaction",)))
    return Planted(_edited(turns, edit, number), change)


class _Compacted(NamedTuple):
    """A conversation at the turn at which it is compacted.

    Each method returns the turns that the client sends then, the number of the first one that is
    not as before, and how many of those before it belong to the system prompt.
    """

    path: str
    body: Body

    @property
    def summary(self) -> str:
        """What the model says of it."""
        found = _TASK.search(json.dumps(self.body))
        return _SUMMARY.format(task="" if found is None else found[0])

    def by_claude_code(self) -> tuple[list[Body], int, int]:
        """A summary for the user's first turn, the latest turns as they were, the reminders."""
        said = self.body["messages"]
        reminders = [turn for turn in said if turn["role"] == "system"][:1]
        latest = [turn for turn in said if turn["role"] != "system"][-2:]
        summary = (
            "The context was full, so what was said before stands here in short."
            f"\n\n{self.summary}\n\n"
            "Go on from there, and ask nothing more for now."
        )
        return [{"role": "user", "content": summary}, *latest, *reminders], 0, 0

    def by_codex(self) -> tuple[list[Body], int, int]:
        """All that users and developers said, then the summary as a user's."""
        items = self.body["input"]
        kept = [one for one in items if one["type"] == "message" and one["role"] != "assistant"]
        words = (
            "What was found out before by somebody else, who worked at the same, in short:"
            f"\n{self.summary}"
        )
        content = [{"type": "input_text", "text": words}]
        replaced = next(at for at, one in enumerate(items) if one["type"] != "message")
        leads = sum(one["role"] == "developer" for one in kept)
        return [*kept, {"type": "message", "role": "user", "content": content}], replaced, leads

    def by_opencode(self) -> tuple[list[Body], int, int]:
        """A question for the user's first turn, the summary as its answer, and a wish to go on."""
        system = [turn for turn in self.body["messages"] if turn["role"] == "system"]
        asked = {"role": "user", "content": "Say in short what was done until now."}
        goes_on = "Go on with the next step, if there is one, or say what is not clear."
        made = [*system, asked, {"role": "assistant", "content": self.summary}]
        return [*made, {"role": "user", "content": goes_on}], len(system), len(system)


EFFORTS = (("high", "low"), ("medium", "high"), ("low", "medium"), ("high", "medium"))


def effort_changed(turns: Turns, number: int, form: int = 0) -> Planted:
    """The client asks for another effort; the change counts only if the template prints it."""
    before, since = EFFORTS[form % len(EFFORTS)]

    def edit(body: Body, at: int) -> None:
        effort = before if at < number else since
        if "system" in body:
            body["output_config"] = {**body.get("output_config", {}), "effort": effort}
        elif "input" in body:
            body["reasoning"] = {**body.get("reasoning", {}), "effort": effort}
        else:
            body["reasoning_effort"] = effort

    change = Change("template", frozenset(), frozenset(("option",)))
    return Planted(_edited(turns, edit), change)


def effort_unseen(turns: Turns, number: int, form: int = 0) -> Planted:
    """The same, for a template that prints no effort."""
    return Planted(effort_changed(turns, number, form).turns, None)


_MARK = {"type": "ephemeral"}


def cache_control_moved(turns: Turns, number: int, form: int = 0) -> Planted:
    """The marks for a cache of another provider move, which no prompt shows."""

    def edit(body: Body, at: int) -> None:
        blocks = list(_blocks(body))
        for block in blocks:
            block.pop("cache_control", None)
        for step in (1, 2 + form % 3):
            blocks[-1 - (at * step) % len(blocks)]["cache_control"] = _MARK

    return Planted(_edited(turns, edit, number), None)


def _blocks(body: Body) -> Iterator[Body]:
    """Yields what may have a mark: tools and texts, which chats then have in parts."""
    if "system" in body:
        yield from body["tools"]
        yield from body["system"]
    for turn in body["messages"]:
        if isinstance(turn.get("content"), str) and turn["role"] != "assistant":
            turn["content"] = [{"type": "text", "text": turn["content"]}]
        if turn["role"] != "assistant":
            yield from turn["content"]


def takes_marks(turns: Turns) -> bool:
    """Whether the API of a conversation has marks for a cache."""
    return turns[0].path in (MESSAGES, CHAT)
