"""Events that lie in a store by their medium alone: connectors that name no locality.

LMCache (0.5.6) and vLLM's MooncakeStoreConnector (0.32) publish what they put into a store as their
engine's events, with the medium "cpu" or "CPU", which is also that of an engine's own host memory.
So which media lie in a store is configured.
"""

from collections.abc import Collection, Iterable

from msgspec.structs import replace

from kvstate.events import AllCleared, BlocksRemoved, Body, Event, OtherGroupStored


def names_media(body: Body, media: Collection[str]) -> bool:
    """Whether a message may have events of these media, in capitals: true for a few that do not."""
    if not isinstance(body, bytes):
        return bool(media)
    return any(one.encode() in body or one.lower().encode() in body for one in media)


def parted(events: Iterable[Event], media: Collection[str]) -> tuple[list[Event], list[Event]]:
    """Returns the events that are not of these media, in capitals, and those that are."""
    own: list[Event] = []
    shared: list[Event] = []
    for event in events:
        match event:
            case AllCleared() | OtherGroupStored():
                own.append(event)
            case _:
                (shared if event.medium in media else own).append(event)
    return own, shared


def without_copies(event: Event) -> Event:
    """Returns an event whose removals leave no copy, as those of a store."""
    if isinstance(event, BlocksRemoved):
        return replace(event, remaining_copies=[0] * len(event.hashes))
    return event
