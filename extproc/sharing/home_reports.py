"""Reports to other routers where conversations, sessions and responses belong.

All routers that share have the same keys for them (`extproc.routing.claims.homes`), so a
conversation that comes through another router finds its worker there. What changes is told at the
next tick, in order; a newcomer gets the latest homes that this router knows, those that others told
included.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import islice

from extproc.routing.claims.homes import Homes
from extproc.routing.claims.marks import packed
from extproc.sharing.messages import (
    KEYS_OF_HOME,
    MAX_HOME_KEYS,
    MAX_HOMES,
    HomeKind,
    HomeNews,
    known_news,
    turn_news,
)

# Most changes that wait for the next tick, and most homes that are told to a newcomer.
MAX_WAITING = 1_024
MAX_KNOWN = 1_024


class HomeReports:
    """The changes that wait for the next tick. dropped: those for which there was no room."""

    def __init__(self) -> None:
        self._waiting: deque[HomeNews] = deque()
        self.dropped = 0

    def note_turn(self, worker: int, keys: Sequence[int], follows: int) -> None:
        """Notes that a request with these keys was sent to a worker."""
        self._add(turn_news(worker, keys[:KEYS_OF_HOME], follows))

    def note_home(self, worker: int, key: int) -> None:
        """Notes that a key belongs to a worker from now on."""
        self._add(known_news(worker, (key,), (0.0,)))

    def note_over(self, worker: int, keys: Sequence[int]) -> None:
        """Notes that a worker did not compute the request with these keys."""
        self._add(HomeNews(worker, packed(keys[:KEYS_OF_HOME]), HomeKind.OVER))

    def take(self) -> deque[HomeNews]:
        """Returns the changes, oldest first, which wait no longer."""
        taken, self._waiting = self._waiting, deque()
        return taken

    def _add(self, news: HomeNews) -> None:
        if len(self._waiting) == MAX_WAITING:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append(news)


def known_homes(homes: Homes, ids: Mapping[str, int], now: float) -> list[HomeNews]:
    """Returns the latest homes, each worker's in the order in which they were noted.

    ids: those of workers in messages, by name; homes of other workers are left out.
    """
    by_worker: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
    for key, worker, since in reversed(list(islice(homes.latest(), MAX_KNOWN))):
        if worker in ids:
            by_worker[ids[worker]].append((key, now - since))
    told = []
    for worker_id, known in by_worker.items():
        for start in range(0, len(known), KEYS_OF_HOME):
            some = known[start : start + KEYS_OF_HOME]
            told.append(known_news(worker_id, [key for key, _ in some], [age for _, age in some]))
    return told


def some_of(waiting: deque[HomeNews]) -> tuple[HomeNews, ...]:
    """Takes as many entries as one message may have."""
    taken: list[HomeNews] = []
    keys = 0
    while waiting and len(taken) < MAX_HOMES:
        keys += waiting[0].key_count
        if keys > MAX_HOME_KEYS:
            break
        taken.append(waiting.popleft())
    return tuple(taken)
