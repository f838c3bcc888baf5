"""Reports to other routers what media items are, as they are learned here."""

from collections import deque
from collections.abc import Callable, Iterable

from extproc.media.identities import Identities, Identity
from extproc.media.item_report import ItemReport
from extproc.sharing.messages import MAX_ITEMS

# Most items that wait for the next message, and that are reported to a newcomer: of more, the
# latest.
MAX_WAITING = 1_024
MAX_ANSWERED = 512

# Most runs of ids in the items of one message.
MAX_ITEM_RUNS = 1_024


def nothing_known() -> Iterable[tuple[bytes, Identity]]:
    """Returns nothing: no item is known."""
    return ()


class ItemReports:
    """The items that other routers still have to be told of.

    known: returns the items that are known here, the latest used last.
    """

    def __init__(self) -> None:
        self.known: Callable[[], Iterable[tuple[bytes, Identity]]] = nothing_known
        self._waiting: deque[ItemReport] = deque(maxlen=MAX_WAITING)

    def __bool__(self) -> bool:
        """Returns whether any item waits."""
        return bool(self._waiting)

    def note(self, key: bytes, identity: Identity) -> None:
        """Notes an item that was learned here, once it is known to its end."""
        report = ItemReport.of(key, identity)
        if report is not None:
            self._waiting.append(report)

    def answer(self) -> None:
        """Notes that a newcomer is to be told of what is known."""
        waiting, self._waiting = self._waiting, deque(maxlen=MAX_WAITING)
        for key, identity in list(self.known())[-MAX_ANSWERED:]:
            self.note(key, identity)
        self._waiting.extend(waiting)

    def take(self) -> tuple[ItemReport, ...]:
        """Takes as many items as one message may have."""
        taken: list[ItemReport] = []
        runs = 0
        while self._waiting and len(taken) < MAX_ITEMS:
            runs += len(self._waiting[0].runs)
            if runs > MAX_ITEM_RUNS:
                break
            taken.append(self._waiting.popleft())
        return tuple(taken)


def learn_items(identities: Identities, reports: Iterable[ItemReport]) -> None:
    """Learns items from another router; what is known to its end here stays."""
    for report in reports:
        known = identities.find(report.key)
        if known is None or not known.is_whole:
            identities.put(report.key, report.identity)
