"""What an owner holds, as another process needs it to hold the same, and how it arrives there."""

from typing import Generic, NamedTuple, TypeVar

from kvstate.errors import DamagedError
from kvstate.index.owner import Owner
from kvstate.relay.records import Kind, orphans_in, orphans_payload
from kvstate.rows.format import SavedOwner
from kvstate.steps import Steps

# Orphans that are encoded, or parked, in one step.
ORPHANS_AT_ONCE = 64


class Holding(NamedTuple):
    """The rows of an owner, and the blocks that wait for their parents, in pieces of bytes."""

    rows: list[bytes]
    orphans: list[bytes]


Beginning = TypeVar("Beginning")


class Arriving(Generic[Beginning]):
    """A rank or a store whose beginning, rows and orphans come in records, one after the other."""

    def __init__(self) -> None:
        self._beginning: Beginning | None = None
        self._holding = Holding([], [])

    def begin(self, beginning: Beginning | None) -> None:
        """Notes which one comes, None if none does; forgets what came of another one."""
        self._beginning, self._holding = beginning, Holding([], [])

    def take(self, kind: int, payload: bytes) -> bool:
        """Takes the payload of a record; returns whether it is of a kind that has some of it."""
        if kind == Kind.ROWS:
            self._holding.rows.append(payload)
        elif kind == Kind.ORPHANS:
            self._holding.orphans.append(payload)
        else:
            return False
        return True

    def end(self) -> tuple[Beginning, Holding]:
        """Returns what came, all of which is here now.

        Raises:
            DamagedError: it did not begin.
        """
        beginning, holding = self._beginning, self._holding
        self.begin(None)
        if beginning is None:
            raise DamagedError("rows without their beginning")
        return beginning, holding


def copying(owner: Owner, holding: Holding) -> Steps[SavedOwner]:
    """Appends what an owner holds to `holding`, in steps; returns what else is known of it.

    Nothing else may change the owner until it is done.
    """
    saved = yield from owner.saving(holding.rows)
    orphans = owner.orphans.all()
    for begin in range(0, len(orphans), ORPHANS_AT_ONCE):
        holding.orphans.append(orphans_payload(orphans[begin : begin + ORPHANS_AT_ONCE]))
        yield
    return saved


def putting(owner: Owner, saved: SavedOwner, holding: Holding) -> Steps[None]:
    """Has an owner hold, in steps, what another one held, and nothing else.

    Of the blocks that wait, it keeps as many as its limits allow.

    Raises:
        DamagedError: it cannot hold that; it holds nothing then.
    """
    yield from owner.forgetting()
    waiting = []
    for some in holding.orphans:
        waiting.append(orphans_in(some))
        yield
    if not (yield from owner.restoring(saved, holding.rows)):
        raise DamagedError("rows that cannot be used")
    for orphans in waiting:
        owner.park(orphans)
        yield
