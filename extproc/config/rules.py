"""Rules between the keys of a configuration, and rules about the addresses that they name.

`broken_rules` finds faults; `doubts` finds what may be meant, and is accepted with a note. Workers
must not share an endpoint or a feed, as a copied line makes them: a feed's messages do not say
which worker sent them, so its blocks would be credited to both.
"""

import contextlib
import ipaddress
import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from operator import attrgetter

from extproc import address, headers
from extproc.address import Address
from extproc.config.schema import (
    Config,
    Envoy,
    EventPorts,
    FoundWorker,
    Worker,
    WorkerEvents,
)
from extproc.config.sections import BOTH, DECODE, MIRROR, NIXL, OFFLOADING, PREFILL, SGLANG
from extproc.config.sharing_rules import router_faults, sharing_doubts, sharing_faults

AT_LEAST_ONE = "at least one is needed"

# A field name that a proxy may be asked to set (RFC 9110, section 5.1; no pseudo-header).
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")

# Reserved: requests cannot do without these, or KVSteer sets them.
_TAKEN = frozenset({
    "host", "content-length", "content-type", "transfer-encoding", "connection", "authorization",
    headers.DESTINATION, headers.MODEL,
})  # fmt: skip


def broken_rules(config: Config) -> list[str]:
    """Returns every broken rule as "key: what is wrong"."""
    return [
        *listener_faults(config),
        *_limits(config),
        *_headers(config),
        *_models(config),
        *fleet_faults(config),
        *_legs(config),
        *sharing_faults(config.sharing, config.extproc.processes),
        *config.steering.faults(config.disaggregation),
    ]


def _limits(config: Config) -> Iterator[str]:
    timeout_ms = config.envoy.message_timeout_ms
    if config.extproc.deadline_ms >= timeout_ms:
        yield f"extproc.deadline_ms: must be below envoy.message_timeout_ms ({timeout_ms})"
    limit_bytes = config.envoy.request_body_buffer_limit_bytes
    if config.extproc.max_body_bytes > limit_bytes:
        yield (
            "extproc.max_body_bytes: must not be above"
            f" envoy.request_body_buffer_limit_bytes ({limit_bytes}): Envoy answers 413 there"
        )
    if config.policy.shed and config.policy.max_in_flight is None:
        yield "policy.max_in_flight: missing: policy.shed needs it"


def _headers(config: Config) -> Iterator[str]:
    policy = config.policy
    for key in ("policy.header", "policy.session_header", "policy.rank_header", "steering.header"):
        name = attrgetter(key)(config)
        if name is not None and not _HEADER.fullmatch(name):
            yield f"{key}: is not a valid header name: {name!r}"
    session = policy.session_header
    if session and session.lower() == (policy.header or "").lower():
        yield f"policy.session_header: {session!r} is already used as policy.header"
    name = (policy.rank_header or "").lower()
    if name in _TAKEN:
        yield f"policy.rank_header: {policy.rank_header!r} is a reserved header"
    elif name and name == (policy.header or "").lower():
        yield f"policy.rank_header: {policy.rank_header!r} is already used as policy.header"


def _legs(config: Config) -> Iterator[str]:
    rules = config.disaggregation
    if rules.min_pulled_tokens is not None:
        if rules.connector != OFFLOADING:
            yield "disaggregation.min_pulled_tokens: needs disaggregation.connector: offloading"
        if rules.mode is None and config.extproc.dialect == "epp":
            yield (
                "disaggregation.min_pulled_tokens: needs bodies that can be changed (dialect"
                " buffered), or a sidecar (disaggregation.mode: header)"
            )
    if config.disaggregation.mode != MIRROR:
        return
    if config.disaggregation.connector == NIXL:
        yield (
            "disaggregation.connector: nixl needs mode header: its second request says what the"
            " first one answered"
        )
    if config.extproc.dialect == "epp":
        yield "disaggregation.mode: mirror needs bodies that can be changed: dialect buffered"


