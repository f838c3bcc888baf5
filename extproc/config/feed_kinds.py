"""The kinds of feeds: over what a worker can publish its events. They are spelled here, once.

Whatever depends on the kind asks its entry in `KINDS`, so that a new kind is one entry more, and a
forgotten one is an error instead of another kind. What needs a higher layer is a table with the
same keys there: `extproc.fleet.feeds.feed_openers` has the transports, and
`kvtools.doctor.faults` the doctor's faults. Tests compare the keys with these, and with
those of the schema.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from extproc.base import address
from extproc.base.address import Address
from extproc.config.schema import EventPorts, WorkerEvents
from kvstate.feeds.feed_sources import DrainSource, FeedSource, GrpcSource, ZmqSource

Source = TypeVar("Source", bound=FeedSource)


def _nothing(_: WorkerEvents) -> None:
    """Nothing but its address tells a source from another worker's."""


@dataclass(frozen=True, slots=True)
class FeedAddress:
    """A key of `WorkerEvents` that has an address."""

    # The key's name.
    key: str
    # Reads its address.
    parse: Callable[[str], Address]
    # What stands before its host and port.
    scheme: str = ""
    # The key of `EventPorts` with its port, "" if discovered workers have none.
    found_key: str = ""
    # Whether that key is true or false instead, and the port is the one for requests.
    is_switch: bool = False
    # Whether rank r has the port + r.
    is_by_rank: bool = False
    # Whether KVSteer listens there with `bind`.
    may_bind: bool = False
    # What, besides the address, no two workers may have in common.
    beside: Callable[[WorkerEvents], object] = _nothing

    def ports(self, events: WorkerEvents | EventPorts) -> int:
        """Returns how many ports it takes."""
        return events.ranks if self.is_by_rank else 1

    def is_bound(self, events: WorkerEvents) -> bool:
        """Returns whether KVSteer listens there, and the worker connects."""
        return self.may_bind and events.bind

    def found(self, ports: EventPorts, place: Address, offset: int) -> str | None:
        """Returns the address for a discovered worker, None if it has none.

        place: where its requests go. offset: how many engines on the same host come before it.
        """
        port = getattr(ports, self.found_key)
        if self.is_switch:
            return f"{self.scheme}{place}" if port else None
        if port is None:
            return None
        return f"{self.scheme}{Address(place.host, port + offset * self.ports(ports))}"

    def last_port(self, ports: EventPorts, offset: int = 0) -> int:
        """Returns the highest port that it takes of a discovered worker, 0 if it takes none.

        offset: how many engines on the same host come before it.
        """
        first = 0 if self.is_switch else getattr(ports, self.found_key) or 0
        return first + (offset + 1) * self.ports(ports) - 1 if first else 0


@dataclass(frozen=True, slots=True)
class FeedKind(Generic[Source]):
    """A kind of feed."""

    # The first has the key that names such a feed; the others need that key.
    addresses: tuple[FeedAddress, ...]
    # The type of its sources.
    made: type[Source]
    # Returns the source that is configured.
    read: Callable[[WorkerEvents], Source]
    # Returns where a source is, in words.
    place: Callable[[Source], str]
    # More keys that need the first one.
    flags: tuple[str, ...] = ()
    # Whether each event goes to one caller, so that nobody may read along.
    is_consumed: bool = False
    # Whether its events name blocks that lie in a store.
    names_stored: bool = False
    # The extra of this package that its transport needs, "" for none.
    extra: str = ""

    @property
    def key(self) -> str:
        """The key of `WorkerEvents` that names such a feed; it names the kind as well."""
        return self.addresses[0].key

    @property
    def found_key(self) -> str:
        """The key of `EventPorts` that names such a feed, "" if discovered workers have none."""
        return self.addresses[0].found_key

    @property
    def needing(self) -> tuple[str, ...]:
        """The keys of `WorkerEvents` that mean something only beside `key`."""
        further = tuple(one.key for one in self.addresses[1:])
        return further + self.flags


def _zmq(events: WorkerEvents) -> tuple[ZmqSource, ...]:
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


def _of_rank(endpoint: str, rank: int) -> str:
    """Returns a rank's endpoint: vLLM and SGLang publish rank r on the configured port + r."""
    place = address.parse_tcp(endpoint)
    return f"tcp://{place._replace(port=place.port + rank)}"


