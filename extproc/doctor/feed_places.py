"""Who answers at the ports of a ZMQ feed, held against the configuration and the worker's word."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from extproc.doctor.answers import Told
from extproc.doctor.findings import About, Finding
from extproc.doctor.zmtp import NULL, Greeted
from kvstate.feeds.feed_sources import ZmqSource

PUBLISHERS = ("PUB", "XPUB")
REPLAYERS = ("ROUTER",)

Looks = Mapping[str, Greeted]  # by ZMQ endpoint


def judge_told(about: About, sources: Sequence[ZmqSource], told: Told | None) -> Iterator[Finding]:
    """What the worker itself says of its feed, against what is configured."""
    if told is None:
        return
    if not told.sources:
        yield about.wrong("events-off", f"the worker says that it publishes none ({told.path})")
        return
    if len(told.sources) != len(sources):
        says = f"{len(sources)} configured; the worker says {len(told.sources)} ({told.path})"
        yield about.wrong("ranks-miscounted", says)
    for ours, theirs in zip(sources, told.sources, strict=False):
        if not theirs.topic.startswith(ours.topic):
            says = f"{ours.topic!r} is subscribed to; the worker publishes under {theirs.topic!r}"
            yield about.wrong("topic-wrong", says)
            break
    if sources[0].replay is None and told.sources[0].replay is not None:
        says = f"none is configured; the worker has one at {told.sources[0].replay}"
        yield about.wrong("replay-unused", says)


class Telling(NamedTuple):
    """A worker, the places of its feed as they are configured, and what it says of them itself."""

    worker: str
    sources: Sequence[ZmqSource]
    told: Told | None


def judge_swapped(fleet: Sequence[Telling]) -> Iterator[Finding]:
    """Whether the places of one worker's feed are those that another one has by its own word.

    A place that nobody names may be right all the same: ports can be mapped between.
    """
    feeds, replays = _owners(fleet, "events"), _owners(fleet, "replay")
    for one in fleet:
        about = About(f"worker {one.worker}")
        for ours, theirs in zip(one.sources, one.told.sources if one.told else (), strict=False):
            owner = feeds.get(ours.events, one.worker)
            if owner != one.worker:
                says = f"{ours.events} is the feed of worker {owner}, by that worker's own word"
                says += f"; this one publishes at {theirs.events}"
                yield about.wrong("feed-swapped", says)
            elif not ours.binds and _port(ours.events) != _port(theirs.events):
                says = f"{ours.events} is configured; the worker says {theirs.events}"
                yield about.note("feed", f"{says}: right only if the ports are mapped or relayed")
            owner = replays.get(ours.replay or "", one.worker)
            if owner != one.worker:
                says = f"{ours.replay} is the replay of worker {owner}, by that worker's own word"
                says += f"; this one's is {theirs.replay or 'nowhere'}"
                yield about.wrong("replay-swapped", says)


def _owners(fleet: Sequence[Telling], what: str) -> dict[str, str]:
    """The worker that names a place as its own, by place; without those that several name."""
    owners: dict[str, str] = {}
    shared: set[str] = set()
    for one in fleet:
        for source in one.told.sources if one.told else ():
            place = getattr(source, what)
            if place is not None and owners.setdefault(place, one.worker) != one.worker:
                shared.add(place)
    return {place: name for place, name in owners.items() if place not in shared}


def _port(endpoint: str) -> str:
    return endpoint.rpartition(":")[2]


def judge_places(
    about: About, sources: Sequence[ZmqSource], looks: Looks, told: Told | None
) -> Iterator[Finding]:
    """Whether the publishers of all ranks are where they should be."""
    some_answer = any(looks[one.events].is_zmq for one in sources)
    for rank, source in enumerate(sources):
        look = looks[source.events]
        hint = _hint(source.events, told, rank)
        where = f"rank {rank}: {source.events}" if len(sources) > 1 else source.events
        if look.reason:
            is_only_rank = rank > 0 and some_answer
            code = "rank-missing" if is_only_rank else "feed-nobody-listens"
            yield about.wrong(code, f"{where}: {look.reason}{hint}")
        elif not look.is_zmq:
            yield about.wrong("feed-not-zmq", f"{where}: answers, but not as ZMQ does{hint}")
        elif look.mechanism != NULL:
            yield about.wrong("feed-secured", f"{where}: asks for ZMQ's {look.mechanism}")
        elif look.socket and look.socket not in PUBLISHERS:
            says = f"{where}: is a {look.socket} socket, and no publisher{hint}"
            yield about.wrong("feed-wrong-socket", says)


def judge_replays(about: About, sources: Sequence[ZmqSource], looks: Looks) -> Iterator[Finding]:
    """Whether the replay sockets of all ranks are where they should be."""
    for source in sources:
        if source.replay is None:
            continue
        look = looks[source.replay]
        if look.reason:
            yield about.wrong("replay-nobody-listens", f"{source.replay}: {look.reason}")
        elif not look.is_zmq:
            yield about.wrong("replay-not-zmq", f"{source.replay}: answers, but not as ZMQ does")
        elif look.socket and look.socket not in REPLAYERS:
            says = f"{source.replay}: is a {look.socket} socket, and answers no replays"
            yield about.wrong("replay-wrong-socket", says)


def is_publisher(look: Greeted) -> bool:
    """Whether it can be subscribed to."""
    return look.mechanism == NULL and look.socket in ("", *PUBLISHERS)


def is_replayer(look: Greeted) -> bool:
    """Whether it can be asked for a replay."""
    return look.mechanism == NULL and look.socket in ("", *REPLAYERS)


def _hint(endpoint: str, told: Told | None, rank: int) -> str:
    """Where else the worker says that the rank is; hosts may be its own names for itself."""
    if told is None or rank >= len(told.sources):
        return ""
    theirs = told.sources[rank].events
    if _port(theirs) == _port(endpoint):
        return ""
    return f"; the worker says that it publishes at {theirs}"