def _models(config: Config) -> Iterator[str]:
    if not config.models:
        yield f"models: {AT_LEAST_ONE}"
    names = [
        (f"models[{position}]", name)
        for position, model in enumerate(config.models)
        for name in (model.name, *model.aliases, *model.lora)
    ]
    uses = Counter(name for _, name in names)
    seen: set[str] = set()
    for key, name in names:
        if uses[name] > 1 and name not in seen:
            seen.add(name)
            yield f"{key}: the name {name!r} is used {uses[name]} times"


_MODE = re.compile("0?[0-7]{3}")

_LOOPBACK = "127.0.0.1"
_WILDCARDS = {4: "0.0.0.0", 6: "::"}  # noqa: S104 - compared with, not bound


def listener_faults(config: Config) -> Iterator[str]:
    """Yields what is wrong with the addresses on which the router and Envoy listen."""
    yield from _socket_or_address("extproc.listen", config.extproc.listen)
    yield from address_fault("admin.listen", config.admin.listen, address.parse)
    yield from address_fault("metrics.listen", config.metrics.listen, address.parse)
    yield from address_fault("envoy.listen", config.envoy.listen, _parse_listener)
    yield from address_fault("envoy.admin", config.envoy.admin, _parse_listener)
    for key, text in _routers(config):
        yield from _socket_or_address(key, text)
    yield from router_faults(config.envoy.router, config.envoy.routers)
    mode = config.extproc.socket_mode
    if not _MODE.fullmatch(mode):
        yield f'extproc.socket_mode: must be a mode such as "0660", is {mode!r}'
    yield from _tls(config)
    yield from _processes(config)
    yield from _taken_twice(config)


def _processes(config: Config) -> Iterator[str]:
    """Yields what several processes cannot have in common: ports, and feeds for one reader."""
    count = config.extproc.processes
    if count == 1:
        return
    for key, text in (*_listeners(config), *_routers(config)):
        try:
            last = address.nth(text, count - 1)
        except ValueError as error:
            yield f"{key}: {error}"
        else:
            if last.startswith(address.UNIX_PREFIX):
                yield from _socket_or_address(key, last)
    for position, worker in enumerate(config.workers):
        if isinstance(worker.events, WorkerEvents) and (worker.events.drain or worker.events.bind):
            name = "drain" if worker.events.drain else "bind"
            yield (
                f"workers[{position}].events.{name}: cannot be shared by {count} processes"
                " (extproc.processes): put `kvsteer bridge` in between"
            )


def _routers(config: Config) -> Iterator[tuple[str, str]]:
    """Yields what is written of where Envoy reaches the router, or several."""
    envoy = config.envoy
    if envoy.router is not None:
        yield "envoy.router", envoy.router
    for position, text in enumerate(envoy.routers.addresses if envoy.routers else ()):
        yield f"envoy.routers.addresses[{position}]", text


def _listeners(config: Config) -> list[tuple[str, str]]:
    return [
        ("extproc.listen", config.extproc.listen),
        ("admin.listen", config.admin.listen),
        ("metrics.listen", config.metrics.listen),
    ]


def _all_listeners(config: Config) -> Iterator[tuple[str, str]]:
    """Yields the addresses of every process, as far as there are any."""
    yield from _listeners(config)
    for number in range(1, config.extproc.processes):
        for key, text in _listeners(config):
            with contextlib.suppress(ValueError):
                yield f"{key} of process {number}", address.nth(text, number)


def _socket_or_address(key: str, text: str) -> Iterator[str]:
    if text.startswith("/"):
        yield f"{key}: must be host:port or unix:PATH, is {text!r}; did you mean unix:{text}?"
        return
    if not text.startswith(address.UNIX_PREFIX):
        yield from address_fault(key, text, address.parse)
        return
    # gRPC also writes unix:///absolute/path.
    path = text.removeprefix(address.UNIX_PREFIX).removeprefix("//")
    size = len(path.encode())
    if not path:
        yield f"{key}: unix: needs a path"
    elif size > address.MAX_PATH_BYTES:
        yield f"{key}: the socket's path has {size} bytes; {address.MAX_PATH_BYTES} are the most"


