"""Asks Envoy's admin server how Envoy is configured, and which hosts it knows."""

import asyncio
import socket
from collections.abc import Sequence

from extproc import address
from extproc.discovery.view import Found
from extproc.doctor.envoy_dump import hosts_in, judge_envoy
from extproc.doctor.findings import About, Finding
from extproc.doctor.worker_visit import Means

DUMP = "/config_dump"
CLUSTERS = "/clusters?format=json"


async def visit(means: Means, fleet: Sequence[Found]) -> list[Finding]:
    """What is right and wrong with the Envoy whose admin address is configured."""
    at = means.config.envoy.admin
    about = About(f"envoy {at}")
    answer = await means.web.get(f"http://{at}{DUMP}")
    if answer.status == 0:
        says = f"not checked: its admin server does not answer: {answer.reason}"
        return [about.note("envoy", says)]
    if not answer.is_ok:
        says = f"{DUMP}: {answer.reason or f'status {answer.status}'}"
        return [about.wrong("envoy-unreadable", says)]
    clusters = await means.web.get(f"http://{at}{CLUSTERS}")
    hosts = hosts_in(clusters.body) if clusters.is_ok else {}
    workers = await _workers(fleet)
    return list(judge_envoy(about, means.config, answer.body, hosts, workers))


async def _workers(fleet: Sequence[Found]) -> dict[str, str]:
    """The workers as `judge_hosts` takes them; none if one of them has no address now."""
    found = await asyncio.gather(*(_place(one.worker.endpoint) for one in fleet))
    if not all(found):
        return {}
    names = ["" if one.excluded else one.worker.endpoint for one in fleet]
    return dict(zip(found, names, strict=True))


async def _place(endpoint: str) -> str:
    """ip:port of an endpoint, "" while its name has no address."""
    at = address.parse(endpoint)
    if at.is_ip:
        return str(at)
    loop = asyncio.get_running_loop()
    try:
        (first, *_) = await loop.getaddrinfo(at.host, at.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ""
    return str(address.Address(str(first[4][0]), at.port))
