"""What an owner holds, as another process needs it to hold the same."""

from collections.abc import Generator
from typing import NamedTuple

from kvstate.errors import DamagedError
from kvstate.owner import Owner
from kvstate.relay.records import orphans_in, orphans_payload
from kvstate.saved import SavedOwner

# Orphans that are encoded, or parked, in one step.
ORPHANS_AT_ONCE = 64


class Holding(NamedTuple):
    """The rows of an owner, and the blocks that wait for their parents, in pieces of bytes."""

    rows: list[bytes]
    orphans: list[bytes]


def copying(owner: Owner, holding: Holding) -> Generator[None, None, SavedOwner]:
    """Appends what an owner holds to `holding`, in steps; returns what else is known of it.

    Nothing else may change the owner until it is done.
    """
    saved = yield from owner.saving(holding.rows)
    orphans = owner.orphans.all()
    for begin in range(0, len(orphans), ORPHANS_AT_ONCE):
        holding.orphans.append(orphans_payload(orphans[begin : begin + ORPHANS_AT_ONCE]))
        yield
    return saved


def putting(owner: Owner, saved: SavedOwner, holding: Holding) -> Generator[None, None, None]:
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
