"""Rules about workers: their addresses, feeds and ports, and how they are found.

Workers must not share an endpoint or a feed, a likely mistake in copied lines: a feed's messages do
not name the worker, so its blocks would be credited to both.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from extproc.base import address
from extproc.base.address import Address
from extproc.base.errors import EXTRAS
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

_LOOPBACK = "127.0.0.1"


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
        for rule in (_one_source, _grpc, _drain, _needing_zmq, _addresses, _overlapping):
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
    for rule in (_one_port, _needing_zmq_port, _high_ports, _overlapping_ports):
        yield from until_wrong(rule, key, events)


def _one_port(key: str, events: EventPorts) -> Iterator[str]:
    if (events.zmq_port, events.grpc_port, events.drain or None).count(None) != 2:
        yield f"{key}: needs exactly one of zmq_port, grpc_port and drain"


def _needing_zmq_port(key: str, events: EventPorts) -> Iterator[str]:
    if events.zmq_port is None:
        for name, port in (("replay", events.replay_port), ("load", events.load_port)):
            if port is not None:
                yield f"{key}.{name}_port: needs zmq_port"


def _high_ports(key: str, events: EventPorts) -> Iterator[str]:
    ports = {**_ports_of_ranks(events), "grpc": events.grpc_port}
    for name, port in ports.items():
        last = (port or 0) + (0 if name == "grpc" else events.ranks - 1)
        if last > address.MAX_PORT:
            yield f"{key}.{name}_port: with its ranks it is above 65535"


def _overlapping_ports(key: str, events: EventPorts) -> Iterator[str]:
    for (one, first), (other, second) in combinations(_ports_of_ranks(events).items(), 2):
        if first is not None and second is not None and abs(first - second) < events.ranks:
            yield f"{key}: {_overlap(one, other, events.ranks)}"


def _ports_of_ranks(events: EventPorts) -> dict[str, int | None]:
    """Returns the ports of rank 0 beside which those of the other ranks are."""
    return {"zmq": events.zmq_port, "replay": events.replay_port, "load": events.load_port}


def _overlap(one: str, other: str, ranks: int) -> str:
    if ranks == 1:
        return f"{one} and {other} have the same port"
    return f"with {ranks} ranks the ports of {one} and {other} overlap (rank r uses both ports + r)"


def _one_source(key: str, events: WorkerEvents) -> Iterator[str]:
    if [events.zmq, events.grpc, events.drain].count(None) != len(("zmq", "grpc")):
        yield f"{key}: needs exactly one of zmq, grpc and drain"


def _grpc(key: str, events: WorkerEvents) -> Iterator[str]:
    if events.grpc is not None:
        yield from address_fault(f"{key}.grpc", events.grpc, _parse_port(address.parse))


def _drain(key: str, events: WorkerEvents) -> Iterator[str]:
    if events.drain is not None:
        yield from address_fault(f"{key}.drain", events.drain, _parse_port(address.parse_http))


def _needing_zmq(key: str, events: WorkerEvents) -> Iterator[str]:
    if events.zmq is None:
        yield from (
            f"{key}.{name}: needs zmq"
            for name in ("replay", "load", "bind")
            if getattr(events, name)
        )


# The addresses of a feed over ZMQ, each of which has a port for each rank.
_OF_RANKS = ("zmq", "replay", "load")


def _addresses(key: str, events: WorkerEvents) -> Iterator[str]:
    for name in _OF_RANKS:
        yield from until_wrong(_address, f"{key}.{name}", events, name)


def _address(key: str, events: WorkerEvents, name: str) -> Iterator[str]:
    text = getattr(events, name)
    if text is None:
        return
    try:
        place = _publisher(events, name, text)
    except ValueError as error:
        yield f"{key}: {error}"
        return
    if place.port + events.ranks - 1 > address.MAX_PORT:
        yield f"{key}: port {place.port} + {events.ranks} ranks is above 65535"


def _publisher(events: WorkerEvents, name: str, text: str) -> Address:
    """Returns the address of rank 0.

    Raises:
        ValueError: it is none that the router can connect to, or bind.
    """
    place = address.parse_tcp(text)
    if not (name == "zmq" and events.bind):
        _raise_unless_reachable(place, text)
    if not place.port:
        raise ValueError(f"must have a port above 0, is {text!r}")
    return place


def _overlapping(key: str, events: WorkerEvents) -> Iterator[str]:
    taken: dict[Address, str] = {}
    for name in _OF_RANKS:
        ports = dict.fromkeys(until_wrong(_places_of_ranks, events, name), name)
        for other in dict.fromkeys(taken[one] for one in ports if one in taken):
            yield f"{key}: {_overlap(other, name, events.ranks)}"
        taken |= ports


def _places_of_ranks(events: WorkerEvents, name: str) -> Iterator[Address]:
    """Yields the address of each rank; none if it is no address, which is reported elsewhere."""
    text = getattr(events, name)
    with contextlib.suppress(ValueError):
        place = _publisher(events, name, text or "")
        yield from (Address(place.host, place.port + rank) for rank in range(events.ranks))


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
    needed = [Extra(key, "grpc") for key in _grpc_keys(config)]
    if config.discovery.kubernetes is not None:
        needed.append(Extra("discovery.kubernetes", "kubernetes"))
    url = "" if config.sharing is None else config.sharing.url
    if url and not url.startswith(address.DIRECTORY_PREFIX):
        needed.append(Extra("sharing.url", "sharing"))
    return [one for one in needed if find(EXTRAS[one.name][0]) is None]


def _grpc_keys(config: Config) -> Iterator[str]:
    """Yields the keys that need grpcio."""
    for position, worker in enumerate(config.workers):
        if isinstance(worker.events, WorkerEvents) and worker.events.grpc is not None:
            yield f"workers[{position}].events.grpc"
    found = {f"dns[{at}]": one.worker for at, one in enumerate(config.discovery.dns)}
    if config.discovery.kubernetes is not None:
        found["kubernetes"] = config.discovery.kubernetes.worker
    for source, one in found.items():
        if isinstance(one.events, EventPorts) and one.events.grpc_port is not None:
            yield f"discovery.{source}.worker.events.grpc_port"


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
        yield same_place(address.parse(worker.endpoint))
    except ValueError:
        yield worker.endpoint


def shared_feeds(key: str, workers: Sequence[WorkerSettings]) -> Iterator[str]:
    """Yields a fault for each worker and key that names a feed, or a rank, of an earlier worker.

    key: the key of the list of workers.
    """
    owners: dict[tuple[object, ...], int] = {}
    for position, worker in enumerate(workers):
        told: set[str] = set()
        for name, place, source in until_wrong(_sources, worker):
            owner = owners.setdefault(source, position)
            if owner != position and name not in told:
                told.add(name)
                yield f"{key}[{position}].events.{name}: {place} is already used by {key}[{owner}]"


def _sources(worker: WorkerSettings) -> Iterator[tuple[str, Address, tuple[object, ...]]]:
    """Yields a feed's addresses: key, address, and the tuple that must be unique among workers.

    Publishers behind one proxy share an address, but have different topics.
    """
    events, tcp = worker.events, address.parse_tcp
    if not isinstance(events, WorkerEvents):
        return
    yield from until_wrong(_zmq_places, events)
    yield from until_wrong(lambda: _places("replay", events.replay, tcp, events.ranks))
    yield from until_wrong(lambda: _places("load", events.load, tcp, events.ranks))
    yield from until_wrong(lambda: _places("grpc", events.grpc, address.parse, 1, events.service))
    yield from _places("drain", events.drain, address.parse_http)


def _zmq_places(events: WorkerEvents) -> Iterator[tuple[str, Address, tuple[object, ...]]]:
    topic = None if events.bind else events.topic
    yield from _places("zmq", events.zmq, address.parse_tcp, events.ranks, topic)


def _places(
    name: str,
    text: str | None,
    parse: Callable[[str], Address],
    ranks: int = 1,
    beside: str | None = None,
) -> Iterator[tuple[str, Address, tuple[object, ...]]]:
    """Yields each rank's address; none if the text is no address, which is reported elsewhere."""
    if text is None:
        return
    try:
        host, port = parse(text)
    except ValueError:
        return
    for one in range(port, min(port + ranks, address.MAX_PORT + 1)):
        place = Address(host, one)
        yield name, place, (name, same_place(place), beside)


def same_place(place: Address) -> Address:
    """Returns an address in the spelling used to compare addresses."""
    host = place.host.lower()
    return Address(_LOOPBACK if host == "localhost" else host, place.port)
