"""Checks a worker's feed: what answers at its ports, what it publishes, whether it can be replayed.

Every transport is tested with the project's own client. At a ZMQ port only the greeting and the
READY of ZMTP are read first: they show whether it is ZMQ at all, and which kind of socket.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from extproc.base import address
from extproc.base.address import Address
from extproc.config.feed_kinds import configured, kind_of
from extproc.config.schema import AUTO, WorkerEvents, WorkerSettings
from kvstate.errors import WireError
from kvstate.feeds.feed_sources import FeedSource, ZmqSource
from kvstate.overlap import Tokens
from kvstate.wire.zmtp import ZmtpSession
from kvtools.doctor import probe
from kvtools.doctor.faults import OF_FEEDS
from kvtools.doctor.findings import Finding, Subject
from kvtools.doctor.probe import (
    BEYOND_ALL,
    Listener,
    MessageSummary,
    judge_groups,
    judge_heard,
    judge_probe,
    judge_sizes,
    replayed,
)
from kvtools.doctor.worker_visit import ReportedSources, VisitTools, WorkerReport

NULL = "NULL"
PUBLISHERS = ("PUB", "XPUB")
REPLAYERS = ("ROUTER",)

# Longest wait for READY after a greeting; a socket that sends only a greeting is still ZMQ.
READY_SECONDS = 1.0

_READ_BYTES = 4096
_OFF = "`events.enabled` is false: requests are routed by load and by earlier requests"
Provoked = tuple[Tokens, int]  # as in Heard


class Greeting(NamedTuple):
    """What answers at a host:port.

    reason: why nothing answers, "" if something does. mechanism: the ZMQ security mechanism of its
    greeting, "" if it does not speak ZMQ. socket: the kind of its ZMQ socket, "" if not reported.
    is_silent: whether it accepts connections but sends no greeting in time.
    """

    reason: str = ""
    mechanism: str = ""
    socket: str = ""
    is_silent: bool = False

    @property
    def fault(self) -> str:
        """Why this is not considered a ZMQ socket, in words."""
        if self.is_silent:
            return "accepts connections, but sends nothing: it hangs, or is not a ZMQ socket"
        return "answers, but does not speak ZMQ"

    @property
    def is_zmq(self) -> bool:
        """Whether it speaks ZMQ."""
        return bool(self.mechanism)


Greetings = Mapping[str, Greeting]  # by ZMQ endpoint


class FeedReport(NamedTuple):
    """A worker, the configured addresses of its feed, and what it reports about its feed itself."""

    worker: str
    sources: Sequence[ZmqSource]
    reported: ReportedSources | None


async def visit(
    tools: VisitTools, worker: WorkerSettings, visited: WorkerReport, about: Subject
) -> list[Finding]:
    """Examines a worker's feed; returns the findings."""
    if not tools.config.events.enabled:
        return [about.note("events", _OFF)]
    if isinstance(worker.events, WorkerEvents):
        return await _configured(tools, worker, visited, about)
    sources = visited.sources.sources if visited.sources else ()
    if worker.events == AUTO:
        if sources:
            return await visit_zmq(tools, worker, visited, sources, about)
        if not visited.is_there:
            return []
        code = "events-untold" if visited.sources is None else "events-off"
        return [about.wrong(code, "the worker reports no feed")]
    says = "none are configured: requests are routed by load and by earlier requests"
    where = f"; it publishes at {sources[0].events}" if sources else ""
    return [about.note("events", says + where)]


def zmq_places(worker: WorkerSettings) -> Sequence[ZmqSource]:
    """Returns a worker's ZMQ feed as configured, rank by rank; () if it has none."""
    if not isinstance(worker.events, WorkerEvents):
        return ()
    source = configured(worker.events)
    return source if isinstance(source, tuple) else ()


async def _configured(
    tools: VisitTools, worker: WorkerSettings, visited: WorkerReport, about: Subject
) -> list[Finding]:
    assert isinstance(worker.events, WorkerEvents)
    source = configured(worker.events)
    if isinstance(source, tuple):
        return await visit_zmq(tools, worker, visited, source, about)
    if kind_of(source).is_consumed and not tools.probes:
        says = "not checked: each event goes to one caller, the router; --probe drains the queue"
        return [about.note("feed", says)]
    return await _connection(tools, worker, visited, source, about)


