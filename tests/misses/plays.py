"""Which conversations are played with which causes: the same ones in every run. Pure."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from random import Random
from typing import NamedTuple

from tests.clients.scripted_model import RESPONSES
from tests.misses import planting
from tests.misses.planting import Change, Planted, renewed
from tests.misses.recordings import CLIENTS, Asked, Conversation, recorded


class Happening(Enum):
    """What happens between two turns to the worker of the first one; its value is the cause."""

    NOTHING = ""
    DRAINED = "elsewhere"
    EVICTED = "evicted"
    RESTARTED = "restarted"
    CLEARED = "cleared"


class Play(NamedTuple):
    """Requests of a conversation that are sent one after the other.

    cause: what is planted, as the table names it. at: the number of the request at which it shows.
    change: where its prompt leaves the one before. happening: what happens just before it. kept:
    the share of the last prompt that an eviction leaves. is_late: whether an engine tells of what
    happened with that request only.
    """

    name: str
    cause: str
    asked: Sequence[Asked]
    at: int
    change: Change | None = None
    happening: Happening = Happening.NOTHING
    kept: float = 0.0
    is_late: bool = False


# The names of the conversations into which causes are planted.
_LONG = "goes on"
_NAMES = ("fixes", "is asked again", _LONG)

# What is left of a prompt by an eviction.
_SHARES = (0.0, 0.5, 0.9)

NOTHING, CLOCK = "nothing", "clock in the system prompt"
NAMELESS = "clock, of clients that name no session"
REORDERED, ADDED = "tools reordered", "tool added"
COMPACTED, BY_ITSELF = "compaction", "compaction by the client itself"
EFFORT, UNSEEN = "effort that the template prints", "effort that it does not print"
MARKS = "cache_control moved"
HAPPENINGS: Mapping[str, Happening] = {
    "another worker, as one drains": Happening.DRAINED,
    "eviction by others": Happening.EVICTED,
    "restart of the worker": Happening.RESTARTED,
    "cleared cache": Happening.CLEARED,
}

_Making = Callable[[Sequence[Asked], int, Random], Planted]


def _clock(turns: Sequence[Asked], number: int, rng: Random) -> Planted:
    form, is_last = rng.randrange(len(planting.CLOCKS)), rng.random() < 1 / 3
    return planting.clock(turns, number, form, is_last=is_last)


def _nameless(turns: Sequence[Asked], number: int, rng: Random) -> Planted:
    return _clock(planting.nameless(turns), number, rng)


def _reordered(turns: Sequence[Asked], number: int, rng: Random) -> Planted:
    first, second = sorted(rng.sample(range(_places(turns)), 2))
    return planting.tools_reordered(turns, number, first, second)


def _added(turns: Sequence[Asked], number: int, rng: Random) -> Planted:
    return planting.tool_added(turns, number, rng.randrange(_places(turns) + 1))


def _places(turns: Sequence[Asked]) -> int:
    """How many of the tools are printed in their order, each as one."""
    return 4 if turns[0].path == RESPONSES else len(turns[0].body["tools"])


def _compacted(turns: Sequence[Asked], number: int, _: Random) -> Planted:
    return planting.compacted(turns, number)


def _effort(turns: Sequence[Asked], number: int, rng: Random) -> Planted:
    return planting.effort_changed(turns, number, rng.randrange(len(planting.EFFORTS)))


def _unseen(turns: Sequence[Asked], number: int, rng: Random) -> Planted:
    return planting.effort_unseen(turns, number, rng.randrange(len(planting.EFFORTS)))


def _marks(turns: Sequence[Asked], number: int, rng: Random) -> Planted:
    return planting.cache_control_moved(turns, number, rng.randrange(3))


def _nothing(turns: Sequence[Asked], number: int, _: Random) -> Planted:
    return planting.nothing(turns, number)


_CHANGES: Mapping[str, _Making] = {
    NOTHING: _nothing,
    CLOCK: _clock,
    NAMELESS: _nameless,
    REORDERED: _reordered,
    ADDED: _added,
    COMPACTED: _compacted,
    UNSEEN: _unseen,
    MARKS: _marks,
}


def plays(count: int, seed: int = 60) -> Iterator[Play]:
    """Yields plays of each cause, so many for each client, mixed."""
    rng, numbers = Random(seed), iter(range(1_000, 100_000))
    found: list[Play] = []
    for client in CLIENTS:
        for cause, make in _CHANGES.items():
            if cause == MARKS and client == "codex":
                continue  # its API has none
            times = count * 3 // 2 if cause == MARKS else count
            found += [_play(client, cause, make, next(numbers), rng) for _ in range(times)]
        for cause, happening in HAPPENINGS.items():
            for turn in range(count):
                play = _play(client, cause, _nothing, next(numbers), rng)
                share = _SHARES[turn % len(_SHARES)]
                is_late = happening is Happening.CLEARED and bool(turn % 2)
                found.append(play._replace(happening=happening, kept=share, is_late=is_late))
        found += [_by_itself(client, next(numbers)) for _ in range(max(1, count // 2))]
    rng.shuffle(found)
    yield from found


def plays_of_effort(count: int, seed: int = 61) -> Iterator[Play]:
    """Yields plays for a template that prints the effort."""
    rng, numbers = Random(seed), iter(range(200_000, 300_000))
    for _ in range(count):
        for client in CLIENTS:
            yield _play(client, EFFORT, _effort, next(numbers), rng)


def proving(seed: int = 62) -> Iterator[Play]:
    """Yields plays that show a router all forms of requests."""
    rng, numbers = Random(seed), iter(range(400_000, 500_000))
    for client in CLIENTS:
        for cause, make in _CHANGES.items():
            if cause != MARKS or client != "codex":
                yield _play(client, cause, make, next(numbers), rng)


def _play(client: str, cause: str, make: _Making, number: int, rng: Random) -> Play:
    """Returns the requests around the one in which a cause shows: at most two before, one after."""
    is_long = cause == COMPACTED  # a summary is shorter than what it replaces
    conversation = renewed(recorded(client)[_LONG if is_long else rng.choice(_NAMES)], number)
    turns = conversation.turns
    at = rng.randrange(len(turns) // 2 if is_long else 1, len(turns) - 1)
    planted = make(turns, at, rng)
    first = max(0, at - 2)
    name = f"{cause}, {client}-{number}, turn {at}"
    return Play(name, cause, planted.turns[first : at + 2], at - first, planted.change)


def _by_itself(client: str, number: int) -> Play:
    """Returns the conversation that the client compacted, from two turns before to its end."""
    conversation = renewed(recorded(client)["compacts"], number)
    at = compacted_at(conversation)
    change = planting.compacted(conversation.asked[:at], at - 2).change
    asked = conversation.asked[max(0, at - 3) :]
    return Play(f"{BY_ITSELF}, {client}-{number}", BY_ITSELF, asked, at - max(0, at - 3), change)


def compacted_at(conversation: Conversation) -> int:
    """The number of the first request after a client has compacted its conversation."""

    def length(asked: Asked) -> int:
        return len(str(asked.body.get("messages") or asked.body.get("input")))

    turns = [at for at, asked in enumerate(conversation.asked) if asked.is_agent]
    pairs = itertools.pairwise(turns)
    return next(
        after
        for before, after in pairs
        if length(conversation.asked[after]) < length(conversation.asked[before])
    )
