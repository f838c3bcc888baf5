"""Rules for workers: those of the configuration, those in a watched file, and what is found."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from extproc import address
from extproc.config.discovery import EventPorts, FoundWorker
from extproc.config.shared_sources import shared_endpoints, shared_feeds
from extproc.config.whole import Config
from extproc.config.workers import Worker, WorkerEvents

AT_LEAST_ONE = "at least one is needed"


def address_fault(key: str, text: str, parse: Callable[[str], object]) -> Iterator[str]:
    """What is wrong with an address, if anything."""
    try:
        parse(text)
    except ValueError as error:
        yield f"{key}: {error}"


def fleet_faults(config: Config) -> Iterator[str]:
    """What is wrong with the workers and where they are found."""
    found = config.discovery
    if not (config.workers or found.file or found.dns or found.kubernetes):
        yield f"workers: {AT_LEAST_ONE}"
    yield from worker_faults("workers", config.workers, config)
    names = Counter(name.name for name in found.dns)
    yield from (
        f"discovery.dns: the name {name} is given {count} times"
        for name, count in names.items()
        if count > 1
    )
    for position, name in enumerate(found.dns):
        key = f"discovery.dns[{position}]"
        if name.nameserver is not None:
            yield from address_fault(f"{key}.nameserver", name.nameserver, _parse_ip)
        yield from _found(f"{key}.worker", name.worker, config)
    if found.kubernetes is not None:
        pods = found.kubernetes
        if (pods.selector is None) is (pods.inference_pool is None):
            yield "discovery.kubernetes: needs exactly one of selector and inference_pool"
        yield from _found("discovery.kubernetes.worker", pods.worker, config)


def worker_faults(key: str, workers: Sequence[Worker], config: Config) -> Iterator[str]:
    """What is wrong with a list of workers.

    key: of the list.
    """
    yield from shared_endpoints(key, workers)
    yield from shared_feeds(key, workers)
    for position, worker in enumerate(workers):
        yield from _worker(f"{key}[{position}]", worker, config)


def _parse_ip(text: str) -> None:
    if not address.parse(text).is_ip:
        raise ValueError(f"must be ip:port, is {text!r}")


def _parse_port(parse: Callable[[str], address.Address]) -> Callable[[str], None]:
    """For addresses that are connected to."""

    def parsed(text: str) -> None:
        place = parse(text)
        _raise_unless_reachable(place, text)
        if not place.port:
            raise ValueError(f"must have a port above 0, is {text!r}")

    return parsed


def _raise_unless_reachable(place: address.Address, text: str) -> None:
    if place.host in address.WILDCARDS:
        raise ValueError(
            f"{text!r} is where a server listens; write the worker's own host instead of"
            f" {place.host}"
        )


def _worker(key: str, worker: Worker, config: Config) -> Iterator[str]:
    yield from address_fault(f"{key}.endpoint", worker.endpoint, _parse_port(address.parse))
    yield from _model(key, worker.model, learn=worker.learn, config=config)
    if isinstance(worker.events, WorkerEvents):
        yield from _events(f"{key}.events", worker.events)


def _model(key: str, model: str | None, *, learn: bool, config: Config) -> Iterator[str]:
    names = [one.name for one in config.models]
    if model is None and len(names) > 1 and not learn:
        yield f"{key}.model: missing; there are {len(names)} models: {', '.join(names)}"
    if model is not None and model not in names:
        yield f"{key}.model: {model!r} is not under models"


def _found(key: str, worker: FoundWorker, config: Config) -> Iterator[str]:
    if worker.port > address.MAX_PORT:
        yield f"{key}.port: is above 65535"
    yield from _model(key, worker.model, learn=worker.learn, config=config)
    if isinstance(worker.events, EventPorts):
        yield from event_ports_faults(f"{key}.events", worker.events)


def event_ports_faults(key: str, events: EventPorts) -> Iterator[str]:
    """What is wrong with the ports of a feed."""
    if (events.zmq_port, events.grpc_port, events.drain or None).count(None) != 2:  # noqa: PLR2004
        yield f"{key}: needs exactly one of zmq_port, grpc_port and drain"
    if events.zmq_port is None and events.replay_port is not None:
        yield f"{key}.replay_port: needs zmq_port"
    first, second = events.zmq_port, events.replay_port
    for name, port in (
        ("zmq_port", first),
        ("replay_port", second),
        ("grpc_port", events.grpc_port),
    ):
        last = (port or 0) + (0 if name == "grpc_port" else events.ranks - 1)
        if last > address.MAX_PORT:
            yield f"{key}.{name}: with its ranks it is above 65535"
    if first is not None and second is not None and abs(first - second) < events.ranks:
        yield f"{key}: {_overlap(events.ranks)}"


def _overlap(ranks: int) -> str:
    if ranks == 1:
        return "zmq and replay have the same port"
    return f"with {ranks} ranks the ports of zmq and replay overlap (rank r uses both ports + r)"


def _events(key: str, events: WorkerEvents) -> Iterator[str]:
    if [events.zmq, events.grpc, events.drain].count(None) != len(("zmq", "grpc")):
        yield f"{key}: needs exactly one of zmq, grpc and drain"
    if events.grpc is not None:
        yield from address_fault(f"{key}.grpc", events.grpc, _parse_port(address.parse))
    if events.drain is not None:
        yield from address_fault(f"{key}.drain", events.drain, _parse_port(address.parse_http))
    if events.zmq is None:
        yield from (
            f"{key}.{name}: needs zmq"
            for name, value in (("replay", events.replay), ("bind", events.bind))
            if value
        )
    yield from _ports(key, events)


def _ports(key: str, events: WorkerEvents) -> Iterator[str]:
    taken: set[tuple[str, int]] = set()
    for name, text in (("zmq", events.zmq), ("replay", events.replay)):
        if text is None:
            continue
        try:
            place = address.parse_tcp(text)
            if not (name == "zmq" and events.bind):
                _raise_unless_reachable(place, text)
            if not place.port:
                raise ValueError(f"must have a port above 0, is {text!r}")
        except ValueError as error:
            yield f"{key}.{name}: {error}"
            continue
        if place.port + events.ranks - 1 > address.MAX_PORT:
            yield f"{key}.{name}: port {place.port} + {events.ranks} ranks is above 65535"
        ports = {(place.host, place.port + rank) for rank in range(events.ranks)}
        if ports & taken:
            yield f"{key}: {_overlap(events.ranks)}"
        taken |= ports