async def _connection(
    tools: VisitTools,
    worker: WorkerSettings,
    visited: WorkerReport,
    source: FeedSource,
    about: Subject,
) -> list[Finding]:
    """Examines a feed that has one connection for all ranks."""
    listeners = probe.connected(source, tools.bounds.messages)
    try:
        await listeners[0].wait_until(
            lambda heard: bool(heard.is_connected or heard.refused or heard.lost), tools.seconds
        )
        first = listeners[0].summary
        kind = kind_of(source)
        codes = OF_FEEDS[kind.key]
        if first.refused:
            return [about.wrong(codes.refused, f"{kind.place(source)}: {first.refused}")]
        if not first.is_connected:
            says = first.lost or "no answer in time"
            return [about.wrong(codes.unreachable, f"{kind.place(source)}: {says}")]
        return await _listen(tools, worker, visited, listeners, about, codes.shared)
    finally:
        await asyncio.gather(*(one.close() for one in listeners))


async def _listen(
    tools: VisitTools,
    worker: WorkerSettings,
    visited: WorkerReport,
    listeners: list[Listener],
    about: Subject,
    shared: str,
) -> list[Finding]:
    findings: list[Finding] = []
    if tools.probes and visited.is_there:
        findings += await judge_probe(tools, worker, visited, listeners, about)
    else:
        await asyncio.sleep(min(tools.bounds.listen_seconds, tools.seconds))
    heard = [one.summary for one in listeners]
    if heard[0].lost:
        return [*findings, about.wrong("feed-lost", heard[0].lost)]
    if not findings:
        findings.append(about.right("feed", "it answers the subscription"))
    if shared:
        findings = list(_judge_consumed(about, findings, heard, shared))
    findings += [*judge_heard(about, heard), *judge_sizes(tools, worker, heard, about)]
    return [*findings, *judge_groups(about, heard)]


def _judge_consumed(
    about: Subject, findings: Iterable[Finding], heard: Iterable[MessageSummary], shared: str
) -> Iterator[Finding]:
    """Yields the findings about a queue that gives each event to one caller only."""
    for one in findings:
        if one.code == "feed-silent":
            says = f"{one.says}: another client took the events, or the engine queues none"
            yield about.wrong(shared, says)
        else:
            yield one
    missing = sum(one.missing for one in heard)
    if missing:
        yield about.wrong(shared, f"another client took {missing} events")


async def visit_zmq(
    tools: VisitTools,
    worker: WorkerSettings,
    visited: WorkerReport,
    sources: Sequence[ZmqSource],
    about: Subject,
) -> list[Finding]:
    """Examines every port of a ZMQ feed, listens, and then tests replays; returns the findings."""
    findings = list(judge_reported(about, sources, visited.sources))
    if sources[0].binds:
        says = "not checked: the router binds this feed's ports; GET /workers shows its state"
        return [*findings, about.note("feed", says)]
    greetings = await _looks(sources, tools.seconds)
    findings += judge_places(about, sources, greetings, visited.sources)
    findings += judge_replays(about, sources, greetings)
    findings += judge_loads(about, sources, greetings)
    there = {rank: one for rank, one in enumerate(sources) if is_publisher(greetings[one.events])}
    heard: list[MessageSummary] = []
    if there:
        findings += await _listened(tools, worker, visited, there, about, heard)
    provoked = {one.rank: one.provoked for one in heard if one.provoked is not None}
    return [*findings, *await _replays(tools, sources, greetings, provoked, about)]


async def _looks(sources: Sequence[ZmqSource], seconds: float) -> Greetings:
    places = [
        each for one in sources for each in (one.events, one.replay, one.load) if each is not None
    ]
    found = await asyncio.gather(*(greet(address.parse_tcp(one), seconds) for one in places))
    return dict(zip(places, found, strict=True))


