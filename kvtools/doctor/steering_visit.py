"""Looks whether requests are steered now: asks the routers, and sends a request through Envoy.

Envoy's counters are read twice, a second apart. The request in between is a `GET /v1/models`,
which changes nothing: Envoy asks the router about it as about any other.
"""

import asyncio
import socket
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from extproc.base import address
from extproc.commands.health import TIMEOUT_SECONDS, fault_of
from kvstate.undecodable import UNDECODABLE
from kvtools.doctor.findings import Finding, Subject
from kvtools.doctor.steering import (
    SteeredListener,
    SteeringCounters,
    SteeringState,
    counters_in,
    judge_steering,
    listeners_in,
)
from kvtools.doctor.worker_visit import VisitTools

DUMP = "/config_dump"
STATS = "/stats?format=json&filter=ext_proc"
REQUEST = "/v1/models"

# How long Envoy's counters are watched.
WATCH_SECONDS = 1.0

_LOOPBACKS = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


async def visit(tools: VisitTools, at: str) -> list[Finding]:
    """Returns the finding about steering.

    at: the address of Envoy's admin server.
    """
    routers, envoy, settings = await asyncio.gather(
        _routers(tools), _envoy(tools, at), _settings(tools)
    )
    seen = SteeringState(routers, *envoy, settings.percent, settings.fault)
    return [judge_steering(Subject("steering"), seen)]


async def _routers(tools: VisitTools) -> dict[str, str]:
    """Returns why each router is not ready, by its address; "" if it is."""
    config = tools.config
    own = local(config.extproc.listen)
    wanted = config.router_addresses()
    has_tls = config.extproc.tls is not None
    ask = asyncio.to_thread
    faults = await asyncio.gather(*(ask(_fault, local(one), has_tls) for one in wanted))
    if len(wanted) == 1 and faults[0] and wanted[0] != own:
        # a name that only Envoy's host resolves, perhaps
        return {own: await ask(_fault, own, has_tls)}
    return dict(zip(wanted, faults, strict=True))


def local(place: str) -> str:
    """Returns the address at which a listener is asked: a loopback one if it listens on all."""
    if place.startswith(address.UNIX_PREFIX):
        return place
    at = address.parse(place)
    return str(address.Address(_LOOPBACKS.get(at.host, at.host), at.port))


def _fault(place: str, has_tls: bool) -> str:
    """Returns why a router is not ready, "" if it is; over TLS only whether it listens."""
    if not has_tls:
        fault = fault_of(place) or ""
        return fault.removeprefix(f"{place}: ").removeprefix("UNAVAILABLE: ")
    try:
        _connect(place)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _connect(place: str) -> None:
    if place.startswith(address.UNIX_PREFIX):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(TIMEOUT_SECONDS)
            connection.connect(place.removeprefix(address.UNIX_PREFIX))
        return
    at = address.parse(place)
    socket.create_connection((at.host, at.port), TIMEOUT_SECONDS).close()


class _Settings(NamedTuple):
    """What a router says of its steering: as in `SteeringState`."""

    percent: float | None = None
    fault: str = ""


async def _settings(tools: VisitTools) -> _Settings:
    answer = await tools.web.get(f"http://{local(tools.config.admin.listen)}/steering")
    status: Any = None
    with suppress(*UNDECODABLE):
        status = msgspec.json.decode(answer.body) if answer.is_ok else None
    if not isinstance(status, dict) or not isinstance(status.get("percent"), int | float):
        return _Settings()
    return _Settings(float(status["percent"]), str(status.get("fault") or ""))


class _EnvoyAnswer(NamedTuple):
    """What was seen of Envoy: as in `SteeringState`."""

    fault: str = ""
    listeners: tuple[SteeredListener, ...] = ()
    counted: SteeringCounters = SteeringCounters()
    request: str = ""


async def _envoy(tools: VisitTools, at: str) -> _EnvoyAnswer:
    dump = await tools.web.get(f"http://{at}{DUMP}")
    listeners = listeners_in(dump.body) if dump.is_ok else None
    before = await _counters(tools, at)
    if listeners is None or before is None:
        why = dump.reason or f"{DUMP} or {STATS} cannot be read"
        return _EnvoyAnswer(f"Envoy's admin server at {at} did not tell: {why}")
    if not listeners:
        return _EnvoyAnswer()
    request, _ = await asyncio.gather(_send(tools, at, listeners), asyncio.sleep(WATCH_SECONDS))
    after = await _counters(tools, at) or before
    return _EnvoyAnswer("", tuple(listeners), after.since(before), request)


async def _counters(tools: VisitTools, at: str) -> SteeringCounters | None:
    answer = await tools.web.get(f"http://{at}{STATS}")
    return counters_in(answer.body) if answer.is_ok else None


async def _send(tools: VisitTools, at: str, listeners: list[SteeredListener]) -> str:
    """Sends the request through Envoy; returns what came of it."""
    for door in listeners:
        if door.speaks_tls or door.address.startswith(address.UNIX_PREFIX):
            continue
        with suppress(ValueError):
            place = address.parse(door.address)
            host = address.parse(at).host if place.host in _LOOPBACKS else place.host
            url = f"http://{address.Address(host, place.port)}{REQUEST}"
            answer = await tools.web.get(url)
            return f"{url} answers {answer.status or answer.reason}"
    return "send a request through it, and check again: its listeners speak TLS"
