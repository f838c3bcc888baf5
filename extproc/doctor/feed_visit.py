"""A worker's feed, whichever transport it has."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence

from extproc.config import AUTO, Worker, WorkerEvents
from extproc.doctor import listening, zmq_visit
from extproc.doctor.findings import About, Finding
from extproc.doctor.heard import Heard, judge_heard
from extproc.doctor.http_visit import Visited
from extproc.doctor.listening import Listener
from extproc.doctor.means import Means
from extproc.doctor.probed_feed import judge_probe, judge_sizes
from extproc.workers.feed_sources import configured
from kvstate.feeds.feed_sources import DrainSource, GrpcSource, ZmqSource

_OFF = "`events.enabled` is false: requests are routed by load and by what was sent where"


async def visit(means: Means, worker: Worker, visited: Visited, about: About) -> list[Finding]:
    """Whether a worker's events come as they are configured."""
    if not means.config.events.enabled:
        return [about.note("events", _OFF)]
    if isinstance(worker.events, WorkerEvents):
        return await _configured(means, worker, visited, about)
    sources = visited.told.sources if visited.told else ()
    if worker.events == AUTO:
        if sources:
            return await zmq_visit.visit(means, worker, visited, sources, about)
        if not visited.is_there:
            return []
        code = "events-untold" if visited.told is None else "events-off"
        return [about.wrong(code, "the worker names no feed")]
    says = "none are configured: it is routed by what was sent there before, and by load"
    told = f"; it publishes at {sources[0].events}" if sources else ""
    return [about.note("events", says + told)]


def zmq_places(worker: Worker) -> Sequence[ZmqSource]:
    """Where a worker's feed is by the configuration, rank by rank; none if that names no ports."""
    if not isinstance(worker.events, WorkerEvents):
        return ()
    source = configured(worker.events)
    return () if isinstance(source, GrpcSource | DrainSource) else source


async def _configured(
    means: Means, worker: Worker, visited: Visited, about: About
) -> list[Finding]:
    assert isinstance(worker.events, WorkerEvents)  # noqa: S101 - the caller looked
    source = configured(worker.events)
    match source:
        case GrpcSource():
            return await _connection(means, worker, visited, source, about)
        case DrainSource() if means.probes:
            return await _connection(means, worker, visited, source, about)
        case DrainSource():
            says = "not drained: each event goes to one caller, the router; --probe drains it"
            return [about.note("feed", says)]
        case _:
            return await zmq_visit.visit(means, worker, visited, source, about)


async def _connection(
    means: Means,
    worker: Worker,
    visited: Visited,
    source: GrpcSource | DrainSource,
    about: About,
) -> list[Finding]:
    """One connection for all ranks."""
    listeners = listening.connected(source)
    try:
        await listeners[0].until(
            lambda heard: bool(heard.is_connected or heard.refused or heard.lost), means.seconds
        )
        first = listeners[0].heard
        is_drain = isinstance(source, DrainSource)
        if first.refused:
            code = "drain-refused" if is_drain else "grpc-unimplemented"
            return [about.wrong(code, f"{_where(source)}: {first.refused}")]
        if not first.is_connected:
            code = "drain-refused" if is_drain else "grpc-unreachable"
            return [about.wrong(code, f"{_where(source)}: {first.lost or 'no answer in time'}")]
        return await _heard(means, worker, visited, listeners, about, is_drain=is_drain)
    finally:
        await asyncio.gather(*(one.close() for one in listeners))


async def _heard(
    means: Means,
    worker: Worker,
    visited: Visited,
    listeners: list[Listener],
    about: About,
    *,
    is_drain: bool,
) -> list[Finding]:
    findings: list[Finding] = []
    if means.probes and visited.is_there:
        findings += await judge_probe(means, worker, visited, listeners, about)
    else:
        await asyncio.sleep(min(zmq_visit.LISTEN_SECONDS, means.seconds))
    heard = [one.heard for one in listeners]
    if heard[0].lost:
        return [*findings, about.wrong("feed-lost", heard[0].lost)]
    if not findings:
        findings.append(about.right("feed", "it answers to the subscription"))
    if is_drain:
        findings = list(_drained(about, findings, heard))
    return [*findings, *judge_heard(about, heard), *judge_sizes(means, worker, heard, about)]


def _drained(
    about: About, findings: Iterable[Finding], heard: Iterable[Heard]
) -> Iterator[Finding]:
    """What findings mean of a queue, each of whose events goes to one caller."""
    for one in findings:
        if one.code == "feed-silent":
            says = f"{one.says}: somebody else took them, or the engine queues none"
            yield about.wrong("drain-shared", says)
        else:
            yield one
    missing = sum(one.missing for one in heard)
    if missing:
        yield about.wrong("drain-shared", f"{missing} events went to somebody else")


def _where(source: GrpcSource | DrainSource) -> str:
    return source.target if isinstance(source, GrpcSource) else source.url