async def _listened(
    tools: VisitTools,
    worker: WorkerSettings,
    visited: WorkerReport,
    sources: Mapping[int, ZmqSource],
    about: Subject,
    heard: list[MessageSummary],
) -> list[Finding]:
    """Listens to the configured topic, and to every topic, to find events under another topic.

    heard: a summary for each rank is appended here.
    """
    all_topics = {rank: replace(one, topic="") for rank, one in sources.items()}
    limit = tools.bounds.messages
    ours = probe.subscribed(sources, limit)
    heard += (one.summary for one in ours)
    others = [] if sources == all_topics else probe.subscribed(all_topics, limit)
    try:
        return await _zmq_heard(tools, worker, visited, (ours, others), about)
    finally:
        await asyncio.gather(*(one.close() for one in (*ours, *others)))


async def _zmq_heard(
    tools: VisitTools,
    worker: WorkerSettings,
    visited: WorkerReport,
    both: tuple[list[Listener], list[Listener]],
    about: Subject,
) -> list[Finding]:
    ours, others = both
    every = [*ours, *others]
    connected = await asyncio.gather(
        *(one.wait_until(lambda heard: heard.is_connected, tools.seconds) for one in every)
    )
    if not all(connected):
        lost = next(
            (one.summary.lost for one in every if one.summary.lost), "no ZMQ connection in time"
        )
        return [about.wrong("feed-lost", lost)]
    findings: list[Finding] = []
    if tools.probes and visited.is_there:
        findings += await judge_probe(tools, worker, visited, ours, about)
    else:
        await asyncio.sleep(min(tools.bounds.listen_seconds, tools.seconds))
        if not any(one.summary.batches for one in every):
            says = "connected; no event was published during the check: --probe triggers one"
            findings.append(about.note("feed", says))
    heard = [one.summary for one in ours]
    if any(one.summary.batches for one in others) and not any(one.batches for one in heard):
        says = "nothing was published under the configured topic, but something under another"
        return [about.wrong("topic-wrong", says)]
    findings += [*judge_heard(about, heard), *judge_sizes(tools, worker, heard, about)]
    return [*findings, *judge_groups(about, heard)]


async def _replays(
    tools: VisitTools,
    sources: Sequence[ZmqSource],
    greetings: Greetings,
    provoked: Mapping[int, Provoked],
    about: Subject,
) -> list[Finding]:
    asked = {
        rank: one
        for rank, one in enumerate(sources)
        if one.replay is not None and is_replayer(greetings[one.replay])
    }
    if not any(one.replay for one in sources):
        return [about.note("replay", "none is configured: lost messages cannot be recovered")]
    found = await asyncio.gather(
        *(_replay(tools, one, provoked.get(rank), about) for rank, one in asked.items())
    )
    return [finding for finding in found if finding is not None]


async def _replay(
    tools: VisitTools, source: ZmqSource, provoked: Provoked | None, about: Subject
) -> Finding | None:
    """Requests the end of a replay, or all of it if probes are allowed; returns the finding."""
    start = 0 if tools.probes else BEYOND_ALL
    numbers, fault = await replayed(source, start, tools.seconds)
    if fault and numbers:
        says = f"{source.replay}: {len(numbers)} batches received, then: {fault}"
        return about.wrong("replay-truncated", says)
    if fault:
        return about.wrong("replay-silent", f"{source.replay}: {fault}")
    if provoked is not None and not await _has(source, provoked, tools.seconds):
        says = f"{source.replay}: its replay lacks the test request that the feed announced"
        return about.wrong("replay-swapped", says)
    if numbers and numbers[-1] - numbers[0] + 1 != len(numbers):
        says = f"{source.replay}: only {len(numbers)} batches from {numbers[0]} to {numbers[-1]}"
        return about.wrong("replay-truncated", says)
    return about.right("replay", f"{source.replay} answers")


async def _has(source: ZmqSource, provoked: Provoked, seconds: float) -> bool:
    """Tells whether a replay has the blocks that the feed announced."""
    tokens, since = provoked
    heard = MessageSummary(0, is_live=False)
    await replayed(source, since, seconds, heard)
    return heard.holds(tokens)