def _parse_listener(text: str) -> None:
    place = address.parse(text)
    if not place.is_ip and place.host != "localhost":
        raise ValueError(f"must be ip:port, since Envoy listens on no host name, is {text!r}")


def _tls(config: Config) -> Iterator[str]:
    ours, theirs = config.extproc.tls, config.envoy.router_tls
    if ours is not None and config.extproc.listen.startswith(address.UNIX_PREFIX):
        yield "extproc.tls: needs a listen of host:port; for a Unix socket set extproc.socket_mode"
    if theirs is None:
        return
    if (theirs.certificate is None) != (theirs.key is None):
        yield "envoy.router_tls: certificate and key belong together"
    elif theirs.certificate is None and ours is not None and ours.client_ca is not None:
        yield "envoy.router_tls: needs certificate and key: extproc.tls.client_ca asks for them"


def _taken_twice(config: Config) -> Iterator[str]:
    """Yields addresses that two servers are to listen on.

    Envoy's are compared with the router's only where both are known to run on one host, and only
    where they are not the defaults: Envoy may have another configuration than this one.
    """
    envoy, plain = config.envoy, Envoy()
    ours = [*_all_listeners(config)]
    theirs = [("envoy.listen", envoy.listen), ("envoy.admin", envoy.admin)]
    written = [
        one
        for one, usual in zip(theirs, (plain.listen, plain.admin), strict=True)
        if one[1] != usual
    ]
    faults = [*_clashes(ours), *_clashes(theirs)]
    if any(_listens_on_loopback(text) for text in config.router_addresses()):
        faults += _clashes([*ours, *written])
    yield from dict.fromkeys(faults)


def _clashes(listeners: list[tuple[str, str]]) -> Iterator[str]:
    for position, (key, text) in enumerate(listeners):
        for before, other in listeners[:position]:
            if _is_same(text, other):
                yield f"{key}: {text} is taken: {before} is {other}"
                break


def _is_same(one: str, other: str) -> bool:
    try:
        first, second = (same_place(address.parse(text)) for text in (one, other))
    except ValueError:  # told as what it is
        return False
    if first.port != second.port or not first.port:
        return False
    return first.host == second.host or _takes_in(first, second) or _takes_in(second, first)


def _takes_in(one: Address, other: Address) -> bool:
    """Tells whether the first is bound to all addresses of the second's kind."""
    return other.is_ip and one.host == _WILDCARDS[ipaddress.ip_address(other.host).version]


def _listens_on_loopback(text: str) -> bool:
    try:
        return address.is_loopback(same_place(address.parse(text)).host)
    except ValueError:
        return False


def fleet_faults(config: Config) -> Iterator[str]:
    """Yields what is wrong with the workers and with their discovery."""
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
            yield from address_fault(f"{key}.nameserver", name.nameserver, _parse_nameserver)
        yield from _found(f"{key}.worker", name.worker, config)
    if found.kubernetes is not None:
        pods = found.kubernetes
        if (pods.selector is None) is (pods.inference_pool is None):
            yield "discovery.kubernetes: needs exactly one of selector and inference_pool"
        yield from _found("discovery.kubernetes.worker", pods.worker, config)


def worker_faults(key: str, workers: Sequence[Worker], config: Config) -> Iterator[str]:
    """Yields what is wrong with a list of workers.

    key: of the list.
    """
    yield from shared_endpoints(key, workers)
    yield from shared_feeds(key, workers)
    for position, worker in enumerate(workers):
        yield from _worker(f"{key}[{position}]", worker, config)


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
    """Yields what is wrong with the ports of a feed."""
    if (events.zmq_port, events.grpc_port, events.drain or None).count(None) != 2:  # noqa: PLR2004
        yield f"{key}: needs exactly one of zmq_port, grpc_port and drain"
    of_ranks = {"zmq": events.zmq_port, "replay": events.replay_port, "load": events.load_port}
    if events.zmq_port is None:
        for name in ("replay", "load"):
            if of_ranks[name] is not None:
                yield f"{key}.{name}_port: needs zmq_port"
    for name, port in (*of_ranks.items(), ("grpc", events.grpc_port)):
        last = (port or 0) + (0 if name == "grpc" else events.ranks - 1)
        if last > address.MAX_PORT:
            yield f"{key}.{name}_port: with its ranks it is above 65535"
    for (one, first), (other, second) in combinations(of_ranks.items(), 2):
        if first is not None and second is not None and abs(first - second) < events.ranks:
            yield f"{key}: {_overlap(one, other, events.ranks)}"


