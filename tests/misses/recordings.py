"""Conversations of real coding agents, as they sent them: read from files, and written to them.

Each file has one client's conversations: JSON lines, one a request, compressed together, since each
body repeats the one before. `python -m tests.misses.record` makes them anew.
"""

import json
import lzma
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

Body = dict[str, Any]

FOLDER = Path(__file__).with_name("recorded")

CLIENTS = ("claude-code", "codex", "opencode")


class Asked(NamedTuple):
    """A request. headers: those by which clients and conversations are told apart, lower case."""

    path: str
    headers: Mapping[str, str]
    body: Body

    @property
    def is_agent(self) -> bool:
        """Whether it has tools, as all turns of a conversation have; one for a title has none."""
        return bool(self.body.get("tools"))


class Conversation(NamedTuple):
    """All requests of one conversation, in their order. name: what happened in it."""

    client: str
    name: str
    asked: tuple[Asked, ...]

    @property
    def turns(self) -> tuple[Asked, ...]:
        """The requests with tools."""
        return tuple(one for one in self.asked if one.is_agent)


def file_of(client: str) -> Path:
    """The file of a client's conversations."""
    return FOLDER / f"{client}.jsonl.xz"


@cache
def recorded(client: str) -> Mapping[str, Conversation]:
    """A client's conversations by their names."""
    found: dict[str, list[Asked]] = {}
    for line in lzma.decompress(file_of(client).read_bytes()).splitlines():
        told = json.loads(line)
        one = Asked(told["path"], told["headers"], told["body"])
        found.setdefault(told["conversation"], []).append(one)
    return {name: Conversation(client, name, tuple(asked)) for name, asked in found.items()}


def write(client: str, conversations: Iterable[Conversation]) -> None:
    """Writes all conversations of a client."""
    lines = [
        json.dumps({"conversation": one.name, **asked._asdict()}, ensure_ascii=False)
        for one in conversations
        for asked in one.asked
    ]
    packed = lzma.compress("\n".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME)
    file_of(client).write_bytes(packed)