def judge_reported(
    about: Subject, sources: Sequence[ZmqSource], reported: ReportedSources | None
) -> Iterator[Finding]:
    """Yields the differences between the configured feed and what the worker reports."""
    if reported is None:
        return
    if not reported.sources:
        yield about.wrong(
            "events-off", f"the worker reports that it publishes none ({reported.path})"
        )
        return
    if len(reported.sources) != len(sources):
        count = len(reported.sources)
        says = f"{len(sources)} configured; the worker reports {count} ({reported.path})"
        yield about.wrong("ranks-miscounted", says)
    for ours, theirs in zip(sources, reported.sources, strict=False):
        if not theirs.topic.startswith(ours.topic):
            says = f"{ours.topic!r} is subscribed to; the worker publishes under {theirs.topic!r}"
            yield about.wrong("topic-wrong", says)
            break
    if sources[0].replay is None and reported.sources[0].replay is not None:
        says = f"none is configured, but the worker has one at {reported.sources[0].replay}"
        yield about.wrong("replay-unused", says)


def judge_swapped(fleet: Sequence[FeedReport]) -> Iterator[Finding]:
    """Yields a finding for each configured feed that another worker reports as its own.

    An address that no worker reports may still be right: something in between may map ports.
    """
    feeds, replays = _owners(fleet, "events"), _owners(fleet, "replay")
    for one in fleet:
        about = Subject(f"worker {one.worker}")
        for ours, theirs in zip(
            one.sources, one.reported.sources if one.reported else (), strict=False
        ):
            owner = feeds.get(ours.events, one.worker)
            if owner != one.worker:
                says = f"{ours.events} is the feed of worker {owner}, according to that worker"
                says += f"; this one publishes at {theirs.events}"
                yield about.wrong("feed-swapped", says)
            elif not ours.binds and _port(ours.events) != _port(theirs.events):
                says = f"{ours.events} is configured, but the worker reports {theirs.events}"
                yield about.note("feed", f"{says}: correct only if ports are mapped or relayed")
            owner = replays.get(ours.replay or "", one.worker)
            if owner != one.worker:
                says = f"{ours.replay} is the replay of worker {owner}, according to that worker"
                says += f"; this one's is {theirs.replay or 'nowhere'}"
                yield about.wrong("replay-swapped", says)


def _owners(fleet: Sequence[FeedReport], what: str) -> dict[str, str]:
    """Returns the worker that reports each address; leaves out addresses that several report."""
    owners: dict[str, str] = {}
    shared: set[str] = set()
    for one in fleet:
        for source in one.reported.sources if one.reported else ():
            place = getattr(source, what)
            if place is not None and owners.setdefault(place, one.worker) != one.worker:
                shared.add(place)
    return {place: name for place, name in owners.items() if place not in shared}


def judge_places(
    about: Subject,
    sources: Sequence[ZmqSource],
    greetings: Greetings,
    reported: ReportedSources | None,
) -> Iterator[Finding]:
    """Yields a finding for each rank whose port is not an open ZMQ publisher."""
    some_answer = any(greetings[one.events].is_zmq for one in sources)
    for rank, source in enumerate(sources):
        greeting = greetings[source.events]
        hint = _hint(source.events, reported, rank)
        where = f"rank {rank}: {source.events}" if len(sources) > 1 else source.events
        if greeting.reason:
            is_only_rank = rank > 0 and some_answer
            code = "rank-missing" if is_only_rank else "feed-nobody-listens"
            yield about.wrong(code, f"{where}: {greeting.reason}{hint}")
        elif not greeting.is_zmq:
            yield about.wrong("feed-not-zmq", f"{where}: {greeting.fault}{hint}")
        elif greeting.mechanism != NULL:
            yield about.wrong("feed-secured", f"{where}: requires ZMQ's {greeting.mechanism}")
        elif greeting.socket and greeting.socket not in PUBLISHERS:
            says = f"{where}: is a {greeting.socket} socket, not a publisher{hint}"
            yield about.wrong("feed-wrong-socket", says)


