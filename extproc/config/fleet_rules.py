"""Rules about workers: their addresses, feeds and ports, and how they are found.

Workers must not share an endpoint or a feed, a likely mistake in copied lines: a feed's messages do
not name the worker, so its blocks would be credited to both.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from extproc.base import address
from extproc.base.address import Address
from extproc.base.errors import EXTRAS
from extproc.config.feed_kinds import (
    ADDRESSES,
    FOUND_ADDRESSES,
    KINDS,
    FeedAddress,
    FeedKind,
    kind_found,
    kind_in,
    kinds_found,
    kinds_in,
)
from extproc.config.schema import (
    Config,
    DnsName,
    EventPorts,
    FoundWorker,
    Kubernetes,
    WorkerEvents,
    WorkerSettings,
)
from extproc.config.wrong_keys import until_wrong

AT_LEAST_ONE = "at least one is needed"


def fleet_faults(config: Config) -> Iterator[str]:
    """Yields the faults of the workers and of their discovery."""
    yield from until_wrong(_no_workers, config)
    yield from until_wrong(lambda: worker_faults("workers", config.workers, config))
    yield from until_wrong(_names_twice, config)
    yield from until_wrong(_names, config)
    yield from until_wrong(_pods, config)


def _no_workers(config: Config) -> Iterator[str]:
    found = config.discovery
    if not (config.workers or found.file or found.dns or found.kubernetes):
        yield f"workers: {AT_LEAST_ONE}"


def _names_twice(config: Config) -> Iterator[str]:
    names = Counter(
        name for one in config.discovery.dns for name in until_wrong(lambda one: [one.name], one)
    )
    yield from (
        f"discovery.dns: the name {name} is given {count} times"
        for name, count in names.items()
        if count > 1
    )


def _names(config: Config) -> Iterator[str]:
    for position, name in enumerate(config.discovery.dns):
        key = f"discovery.dns[{position}]"
        yield from until_wrong(_nameserver, f"{key}.nameserver", name)
        yield from _found_worker(f"{key}.worker", name, config)


def _nameserver(key: str, name: DnsName) -> Iterator[str]:
    if name.nameserver is not None:
        yield from address_fault(key, name.nameserver, _parse_nameserver)


def _pods(config: Config) -> Iterator[str]:
    pods = config.discovery.kubernetes
    if pods is not None:
        yield from until_wrong(_chosen_pods, pods)
        yield from _found_worker("discovery.kubernetes.worker", pods, config)


def _chosen_pods(pods: Kubernetes) -> Iterator[str]:
    if (pods.selector is None) is (pods.inference_pool is None):
        yield "discovery.kubernetes: needs exactly one of selector and inference_pool"


def worker_faults(key: str, workers: Sequence[WorkerSettings], config: Config) -> Iterator[str]:
    """Yields the faults of a list of workers.

    key: the key of the list.
    """
    yield from shared_endpoints(key, workers)
    yield from shared_feeds(key, workers)
    for position, worker in enumerate(workers):
        for rule in (_endpoint, _model, _engine, _feed):
            yield from until_wrong(rule, f"{key}[{position}]", worker, config)


def _endpoint(key: str, worker: WorkerSettings, _: Config) -> Iterator[str]:
    yield from address_fault(f"{key}.endpoint", worker.endpoint, _parse_port(address.parse))


def _model(key: str, worker: WorkerSettings | FoundWorker, config: Config) -> Iterator[str]:
    names, model = [one.name for one in config.models], worker.model
    if model is None and len(names) > 1 and not worker.learn:
        yield f"{key}.model: missing; there are {len(names)} models: {', '.join(names)}"
    if model is not None and model not in names:
        yield f"{key}.model: {model!r} is not under models"


def _engine(key: str, worker: WorkerSettings | FoundWorker, _: Config) -> Iterator[str]:
    engine = worker.engine
    if engine is not None and engine.engine is None:
        yield f"{key}.engine.version: must be a release such as 0.32.0, is {engine.version!r}"


def _feed(key: str, worker: WorkerSettings | FoundWorker, _: Config) -> Iterator[str]:
    if isinstance(worker.events, WorkerEvents):
        for rule in (_one_source, _shared_addresses, _needing, _addresses_of_ranks, _overlapping):
            yield from until_wrong(rule, f"{key}.events", worker.events)
    elif isinstance(worker.events, EventPorts):
        yield from event_ports_faults(f"{key}.events", worker.events)


def _found_worker(key: str, source: DnsName | Kubernetes, config: Config) -> Iterator[str]:
    for rule in (_port, _model, _engine, _feed):
        yield from until_wrong(rule, key, source.worker, config)


def _port(key: str, worker: FoundWorker, _: Config) -> Iterator[str]:
    if worker.port > address.MAX_PORT:
        yield f"{key}.port: is above 65535"


def event_ports_faults(key: str, events: EventPorts) -> Iterator[str]:
    """Yields the faults of a feed's ports."""
    for rule in (_one_port, _needing_port, _high_ports, _overlapping_ports):
        yield from until_wrong(rule, key, events)


