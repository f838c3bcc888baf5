"""Where a worker publishes its events, as the worker itself answers.

A worker may only name its own host, or hosts that the operator lists: otherwise it could make the
router connect to anything, and get credit for another worker's blocks.

Sources: `GET /kv_event_sources` of vLLM 0.32, by data-parallel rank, with the ports that it really
uses; `GET /server_info` of SGLang (0.5.23: `kv_events` with the base ports of its events, their
replays and its load, to which each rank adds its number).
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp
import msgspec

from extproc.base import address
from extproc.base.address import Address, same_place, with_host
from extproc.fleet.asking.polling import Client, fetch_report
from extproc.fleet.records.worker import Place
from kvstate.feeds.feed_sources import ZmqSource
from kvstate.undecodable import UNDECODABLE

# Hosts of a publisher that binds all interfaces: to a client they name no host, or its own.
_ANY_HOST = frozenset(("*", "0.0.0.0", "[::]", "::", ""))
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


def discovered(path: str, answer: bytes, host: str) -> tuple[ZmqSource, ...]:
    """Returns the sources in a worker's answer to one of `PATHS`, in the order of ranks.

    host: the worker's, for publishers that bind every interface.
    """
    try:
        raw = msgspec.json.decode(answer)
    except UNDECODABLE:
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


class SourcePlaces(NamedTuple):
    """A worker's sources, one for each rank, and their places, which no other worker may have."""

    sources: tuple[ZmqSource, ...]
    places: frozenset[Place]


async def permitted(
    client: Client, endpoint: str, name: str, hosts: tuple[str, ...], max_ranks: int
) -> SourcePlaces | str:
    """Returns what a worker reports about its feed, or why the report is refused.

    endpoint: its ip:port now. name: its host as configured, for which the report may use the name;
    the sources have the address. hosts: those that it may name besides its own.
    """
    answer = await sources(client, endpoint)
    if isinstance(answer, str):
        return answer
    if len(answer) > max_ranks:
        return f"it names {len(answer)} ranks, more than events.auto_ranks ({max_ranks})"
    host = address.parse(endpoint).host
    own = frozenset(same_place(Address(one, 0)).host for one in (host, name))
    listed = frozenset(same_place(Address(one, 0)).host for one in hosts)
    strange = strange_host(answer, own | listed)
    if strange:
        return f"it publishes on {strange}, which is neither its own host nor in events.auto_hosts"
    moved = tuple(_moved(one, name, host) for one in answer)
    return SourcePlaces(moved, places(moved, own))


def _moved(source: ZmqSource, name: str, host: str) -> ZmqSource:
    def at(endpoint: str | None) -> str | None:
        return endpoint and with_host(endpoint, name, host)

    return dataclasses.replace(
        source,
        events=with_host(source.events, name, host),
        replay=at(source.replay),
        load=at(source.load),
    )


async def sources(client: Client, endpoint: str) -> tuple[ZmqSource, ...] | str:
    """Returns a worker's sources, one for each rank, or why there are none.

    endpoint: host:port of its HTTP server.
    """
    host = address.parse(endpoint).host
    reasons: list[str] = []
    for path in PATHS:
        try:
            answer = await fetch_report(client, endpoint, path)
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
