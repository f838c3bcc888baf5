"""Follows the workers' feeds, and asks workers where they publish if that is configured.

A worker may only name its own host, or hosts that the operator lists: otherwise it could make the
router connect to anything, and get credit for another worker's blocks.

Sources: `GET /kv_event_sources` of vLLM 0.32, by data-parallel rank, with the ports that it really
uses; `GET /server_info` of SGLang (0.5.23: `kv_events` with the base ports of its events, their
replays and its load, to which each rank adds its number).
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp
import msgspec

from extproc import address
from extproc.address import Address
from extproc.config.fleet_rules import same_place
from extproc.config.schema import AUTO, Config, WorkerEvents
from extproc.errors import StartError
from extproc.workers.polling import MAX_QUESTIONS, Client, Polling, Question, told
from extproc.workers.record import Following, Place, Table, Wanted, Worker
from kvstate.errors import printable
from kvstate.feeds.feed import State
from kvstate.feeds.feed_sources import DrainSource, FeedSource, GrpcSource, ZmqSource
from kvstate.feeds.transport import Transport
from kvstate.fleet import FeedStatus, Fleet, ReportedLoad

# Hosts of a publisher that binds all interfaces: a client cannot connect to them.
_ANY_HOST = frozenset(("*", "0.0.0.0", "[::]", "::", ""))  # noqa: S104 - what publishers say
MAX_RANKS = 1024

_VLLM = "/kv_event_sources"
_SGLANG = "/server_info"
PATHS = (_VLLM, _SGLANG, "/get_server_info")


def strange_host(sources: Sequence[ZmqSource], own: Collection[str]) -> str:
    """Returns the first host that a worker names but may not name, "" if there is none.

    own: its own host in every spelling, and the other hosts that it may name.
    """
    hosts = (host for source in sources for _, host, _, _ in _places_of(source))
    return next((host for host in hosts if host not in own), "")


def places(sources: Sequence[ZmqSource], own: Collection[str] = ()) -> frozenset[Place]:
    """Returns the places of a worker's feed, with its own host in every spelling."""
    found: set[Place] = set()
    for source in sources:
        for kind, host, port, topic in _places_of(source):
            spellings = own if host in own else (host,)
            found |= {(kind, spelling, port, topic) for spelling in spellings}
    return frozenset(found)


def _places_of(source: ZmqSource) -> Iterator[Place]:
    for kind, endpoint, topic in (
        ("zmq", source.events, source.topic),
        ("replay", source.replay, ""),
        ("load", source.load, ""),
    ):
        if endpoint is not None and endpoint.startswith("tcp://"):
            host, port = same_place(address.parse_tcp(endpoint))
            yield kind, host, port, topic


def configured(events: WorkerEvents) -> FeedSource:
    """Returns the configured source, which the configuration's rules have checked."""
    if events.grpc is not None:
        return GrpcSource(events.grpc, events.service, events.ranks)
    if events.drain is not None:
        return DrainSource(events.drain.removesuffix("/"), events.ranks)
    return tuple(
        ZmqSource(
            events=_of_rank(events.zmq or "", rank),
            replay=None if events.replay is None else _of_rank(events.replay, rank),
            topic=events.topic,
            binds=events.bind,
            load=None if events.load is None else _of_rank(events.load, rank),
        )
        for rank in range(events.ranks)
    )


def discovered(path: str, answer: bytes, host: str) -> tuple[ZmqSource, ...]:
    """Returns the sources in a worker's answer to one of `PATHS`, in the order of ranks.

    host: the worker's, for publishers that bind every interface.
    """
    try:
        raw = msgspec.json.decode(answer)
    except (msgspec.DecodeError, RecursionError):
        return ()
    if not isinstance(raw, Mapping):
        return ()
    try:
        return _from_vllm(raw, host) if path == _VLLM else _from_sglang(raw.get("kv_events"), host)
    except (TypeError, ValueError, KeyError):
        return ()