def _one_port(key: str, events: EventPorts) -> Iterator[str]:
    if len(kinds_found(events)) != 1:
        yield f"{key}: {_exactly_one([kind.found_key for kind in KINDS if kind.found_key])}"


def _exactly_one(keys: Sequence[str]) -> str:
    return f"needs exactly one of {', '.join(keys[:-1])} and {keys[-1]}"


def _needing_port(key: str, events: EventPorts) -> Iterator[str]:
    for kind in KINDS:
        if kind.found_key and getattr(events, kind.found_key) is None:
            others = [one.found_key for one in kind.addresses[1:]]
            given = [one for one in others if getattr(events, one) is not None]
            yield from (f"{key}.{one}: needs {kind.found_key}" for one in given)


def _high_ports(key: str, events: EventPorts) -> Iterator[str]:
    last = {one.found_key: one.last_port(events) for one in FOUND_ADDRESSES}
    for name, port in last.items():
        if port > address.MAX_PORT:
            yield f"{key}.{name}: with its ranks it is above 65535"


def _overlapping_ports(key: str, events: EventPorts) -> Iterator[str]:
    for (one, first), (other, second) in combinations(_ports_of_ranks(events).items(), 2):
        if first is not None and second is not None and abs(first - second) < events.ranks:
            yield f"{key}: {_overlap(one, other, events.ranks)}"


def _ports_of_ranks(events: EventPorts) -> dict[str, int | None]:
    """Returns the ports of rank 0 beside which those of the other ranks are."""
    return {one.key: getattr(events, one.found_key) for one in FOUND_ADDRESSES if one.is_by_rank}


def _overlap(one: str, other: str, ranks: int) -> str:
    if ranks == 1:
        return f"{one} and {other} have the same port"
    return f"with {ranks} ranks the ports of {one} and {other} overlap (rank r uses both ports + r)"


def _one_source(key: str, events: WorkerEvents) -> Iterator[str]:
    if len(kinds_in(events)) != 1:
        yield f"{key}: {_exactly_one([kind.key for kind in KINDS])}"


_OF_RANKS = [one for one in ADDRESSES if one.is_by_rank]
_SHARED_BY_RANKS = [one for one in ADDRESSES if not one.is_by_rank]


def _shared_addresses(key: str, events: WorkerEvents) -> Iterator[str]:
    for one in _SHARED_BY_RANKS:
        yield from until_wrong(_address, f"{key}.{one.key}", events, one)


def _addresses_of_ranks(key: str, events: WorkerEvents) -> Iterator[str]:
    for one in _OF_RANKS:
        yield from until_wrong(_address, f"{key}.{one.key}", events, one)


def _address(key: str, events: WorkerEvents, one: FeedAddress) -> Iterator[str]:
    text = getattr(events, one.key)
    if text is None:
        return
    try:
        place = _publisher(events, one, text)
    except ValueError as error:
        yield f"{key}: {error}"
        return
    if place.port + one.ports(events) - 1 > address.MAX_PORT:
        yield f"{key}: port {place.port} + {events.ranks} ranks is above 65535"


def _publisher(events: WorkerEvents, one: FeedAddress, text: str) -> Address:
    """Returns the address of rank 0.

    Raises:
        ValueError: it is none that the router can connect to, or bind.
    """
    place = one.parse(text)
    if not one.is_bound(events):
        _raise_unless_reachable(place, text)
    if not place.port:
        raise ValueError(f"must have a port above 0, is {text!r}")
    return place


def _needing(key: str, events: WorkerEvents) -> Iterator[str]:
    for kind in KINDS:
        yield from until_wrong(_needing_kind, key, events, kind)


def _needing_kind(key: str, events: WorkerEvents, kind: FeedKind[Any]) -> Iterator[str]:
    if getattr(events, kind.key) is None:
        yield from (
            f"{key}.{name}: needs {kind.key}" for name in kind.needing if getattr(events, name)
        )


def _overlapping(key: str, events: WorkerEvents) -> Iterator[str]:
    taken: dict[Address, str] = {}
    for one in _OF_RANKS:
        ports = dict.fromkeys(until_wrong(_places_of_ranks, events, one), one.key)
        for other in dict.fromkeys(taken[place] for place in ports if place in taken):
            yield f"{key}: {_overlap(other, one.key, events.ranks)}"
        taken |= ports


def _places_of_ranks(events: WorkerEvents, one: FeedAddress) -> Iterator[Address]:
    """Yields the address of each rank; none if it is no address, which is reported elsewhere."""
    text = getattr(events, one.key)
    with contextlib.suppress(ValueError):
        place = _publisher(events, one, text or "")
        yield from (Address(place.host, place.port + rank) for rank in range(one.ports(events)))


def _parse_nameserver(text: str) -> None:
    if not address.parse(text).is_ip:
        raise ValueError(f"must be ip:port, is {text!r}")