def _overlap(one: str, other: str, ranks: int) -> str:
    if ranks == 1:
        return f"{one} and {other} have the same port"
    return f"with {ranks} ranks the ports of {one} and {other} overlap (rank r uses both ports + r)"


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
            for name in ("replay", "load", "bind")
            if getattr(events, name)
        )
    yield from _ports(key, events)


def _ports(key: str, events: WorkerEvents) -> Iterator[str]:
    taken: dict[tuple[str, int], str] = {}
    for name, text in (("zmq", events.zmq), ("replay", events.replay), ("load", events.load)):
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
        ports = {(place.host, place.port + rank): name for rank in range(events.ranks)}
        for other in dict.fromkeys(taken[one] for one in ports if one in taken):
            yield f"{key}: {_overlap(other, name, events.ranks)}"
        taken |= ports


def _parse_nameserver(text: str) -> None:
    if not address.parse(text).is_ip:
        raise ValueError(f"must be ip:port, is {text!r}")


def _parse_port(parse: Callable[[str], address.Address]) -> Callable[[str], None]:
    """Returns a parser that accepts only addresses which can be connected to."""

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


def address_fault(key: str, text: str, parse: Callable[[str], object]) -> Iterator[str]:
    """Yields what is wrong with an address, if anything."""
    try:
        parse(text)
    except ValueError as error:
        yield f"{key}: {error}"


def shared_endpoints(key: str, workers: Sequence[Worker]) -> Iterator[str]:
    """Yields the endpoints that several workers have.

    key: of the list of workers.
    """
    spelled: dict[Address | str, list[str]] = defaultdict(list)
    for worker in workers:
        try:
            spelled[same_place(address.parse(worker.endpoint))].append(worker.endpoint)
        except ValueError:  # told as what it is
            spelled[worker.endpoint].append(worker.endpoint)
    for texts in spelled.values():
        several = list(dict.fromkeys(texts))
        if len(several) > 1:
            yield f"{key}: the endpoints {' and '.join(several)} are the same"
        elif len(texts) > 1:
            yield f"{key}: the endpoint {texts[0]} is given {len(texts)} times"


def shared_feeds(key: str, workers: Sequence[Worker]) -> Iterator[str]:
    """Yields the feeds, or ranks, that several workers have; one fault for a worker and key.

    key: of the list of workers.
    """
    owners: dict[tuple[object, ...], int] = {}
    for position, worker in enumerate(workers):
        if not isinstance(worker.events, WorkerEvents):
            continue
        told: set[str] = set()
        for name, place, source in _sources(worker.events):
            owner = owners.setdefault(source, position)
            if owner != position and name not in told:
                told.add(name)
                yield f"{key}[{position}].events.{name}: {place} is already used by {key}[{owner}]"


def _sources(events: WorkerEvents) -> Iterator[tuple[str, Address, tuple[object, ...]]]:
    """Yields a feed's addresses: key, address, and what no other worker may have as well.

    Publishers behind one proxy share an address and have a topic each.
    """
    tcp, topic = address.parse_tcp, None if events.bind else events.topic
    yield from _places("zmq", events.zmq, tcp, events.ranks, topic)
    yield from _places("replay", events.replay, tcp, events.ranks)
    yield from _places("load", events.load, tcp, events.ranks)
    yield from _places("grpc", events.grpc, address.parse, 1, events.service)
    yield from _places("drain", events.drain, address.parse_http)


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
    """Returns an address in the spelling by which it is compared."""
    host = place.host.lower()
    return Address(_LOOPBACK if host == "localhost" else host, place.port)