def _hint(endpoint: str, reported: ReportedSources | None, rank: int) -> str:
    """Returns words on the port that the worker reports for a rank, "" if it is the same."""
    if reported is None or rank >= len(reported.sources):
        return ""
    theirs = reported.sources[rank].events
    if _port(theirs) == _port(endpoint):
        return ""
    return f"; the worker reports that it publishes at {theirs}"


def _port(endpoint: str) -> str:
    return endpoint.rpartition(":")[2]


def judge_replays(
    about: Subject, sources: Sequence[ZmqSource], greetings: Greetings
) -> Iterator[Finding]:
    """Yields a finding for each rank whose replay port is not a ZMQ replay socket."""
    for source in sources:
        if source.replay is None:
            continue
        greeting = greetings[source.replay]
        if greeting.reason:
            yield about.wrong("replay-nobody-listens", f"{source.replay}: {greeting.reason}")
        elif not greeting.is_zmq:
            yield about.wrong("replay-not-zmq", f"{source.replay}: {greeting.fault}")
        elif greeting.socket and greeting.socket not in REPLAYERS:
            says = f"{source.replay}: is a {greeting.socket} socket, not a replay socket"
            yield about.wrong("replay-wrong-socket", says)


def judge_loads(
    about: Subject, sources: Sequence[ZmqSource], greetings: Greetings
) -> Iterator[Finding]:
    """Yields a finding for each rank whose load port is configured."""
    for source in sources:
        if source.load is None:
            continue
        greeting = greetings[source.load]
        if greeting.reason:
            yield about.wrong("load-nobody-listens", f"{source.load}: {greeting.reason}")
        elif not greeting.is_zmq:
            yield about.wrong("load-not-zmq", f"{source.load}: {greeting.fault}")
        elif not is_publisher(greeting):
            what = (
                f"a {greeting.socket} socket"
                if greeting.socket
                else f"secured with {greeting.mechanism}"
            )
            says = f"{source.load}: is {what}, not an open publisher"
            yield about.wrong("load-wrong-socket", says)
        else:
            yield about.right("load", f"a publisher answers at {source.load}")


def is_publisher(greeting: Greeting) -> bool:
    """Tells whether a port is a publisher without security, or may be one."""
    return greeting.mechanism == NULL and greeting.socket in ("", *PUBLISHERS)


def is_replayer(greeting: Greeting) -> bool:
    """Tells whether a port is a replay socket without security, or may be one."""
    return greeting.mechanism == NULL and greeting.socket in ("", *REPLAYERS)


async def greet(place: Address, seconds: float) -> Greeting:
    """Connects to a host:port and returns what answers there.

    seconds: limit for the connection, and again for the greeting.
    """
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(place.host, place.port)
    except TimeoutError:
        return Greeting(reason=f"no connection within {seconds:g} s")
    except (OSError, UnicodeError) as error:  # UnicodeError: it cannot be a host name
        return Greeting(reason=_words(error))
    session = ZmtpSession(b"SUB", 0)
    try:
        writer.write(session.answers())  # only the greeting, which names no kind of socket
        is_silent = await _is_silent(session, reader, seconds)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    return Greeting("", session.peer_mechanism, session.peer_kind, is_silent)


async def _is_silent(session: ZmtpSession, reader: asyncio.StreamReader, seconds: float) -> bool:
    """Reads the peer's mechanism and kind of socket; returns whether no greeting came in time."""
    with contextlib.suppress(TimeoutError, OSError, WireError):
        try:
            async with asyncio.timeout(seconds):
                while not session.peer_mechanism:
                    await _read(session, reader)
        except TimeoutError:
            return True
        async with asyncio.timeout(min(READY_SECONDS, seconds)):
            while not session.is_ready:
                await _read(session, reader)
    return False


async def _read(session: ZmtpSession, reader: asyncio.StreamReader) -> None:
    data = await reader.read(_READ_BYTES)
    if not data:
        raise ConnectionResetError
    session.receive(data)
    session.shake()


def _words(error: OSError | UnicodeError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return getattr(error, "strerror", None) or str(error)
