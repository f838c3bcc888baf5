"""What sources say of the fleet, and the one view that is made of it.

A source always gives a whole view, never a difference: what it does not name any more is gone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from extproc.config import Worker

# More from one source is a mistake, such as a selector that takes in the whole cluster.
MAX_FOUND = 10_000

STATIC = "workers"


@dataclass(frozen=True, slots=True)
class Found:
    """One worker as a source sees it.

    excluded: why it gets no requests now, "" if it may. identity: tells an engine from another one
    that was given the same address later. adapters: the adapter's name for each number, where its
    events carry numbers only.
    """

    worker: Worker
    excluded: str = ""
    identity: str = ""
    adapters: tuple[tuple[int, str], ...] = ()


class Member(NamedTuple):
    """A worker of the fleet, and the name of the source that it is taken from."""

    found: Found
    source: str


View = Sequence[Found]
Fleet = Mapping[str, Member]  # by endpoint as it was configured or found


def listed(workers: Sequence[Worker]) -> tuple[Found, ...]:
    """The view of a list in the form of the configuration."""
    return tuple(Found(worker) for worker in workers)


def merged(views: Mapping[str, View]) -> dict[str, Member]:
    """The fleet: all views together; the first source that names an endpoint describes it."""
    fleet: dict[str, Member] = {}
    for source, view in views.items():
        for found in view:
            fleet.setdefault(found.worker.endpoint, Member(found, source))
    return fleet


def doubles(views: Mapping[str, View]) -> Iterator[tuple[str, str]]:
    """What is named by two sources: the later source, and what is to be said of it."""
    first: dict[str, str] = {}
    for source, view in views.items():
        for found in view:
            owner = first.setdefault(found.worker.endpoint, source)
            if owner != source:
                yield source, f"{found.worker.endpoint} is taken from {owner}, which names it too"