def doubts(config: Config, is_there: Callable[[str], bool]) -> list[str]:
    """Returns what may be a mistake, as "key: what" each.

    is_there: tells whether a file or directory of this name exists.
    """
    return [
        *_unserved(config),
        *_adapters(config),
        *_open_to_others(config),
        *_missing(config, is_there),
        *_roles(config),
        *sharing_doubts(config.sharing),
    ]


def _open_to_others(config: Config) -> Iterator[str]:
    """Yields servers for the operator on addresses that others can reach."""
    for key, text, power in (
        ("admin.listen", config.admin.listen, "drain workers and turn their events off"),
        ("envoy.admin", config.envoy.admin, "stop Envoy and read its configuration"),
    ):
        host = address.parse(text).host
        if not address.is_loopback(host):
            yield f"{key}: anybody who reaches {text} can {power} without a password: use 127.0.0.1"


def _missing(config: Config, is_there: Callable[[str], bool]) -> Iterator[str]:
    """Yields files and directories that do not exist yet."""
    recording = config.recorder.file
    if recording is not None and not is_there(posixpath.dirname(recording) or "."):
        yield f"recorder.file: no folder for {recording}: until there is one, nothing is recorded"
    report = config.report.file
    if report is not None and not is_there(posixpath.dirname(report) or "."):
        yield f"report.file: no folder for {report}: until there is one, the report is not kept"
    file, directory = config.discovery.file, config.envoy.eds_directory
    if file is not None and not is_there(file):
        yield f"discovery.file: there is no {file}: until there is, no worker is found in it"
    if directory is not None and not is_there(directory):
        yield (
            f"envoy.eds_directory: there is no {directory}: until there is, the router cannot write"
            " the workers' addresses there, and Envoy does not start without them"
        )


def _unserved(config: Config) -> Iterator[str]:
    """Yields models without a worker, where all workers are listed and each names its model."""
    found = config.discovery
    if found.file or found.dns or found.kubernetes or len(config.models) == 1:
        return
    if all(worker.model for worker in config.workers):
        served = {worker.model for worker in config.workers}
        for position, model in enumerate(config.models):
            if model.name not in served:
                yield f"models[{position}]: no worker serves {model.name!r}"


def _roles(config: Config) -> Iterator[str]:
    """Yields what roles leave undone: who answers alone, and who computes for whom."""
    found, mode = config.discovery, config.disaggregation.mode
    roles = {worker.role for _, worker in _workers(config)}
    if PREFILL in roles and mode is None:
        yield "disaggregation.mode: missing: until it is set, prefill workers get no requests"
    if found.file or found.dns or found.kubernetes:
        return
    if mode is not None:
        for role in (PREFILL, DECODE):
            if role not in roles:
                yield f"disaggregation.mode: no worker has the role {role}: nothing is split"
    can_answer = {BOTH} if config.disaggregation.connector == SGLANG else {BOTH, DECODE}
    if roles and roles.isdisjoint(can_answer):
        yield (
            "workers: none takes whole requests: nothing answers while the router is down or no"
            " prefill worker is up"
        )


def _adapters(config: Config) -> Iterator[str]:
    """Yields adapters of workers that no request can name."""
    known = {name for model in config.models for name in model.lora}
    for key, worker in _workers(config):
        unknown = [name for name in worker.lora or () if name not in known]
        yield from (f"{key}.lora: {name!r} is under no model's lora" for name in unknown)


def _workers(config: Config) -> Iterator[tuple[str, Worker | FoundWorker]]:
    for position, worker in enumerate(config.workers):
        yield f"workers[{position}]", worker
    for position, name in enumerate(config.discovery.dns):
        yield f"discovery.dns[{position}].worker", name.worker
    if config.discovery.kubernetes is not None:
        yield "discovery.kubernetes.worker", config.discovery.kubernetes.worker