def _zmq_address(key: str, **more: Any) -> FeedAddress:
    found_key = f"{key}_port"
    return FeedAddress(key, address.parse_tcp, "tcp://", found_key, is_by_rank=True, **more)


def _topic(events: WorkerEvents) -> str | None:
    """Publishers behind one proxy share an address, but have different topics."""
    return None if events.bind else events.topic


def _grpc(events: WorkerEvents) -> GrpcSource:
    return GrpcSource(events.grpc or "", events.service, events.ranks)


def _drain(events: WorkerEvents) -> DrainSource:
    return DrainSource((events.drain or "").removesuffix("/"), events.ranks)


KINDS: tuple[FeedKind[Any], ...] = (
    FeedKind(
        (
            _zmq_address("zmq", may_bind=True, beside=_topic),
            _zmq_address("replay"),
            _zmq_address("load"),
        ),
        tuple,
        _zmq,
        lambda source: source[0].events,
        flags=("bind",),
        names_stored=True,
    ),
    FeedKind(
        (
            FeedAddress(
                "grpc", address.parse, found_key="grpc_port", beside=lambda events: events.service
            ),
        ),
        GrpcSource,
        _grpc,
        lambda source: source.target,
        extra="grpc",
    ),
    FeedKind(
        (FeedAddress("drain", address.parse_http, "http://", "drain", is_switch=True),),
        DrainSource,
        _drain,
        lambda source: source.url,
        is_consumed=True,
    ),
)

ADDRESSES = tuple(one for kind in KINDS for one in kind.addresses)
FOUND_ADDRESSES = tuple(one for one in ADDRESSES if one.found_key)


def kinds_in(events: WorkerEvents) -> list[FeedKind[Any]]:
    """Returns the kinds that are configured: one, unless that is a fault of the configuration."""
    return [one for one in KINDS if getattr(events, one.key) is not None]


def kind_in(events: WorkerEvents) -> FeedKind[Any]:
    """Returns the configured kind; the configuration's rules have checked that there is one."""
    (kind,) = kinds_in(events)
    return kind


def kinds_found(ports: EventPorts) -> list[FeedKind[Any]]:
    """Returns the kinds of discovered workers: one, unless that is a fault of the configuration."""
    kinds = [one for one in KINDS if one.found_key]
    return [one for one in kinds if getattr(ports, one.found_key) not in (None, False)]


def kind_found(ports: EventPorts) -> FeedKind[Any]:
    """Returns the kind of discovered workers; the rules have checked that there is one."""
    (kind,) = kinds_found(ports)
    return kind


def configured(events: WorkerEvents) -> FeedSource:
    """Returns the configured source."""
    source: FeedSource = kind_in(events).read(events)
    return source


def kind_of(source: FeedSource) -> FeedKind[Any]:
    """Returns the kind of a source."""
    (kind,) = [one for one in KINDS if one.made is type(source)]
    return kind


def at_address(events: WorkerEvents, name: str, host: str) -> WorkerEvents:
    """Returns events with an address in the place of the worker's host name.

    So its feed is at the address at which requests reach it, also where the name has several, or
    another one later. What the router binds itself, and other hosts, stay. name: the host name.
    host: the address.
    """
    moved: dict[str, Any] = {
        one.key: address.with_host(text, name, host)
        for one in ADDRESSES
        if not one.is_bound(events) and (text := getattr(events, one.key)) is not None
    }
    return dataclasses.replace(events, **moved)


def found_events(ports: EventPorts, place: Address, offset: int) -> WorkerEvents:
    """Returns where a discovered worker publishes.

    place: where its requests go. offset: how many engines on the same host come before it; each
    takes a port, or for each ZMQ endpoint as many as it has ranks.
    """
    found: dict[str, Any] = {one.key: one.found(ports, place, offset) for one in FOUND_ADDRESSES}
    return WorkerEvents(topic=ports.topic, ranks=ports.ranks, service=ports.service, **found)


def with_port(ports: EventPorts, kind: FeedKind[Any], port: int) -> EventPorts:
    """Returns ports with another one for a kind of feed, and without those of all other kinds."""
    changed: dict[str, Any] = {
        one.found_key: False if one.is_switch else None
        for one in FOUND_ADDRESSES
        if one not in kind.addresses
    }
    changed[kind.found_key] = port
    return dataclasses.replace(ports, **changed)