def _from_vllm(raw: Mapping[str, Any], host: str) -> tuple[ZmqSource, ...]:
    ranks = sorted(raw, key=int)
    if [int(rank) for rank in ranks] != list(range(len(ranks))) or len(ranks) > MAX_RANKS:
        raise ValueError("its ranks are not 0, 1, 2 ...")
    return tuple(
        ZmqSource(
            events=_reachable(raw[rank]["endpoint"], host),
            replay=_optional(raw[rank].get("replay_endpoint"), host),
            topic=str(raw[rank].get("topic") or ""),
        )
        for rank in ranks
    )


def _from_sglang(raw: object, host: str) -> tuple[ZmqSource, ...]:
    if not isinstance(raw, Mapping) or raw.get("publisher") != "zmq":
        return ()
    ranks = int(raw.get("dp_size") or 1)
    if not 0 < ranks <= MAX_RANKS:
        raise ValueError("it has no sound number of ranks")
    named = str(raw.get("endpoint_host") or "*")
    publisher = host if named in _ANY_HOST else named
    replay_port, load_port = (raw.get(f"{kind}_endpoint_port_base") for kind in ("replay", "load"))
    return tuple(
        ZmqSource(
            events=_endpoint(publisher, int(raw["endpoint_port_base"]) + rank),
            replay=None if replay_port is None else _endpoint(publisher, int(replay_port) + rank),
            topic=str(raw.get("topic") or ""),
            load=None if load_port is None else _endpoint(publisher, int(load_port) + rank),
        )
        for rank in range(ranks)
    )


def _optional(endpoint: object, host: str) -> str | None:
    return None if endpoint is None else _reachable(endpoint, host)


def _reachable(endpoint: object, host: str) -> str:
    """Returns a publisher's endpoint in a form that a client can connect to."""
    named, _, port = str(endpoint).removeprefix("tcp://").rpartition(":")
    return _endpoint(host if named in _ANY_HOST else named, int(port))


def _endpoint(host: str, port: int) -> str:
    place = Address(host.removeprefix("[").removesuffix("]"), port)
    return f"tcp://{address.parse(str(place))}"


def _of_rank(endpoint: str, rank: int) -> str:
    """Returns a rank's endpoint: vLLM and SGLang publish rank r on the configured port + r."""
    place = address.parse_tcp(endpoint)
    return f"tcp://{place._replace(port=place.port + rank)}"


RESOLVE_SECONDS = 2.0


class Told(NamedTuple):
    """A worker's sources, one for each rank, and their places, which no other worker may have."""

    sources: tuple[ZmqSource, ...]
    places: frozenset[Place]


async def permitted(
    client: Client, endpoint: str, hosts: tuple[str, ...], max_ranks: int
) -> Told | str:
    """Returns what a worker reports about its feed, or why the report is refused.

    hosts: those that it may name besides its own.
    """
    answer = await sources(client, endpoint)
    if isinstance(answer, str):
        return answer
    if len(answer) > max_ranks:
        return f"it names {len(answer)} ranks, more than events.auto_ranks ({max_ranks})"
    own = await _spellings(address.parse(endpoint).host)
    listed = frozenset(same_place(Address(host.lower(), 0)).host for host in hosts)
    strange = strange_host(answer, own | listed)
    if strange:
        return f"it publishes on {strange}, which is neither its own host nor in events.auto_hosts"
    return Told(answer, places(answer, own))


async def _spellings(host: str) -> frozenset[str]:
    """Returns a host's name and its addresses."""
    own = same_place(Address(host, 0)).host
    try:
        return frozenset((own, str(ipaddress.ip_address(own))))
    except ValueError:
        loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(RESOLVE_SECONDS):
            found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError):
        return frozenset((own,))
    return frozenset((own, *(str(place[0]) for *_, place in found)))


