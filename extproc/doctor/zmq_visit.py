"""A ZMQ feed: who answers at its ports, what is heard there, and whether it replays."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from extproc import address
from extproc.config import Worker
from extproc.doctor import feed_places, listening
from extproc.doctor.feed_places import Looks
from extproc.doctor.findings import About, Finding
from extproc.doctor.greeting import greeted
from extproc.doctor.heard import Heard, judge_heard
from extproc.doctor.http_visit import Visited
from extproc.doctor.listening import BEYOND_ALL, Listener, replayed
from extproc.doctor.means import Means
from extproc.doctor.probed_feed import judge_probe, judge_sizes
from kvstate.events import Tokens
from kvstate.feeds.feed_sources import ZmqSource

# How long a feed is listened to where nothing is provoked.
LISTEN_SECONDS = 2.0

Provoked = tuple[Tokens, int]  # as in Heard


async def visit(
    means: Means, worker: Worker, visited: Visited, sources: Sequence[ZmqSource], about: About
) -> list[Finding]:
    """Looks at every port, then listens; nothing that was published before is asked for."""
    findings = list(feed_places.judge_told(about, sources, visited.told))
    if sources[0].binds:
        says = "not checked: the router binds this feed's ports, and GET /workers tells its state"
        return [*findings, about.note("feed", says)]
    looks = await _looks(sources, means.seconds)
    findings += feed_places.judge_places(about, sources, looks, visited.told)
    findings += feed_places.judge_replays(about, sources, looks)
    there = {
        rank: one for rank, one in enumerate(sources) if feed_places.is_publisher(looks[one.events])
    }
    heard: list[Heard] = []
    if there:
        findings += await _listened(means, worker, visited, there, about, heard)
    provoked = {one.rank: one.provoked for one in heard if one.provoked is not None}
    return [*findings, *await _replays(means, sources, looks, provoked, about)]


async def _looks(sources: Sequence[ZmqSource], seconds: float) -> Looks:
    places = [each for one in sources for each in (one.events, one.replay) if each is not None]
    found = await asyncio.gather(*(greeted(address.parse_tcp(one), seconds) for one in places))
    return dict(zip(places, found, strict=True))


async def _listened(
    means: Means,
    worker: Worker,
    visited: Visited,
    sources: Mapping[int, ZmqSource],
    about: About,
    heard: list[Heard],
) -> list[Finding]:
    """Listens to the topic, and beside it to all, which shows what goes out under another.

    heard: gets what was heard of each rank.
    """
    all_topics = {rank: replace(one, topic="") for rank, one in sources.items()}
    ours = listening.subscribed(sources)
    heard += (one.heard for one in ours)
    others = [] if sources == all_topics else listening.subscribed(all_topics)
    try:
        return await _heard(means, worker, visited, (ours, others), about)
    finally:
        await asyncio.gather(*(one.close() for one in (*ours, *others)))


async def _heard(
    means: Means,
    worker: Worker,
    visited: Visited,
    both: tuple[list[Listener], list[Listener]],
    about: About,
) -> list[Finding]:
    ours, others = both
    every = [*ours, *others]
    connected = await asyncio.gather(
        *(one.until(lambda heard: heard.is_connected, means.seconds) for one in every)
    )
    if not all(connected):
        lost = next(
            (one.heard.lost for one in every if one.heard.lost), "no ZMQ connection in time"
        )
        return [about.wrong("feed-lost", lost)]
    findings: list[Finding] = []
    if means.probes and visited.is_there:
        findings += await judge_probe(means, worker, visited, ours, about)
    else:
        await asyncio.sleep(min(LISTEN_SECONDS, means.seconds))
        if not any(one.heard.batches for one in every):
            says = "connected; nothing was published meanwhile: --probe provokes an event"
            findings.append(about.note("feed", says))
    heard = [one.heard for one in ours]
    if any(one.heard.batches for one in others) and not any(one.batches for one in heard):
        says = "nothing came under the topic of the configuration, and something under another"
        return [about.wrong("topic-wrong", says)]
    return [*findings, *judge_heard(about, heard), *judge_sizes(means, worker, heard, about)]


async def _replays(
    means: Means,
    sources: Sequence[ZmqSource],
    looks: Looks,
    provoked: Mapping[int, Provoked],
    about: About,
) -> list[Finding]:
    asked = {
        rank: one
        for rank, one in enumerate(sources)
        if one.replay is not None and feed_places.is_replayer(looks[one.replay])
    }
    if not any(one.replay for one in sources):
        return [about.note("replay", "none is configured: what is lost on the way stays unknown")]
    found = await asyncio.gather(
        *(_replay(means, one, provoked.get(rank), about) for rank, one in asked.items())
    )
    return [finding for finding in found if finding is not None]


async def _replay(
    means: Means, source: ZmqSource, provoked: Provoked | None, about: About
) -> Finding | None:
    """Asks for the end of a replay; where probes are allowed, for all of it."""
    start = 0 if means.probes else BEYOND_ALL
    numbers, fault = await replayed(source, start, means.seconds)
    if fault and numbers:
        says = f"{source.replay}: {len(numbers)} batches came, then: {fault}"
        return about.wrong("replay-truncated", says)
    if fault:
        return about.wrong("replay-silent", f"{source.replay}: {fault}")
    if provoked is not None and not await _has(source, provoked, means.seconds):
        says = f"{source.replay}: its replay lacks the test request that the feed announced"
        return about.wrong("replay-swapped", says)
    if numbers and numbers[-1] - numbers[0] + 1 != len(numbers):
        says = f"{source.replay}: {len(numbers)} batches between {numbers[0]} and {numbers[-1]}"
        return about.wrong("replay-truncated", says)
    return about.right("replay", f"{source.replay} answers")


async def _has(source: ZmqSource, provoked: Provoked, seconds: float) -> bool:
    """Whether a replay has the blocks that were heard on the feed."""
    tokens, since = provoked
    heard = Heard(0, is_live=False)
    await replayed(source, since, seconds, heard)
    return heard.holds(tokens)
