"""Where a worker's feed is to be had: as configured, or as the worker itself tells.

Sources: `GET /kv_event_sources` of vLLM 0.32, by data-parallel rank, with the ports it really has;
`GET /server_info` of SGLang (0.5.23: `kv_events` with a base port, to which a rank adds its own).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from extproc import address
from extproc.address import Address
from extproc.config import WorkerEvents
from extproc.config.shared_sources import same_place
from kvstate.feeds.feed_sources import DrainSource, FeedSource, GrpcSource, ZmqSource

# A publisher that binds all interfaces names none that could be connected to.
_ANY_HOST = frozenset(("*", "0.0.0.0", "[::]", "::", ""))  # noqa: S104 - what publishers say
MAX_RANKS = 1024

_VLLM = "/kv_event_sources"
_SGLANG = "/server_info"
PATHS = (_VLLM, _SGLANG, "/get_server_info")


# What no two workers may name: of which socket, where, and with which topic.
Place = tuple[str, str, int, str]


def strange_host(sources: Sequence[ZmqSource], own: Collection[str]) -> str:
    """The first host that a worker names and that is none of these, "" if there is none.

    own: its own, in every spelling, and those that it may name besides.
    """
    hosts = (host for source in sources for _, host, _, _ in _places_of(source))
    return next((host for host in hosts if host not in own), "")


def places(sources: Sequence[ZmqSource], own: Collection[str] = ()) -> frozenset[Place]:
    """Where a worker's feed is; of its own host in every spelling."""
    found: set[Place] = set()
    for source in sources:
        for socket, host, port, topic in _places_of(source):
            spellings = own if host in own else (host,)
            found |= {(socket, spelling, port, topic) for spelling in spellings}
    return frozenset(found)


def _places_of(source: ZmqSource) -> Iterator[Place]:
    for socket, endpoint, topic in (
        ("zmq", source.events, source.topic),
        ("replay", source.replay, ""),
    ):
        if endpoint is not None and endpoint.startswith("tcp://"):
            host, port = same_place(address.parse_tcp(endpoint))
            yield socket, host, port, topic


def configured(events: WorkerEvents) -> FeedSource:
    """The source that the configuration names; `extproc.config.rules` has checked it."""
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
        )
        for rank in range(events.ranks)
    )


def discovered(path: str, answer: bytes, host: str) -> tuple[ZmqSource, ...]:
    """The sources in a worker's answer to one of `PATHS`, in the order of ranks, if any.

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
    replay_port = raw.get("replay_endpoint_port_base")
    return tuple(
        ZmqSource(
            events=_endpoint(publisher, int(raw["endpoint_port_base"]) + rank),
            replay=None if replay_port is None else _endpoint(publisher, int(replay_port) + rank),
            topic=str(raw.get("topic") or ""),
        )
        for rank in range(ranks)
    )


def _optional(endpoint: object, host: str) -> str | None:
    return None if endpoint is None else _reachable(endpoint, host)


def _reachable(endpoint: object, host: str) -> str:
    """A publisher's own endpoint as we can connect to it."""
    named, _, port = str(endpoint).removeprefix("tcp://").rpartition(":")
    return _endpoint(host if named in _ANY_HOST else named, int(port))


def _endpoint(host: str, port: int) -> str:
    place = Address(host.removeprefix("[").removesuffix("]"), port)
    return f"tcp://{address.parse(str(place))}"


def _of_rank(endpoint: str, rank: int) -> str:
    """vLLM and SGLang publish rank r on the configured port + r."""
    place = address.parse_tcp(endpoint)
    return f"tcp://{place._replace(port=place.port + rank)}"