async def sources(client: Client, endpoint: str) -> tuple[ZmqSource, ...] | str:
    """Returns a worker's sources, one for each rank, or why there are none.

    endpoint: host:port of its HTTP server.
    """
    host = address.parse(endpoint).host
    reasons: list[str] = []
    for path in PATHS:
        try:
            answer = await told(client, endpoint, path)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return f"it does not answer: {error or 'timeout'}"
        if isinstance(answer, str):
            reasons.append(f"{path}: {answer}")
            continue
        found = discovered(path, answer, host)
        if found:
            return found
        reasons.append(f"{path}: names no feed")
    return "; ".join(reasons)


def feed_shown(status: FeedStatus) -> dict[str, Any]:
    """Returns one rank's feed for GET /workers."""
    return {
        "rank": status.rank,
        "state": status.state.value,
        "reason": status.reason,
        "last_sequence": status.last_sequence,
        "blocks": status.blocks,
        "uncertain_blocks": status.uncertain_blocks,
        "orphans": status.orphans,
        "gaps": status.gaps,
        "replays": status.replays,
        "restarts": status.restarts,
        "lag_seconds": round(status.lag_seconds, 6),
        "load": None if status.load is None else _load(status.load),
        "counts": dict(status.counts),
    }


def _load(reported: ReportedLoad) -> dict[str, Any]:
    return {**msgspec.to_builtins(reported.load), "age_seconds": round(reported.age_seconds, 3)}


log = logging.getLogger("kvsteer.workers")

# A worker is asked again where its feed is: soon while the feed is not working, since a worker that
# restarted may publish elsewhere, and rarely while all is well.
ASK_SOON_SECONDS = 5.0
ASK_SELDOM_SECONDS = 60.0

_DISABLED = "disabled: requests are routed by load and by earlier requests"

# Most feeds that are started or ended without a pause: the same event loop also picks.
AT_ONCE = 8

OpenTransports = Callable[[FeedSource], Sequence[Transport]]