def _parse_port(parse: Callable[[str], address.Address]) -> Callable[[str], None]:
    """Returns a parser that accepts only addresses that a client can connect to."""

    def parsed(text: str) -> None:
        place = parse(text)
        _raise_unless_reachable(place, text)
        if not place.port:
            raise ValueError(f"must have a port above 0, is {text!r}")

    return parsed


def parse_publisher(text: str) -> None:
    """Checks the address of a ZMQ publisher, tcp://host:port.

    Raises:
        ValueError: KVSteer cannot connect to it.
    """
    place = address.parse_tcp(text)
    _raise_unless_reachable(place, text)
    if not place.port:
        raise ValueError(f"must have a port above 0, is {text!r}")


def _raise_unless_reachable(place: address.Address, text: str) -> None:
    if place.host in address.WILDCARDS:
        raise ValueError(
            f"{text!r} is where a server listens; write the worker's own host instead of"
            f" {place.host}"
        )


def address_fault(key: str, text: str, parse: Callable[[str], object]) -> Iterator[str]:
    """Yields the fault of an address, if there is one."""
    try:
        parse(text)
    except ValueError as error:
        yield f"{key}: {error}"


class Extra(NamedTuple):
    """The name of an extra, and a configuration key that needs it."""

    key: str
    name: str


def missing_extras(config: Config, find: Callable[[str], object]) -> list[Extra]:
    """Returns the extras that a configuration needs and that are not installed.

    find: returns None for a module that is not installed.
    """
    needed = [*_extras_of_feeds(config)]
    if config.discovery.kubernetes is not None:
        needed.append(Extra("discovery.kubernetes", "kubernetes"))
    url = "" if config.sharing is None else config.sharing.url
    if url and not url.startswith(address.DIRECTORY_PREFIX):
        needed.append(Extra("sharing.url", "sharing"))
    return [one for one in needed if find(EXTRAS[one.name][0]) is None]


def _extras_of_feeds(config: Config) -> Iterator[Extra]:
    """Yields the keys of feeds whose transports need an extra."""
    for position, worker in enumerate(config.workers):
        if isinstance(worker.events, WorkerEvents):
            kind = kind_in(worker.events)
            if kind.extra:
                yield Extra(f"workers[{position}].events.{kind.key}", kind.extra)
    found = {f"dns[{at}]": one.worker for at, one in enumerate(config.discovery.dns)}
    if config.discovery.kubernetes is not None:
        found["kubernetes"] = config.discovery.kubernetes.worker
    for source, one in found.items():
        if isinstance(one.events, EventPorts):
            kind = kind_found(one.events)
            if kind.extra:
                key = f"discovery.{source}.worker.events.{kind.found_key}"
                yield Extra(key, kind.extra)


def shared_endpoints(key: str, workers: Sequence[WorkerSettings]) -> Iterator[str]:
    """Yields a fault for each worker that has the endpoint of an earlier one.

    key: the key of the list of workers.
    """
    owners: dict[Address | str, int] = {}
    for position, worker in enumerate(workers):
        for place in until_wrong(_place_of, worker):
            owner = owners.setdefault(place, position)
            if owner != position:
                first = workers[owner].endpoint
                spelled = "" if first == worker.endpoint else f", as {first}"
                says = f"{worker.endpoint} is the endpoint of {key}[{owner}] too{spelled}"
                yield f"{key}[{position}].endpoint: {says}"


def _place_of(worker: WorkerSettings) -> Iterator[Address | str]:
    """Yields the worker's endpoint, as text if it is no address, which is reported elsewhere."""
    try:
        yield address.same_place(address.parse(worker.endpoint))
    except ValueError:
        yield worker.endpoint


def shared_feeds(key: str, workers: Sequence[WorkerSettings]) -> Iterator[str]:
    """Yields a fault for each worker and key that names a feed, or a rank, of an earlier worker.

    key: the key of the list of workers.
    """
    owners: dict[tuple[object, ...], int] = {}
    for position, worker in enumerate(workers):
        named: set[str] = set()
        for name, place, source in until_wrong(_sources, worker):
            owner = owners.setdefault(source, position)
            if owner != position and name not in named:
                named.add(name)
                yield f"{key}[{position}].events.{name}: {place} is already used by {key}[{owner}]"


def _sources(worker: WorkerSettings) -> Iterator[tuple[str, Address, tuple[object, ...]]]:
    """Yields a feed's addresses: key, address, and the tuple that must be unique among workers."""
    if isinstance(worker.events, WorkerEvents):
        for one in ADDRESSES:
            yield from until_wrong(_places, worker.events, one)


def _places(
    events: WorkerEvents, one: FeedAddress
) -> Iterator[tuple[str, Address, tuple[object, ...]]]:
    """Yields each rank's address; none if the text is no address, which is reported elsewhere."""
    text = getattr(events, one.key)
    if text is None:
        return
    try:
        (host, port), beside = one.parse(text), one.beside(events)
    except ValueError:
        return
    for of_rank in range(port, min(port + one.ports(events), address.MAX_PORT + 1)):
        place = Address(host, of_rank)
        yield one.key, place, (one.key, address.same_place(place), beside)
