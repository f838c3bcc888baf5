"""Reports to other routers where conversations, sessions and responses belong.

All routers that share have the same keys for them (`extproc.routing.claims.homes`), so a
conversation that comes through another router finds its worker there. What changes is reported at
the next tick, in order; a newcomer gets the latest homes that this router knows, those that others
reported included.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import islice

from extproc.routing.claims.homes import Homes, Turn
from extproc.routing.claims.marks import packed
from extproc.sharing.messages import (
    KEYS_OF_HOME,
    MAX_HOME_KEYS,
    MAX_HOMES,
    HomeKind,
    HomeReport,
    known_report,
    turn_report,
)

# Most changes that wait for the next tick, and most homes that are reported to a newcomer.
MAX_WAITING = 1_024
MAX_KNOWN = 1_024


class HomeReports:
    """The changes that wait for the next tick. dropped: those for which there was no room."""

    def __init__(self) -> None:
        self._waiting: deque[HomeReport] = deque()
        self.dropped = 0

    def note_turn(self, worker: int, turn: Turn) -> None:
        """Notes that a conversation's request was sent to a worker."""
        self._add(turn_report(worker, turn))

    def note_home(self, worker: int, key: int) -> None:
        """Notes that a key belongs to a worker from now on."""
        self._add(known_report(worker, (key,), (0.0,)))

    def note_not_computed(self, worker: int, keys: Sequence[int]) -> None:
        """Notes that a worker did not compute the request with these keys."""
        self._add(HomeReport(worker, packed(keys[:KEYS_OF_HOME]), HomeKind.OVER))

    def take(self) -> deque[HomeReport]:
        """Returns the changes, oldest first, which wait no longer."""
        waiting, self._waiting = self._waiting, deque()
        return waiting

    def _add(self, report: HomeReport) -> None:
        if len(self._waiting) == MAX_WAITING:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append(report)


def known_homes(homes: Homes, ids: Mapping[str, int], now: float) -> list[HomeReport]:
    """Returns the latest homes, each worker's in the order in which they were noted.

    ids: those of workers in messages, by name; homes of other workers are left out.
    """
    by_worker: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
    for key, worker, since in reversed(list(islice(homes.latest(), MAX_KNOWN))):
        if worker in ids:
            by_worker[ids[worker]].append((key, now - since))
    reports = []
    for worker_id, known in by_worker.items():
        for start in range(0, len(known), KEYS_OF_HOME):
            some = known[start : start + KEYS_OF_HOME]
            reports.append(
                known_report(worker_id, [key for key, _ in some], [age for _, age in some])
            )
    return reports


def some_of(waiting: deque[HomeReport]) -> tuple[HomeReport, ...]:
    """Takes as many entries as one message may have."""
    taken: list[HomeReport] = []
    keys = 0
    while waiting and len(taken) < MAX_HOMES:
        keys += waiting[0].key_count
        if keys > MAX_HOME_KEYS:
            break
        taken.append(waiting.popleft())
    return tuple(taken)