class Feeds:
    """Follows the workers' feeds while events are enabled.

    wanted: returns a worker's feed as it should be followed, None for none. open_transports: opens
    a source; returns one transport for each rank.
    """

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        table: Table,
        polling: Polling,
        wanted: Callable[[Worker], Wanted | None],
        open_transports: OpenTransports,
    ) -> None:
        self._events = config.events
        self._fleet = fleet
        self._table = table
        self._polling = polling
        self._wanted = wanted
        self._open_transports = open_transports
        self._question = Question("feed", asyncio.Semaphore(MAX_QUESTIONS), ASK_SOON_SECONDS)
        self._gone: list[Worker] = []  # their feeds are still to be ended
        self._switching = asyncio.Lock()
        self.enabled = False
        self._rank_header = config.policy.rank_header
        self._note_ranks()

    async def enable(self, *, enabled: bool) -> None:
        """Switches events on or off: without them, every worker counts as publishing none."""
        # if events are switched off and on quickly, feeds just started must not be closed
        async with self._switching:
            if enabled == self.enabled:
                return
            self.enabled = enabled
            log.info("events %s", "enabled" if enabled else _DISABLED)
            await self._follow_wanted()

    async def follow(self, gone: Sequence[Worker] = ()) -> None:
        """Follows the current workers' feeds; unchanged ones are not touched.

        gone: workers removed since the last call.
        """
        self._gone += gone
        async with self._switching:
            await self._follow_wanted()

    async def close(self) -> None:
        """Stops following the workers."""
        async with self._switching:
            self.enabled = False
            await self._follow_wanted()
            await self._fleet.close()

    def reason(self, worker: Worker) -> str:
        """Returns why a worker has no feed, "" if it has one."""
        if worker.following.reason:
            return worker.following.reason
        if not self.enabled:
            return "events are switched off"
        if self._wanted(worker) is None:
            return "no events are configured for it"
        return (
            "" if self._fleet.ranks(worker.name) else "it has not been asked yet where it publishes"
        )

    def _target(self, worker: Worker) -> Wanted | None:
        return self._wanted(worker) if self.enabled else None

    async def _follow_wanted(self) -> None:
        # a copy: a worker added meanwhile may have the name of one whose feed is still to be ended
        workers = list(self._table)
        changed = [
            *self._gone,
            *(one for one in workers if one.following.wanted != self._target(one)),
        ]
        self._gone.clear()
        for at in range(0, len(changed), AT_ONCE):
            await asyncio.gather(*(self._unfollow(one) for one in changed[at : at + AT_ONCE]))
        begun = 0
        for worker in workers:
            target = self._target(worker)
            if target is None or worker.following.wanted is not None:
                continue
            begun += 1
            if begun % AT_ONCE == 0:
                await asyncio.sleep(0)
            if not self._table.has(worker):
                continue  # it was removed meanwhile
            worker.following.wanted = target
            try:
                self._begin(worker, target)
            except StartError as error:  # the router is already running, and continues
                log.error("worker %s: %s", worker.name, error)
                worker.following.reason = str(error)
            except Exception as error:  # a feed that cannot be opened must not prevent others
                log.exception("worker %s: its feed cannot be followed", worker.name)
                worker.following.reason = f"its feed cannot be followed: {type(error).__name__}"
        self._note_ranks()

    def _note_ranks(self) -> None:
        """Notes whether requests may name a rank.

        Without configuration, only if the engines reported their ranks themselves: the releases
        that do so obey X-data-parallel-rank.
        """
        several = [one for one in self._table if self._fleet.ranks(one.name) > 1]
        is_told = bool(several) and all(one.following.found for one in several)
        header = self._rank_header
        self._fleet.names_ranks = is_told if header == AUTO else header is not None

    def _begin(self, worker: Worker, one: Wanted) -> None:
        if isinstance(one.events, WorkerEvents):
            source = configured(one.events)
            if isinstance(source, tuple):
                worker.following.places = places(source)
            self._open(worker.name, one, source)
            return

        async def ask() -> float:
            return await self._ask(worker, one)

        name = self._question.name
        worker.polls[name] = self._polling.poll(self._question, worker.name, ask)

    async def _unfollow(self, worker: Worker) -> None:
        worker.stop_asking(self._question.name)
        if worker.following.wanted is not None:
            worker.following = Following()
            await self._fleet.remove(worker.name)

    def _open(self, name: str, one: Wanted, source: FeedSource) -> None:
        self._fleet.add(name, one.model, self._open_transports(source), one.adapters)

    async def _ask(self, worker: Worker, one: Wanted) -> float:
        """Asks a worker where it publishes; returns the seconds until the next question."""
        name, client = worker.name, self._polling.client
        try:
            hosts, max_ranks = self._events.auto_hosts, self._events.auto_ranks
            await self._take(worker, one, await permitted(client, name, hosts, max_ranks))
        except Exception as error:  # a bad answer must not end the asking
            log.exception("worker %s: events: auto: its feed cannot be followed", name)
            worker.following.reason = f"its feed cannot be followed: {type(error).__name__}"
        is_well = self._fleet.state(name) in (State.LIVE, State.DEGRADED)
        return ASK_SELDOM_SECONDS if is_well else ASK_SOON_SECONDS

    async def _take(self, worker: Worker, one: Wanted, answer: Told | str) -> None:
        """Follows the feed that a worker reported; keeps the old one while it does not answer."""
        name, following = worker.name, worker.following
        if isinstance(answer, Told) and answer.sources != following.found:
            owner = self._owner_of(answer.places, worker)
            answer = f"its feed is that of worker {owner}" if owner else answer
        if isinstance(answer, str):
            answer = printable(answer)
            if following.found is None and following.reason != answer:
                following.reason = answer
                log.warning("worker %s: events: auto: %s", name, answer)
            return
        if answer.sources == following.found:
            return
        following.found = None  # nothing is followed if the new one cannot be opened
        following.places = answer.places
        await self._fleet.remove(name)
        self._open(name, one, answer.sources)
        following.found = answer.sources
        following.reason = ""
        self._note_ranks()

    def _owner_of(self, taken: frozenset[Place], worker: Worker) -> str:
        """Returns another worker that already has one of these places, "" if none has."""
        others = (one for one in self._table if one is not worker and one.following.places & taken)
        return next((one.name for one in others), "")
