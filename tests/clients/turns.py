"""The turns of many conversations at once: who answered them, and how many stayed."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from tests.clients.front import Front, Turn
from tests.clients.sessions import Session, converse
from tests.clients.starts import STARTS

Conversations = Mapping[tuple[str, int], list[Turn]]


class Stays(NamedTuple):
    """Of one client's later turns, how many reached the worker of the turn before.

    spread: the requests of each worker, fewest first.
    """

    requests: int
    stayed: int
    later: int
    spread: list[int]


async def all_converse(
    url: str, folder: Path, count: int, clients: Iterable[str] = STARTS
) -> list[Session]:
    """Runs this many conversations of each client, all at once."""
    async with asyncio.TaskGroup() as group:  # ends the others if one fails
        asked = [
            group.create_task(converse(client, number, url, folder))
            for client in clients
            for number in range(count)
        ]
    return [one.result() for one in asked]


def conversations(fronts: Sequence[Front]) -> Conversations:
    """The turns of each conversation in their order, by client and number."""
    found: dict[tuple[str, int], list[Turn]] = defaultdict(list)
    turns = [one for front in fronts for one in front.turns if one.is_agent]
    for turn in sorted(turns, key=attrgetter("length")):
        found[turn.client, turn.number].append(turn)
    return found


def stays_of(client: str, found: Conversations) -> Stays:
    """Counts a client's turns."""
    own = [turns for (name, _), turns in found.items() if name == client]
    pairs = [pair for turns in own for pair in pairwise(turns)]
    stayed = sum(before.worker == after.worker for before, after in pairs)
    spread = sorted(Counter(one.worker for turns in own for one in turns).values())
    return Stays(sum(map(len, own)), stayed, len(pairs), spread)
