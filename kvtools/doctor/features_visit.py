"""Asks the running router what it saw of optional features, and looks at the ports of stores."""

import asyncio
from collections.abc import Iterator

from extproc.base import address
from kvtools.doctor.feature_figures import STORES, figures_in, judge_figures
from kvtools.doctor.feed_visit import NULL, PUBLISHERS, Greeting, greet
from kvtools.doctor.findings import Finding, Subject
from kvtools.doctor.steering_visit import local
from kvtools.doctor.worker_visit import Answer, VisitTools


def is_asked(tools: VisitTools) -> bool:
    """Returns whether any feature is on about which the router can tell something."""
    config = tools.config
    priced = config.disaggregation.price_pulls
    return bool(config.isolation or config.policy.classes or priced or config.stores)


async def visit(tools: VisitTools) -> list[Finding]:
    """Returns the findings; none without such features, or about a router that does not answer."""
    if not is_asked(tools):
        return []
    config, get = tools.config, tools.web.get
    workers, metrics, *ports = await asyncio.gather(
        get(f"http://{local(config.admin.listen)}/workers"),
        get(f"http://{local(config.metrics.listen)}/metrics"),
        *(_port(one.name, one.zmq, tools.seconds) for one in config.stores if one.zmq),
    )
    assert isinstance(workers, Answer)
    assert isinstance(metrics, Answer)
    bodies = [one.body if one.is_ok else b"" for one in (workers, metrics)]
    found = list(judge_figures(config, figures_in(*bodies)))
    return [*found, *(one for one in ports if isinstance(one, Finding))]


async def _port(name: str, endpoint: str, seconds: float) -> Finding:
    greeting = await greet(address.parse_tcp(endpoint), seconds)
    return judge_port(Subject(f"store {name}"), endpoint, greeting)


def judge_port(about: Subject, endpoint: str, greeting: Greeting) -> Finding:
    """Returns whether a store publishes at an endpoint. greeting: what answered there."""
    fault = next(_faults(greeting), "")
    if fault:
        return about.wrong("store-port", f"{endpoint}: {fault}")
    return about.right(STORES, f"{endpoint} is a ZMQ publisher")


def _faults(greeting: Greeting) -> Iterator[str]:
    if greeting.reason:
        yield greeting.reason
    elif not greeting.is_zmq:
        yield greeting.fault
    elif greeting.mechanism != NULL:
        yield f"requires ZMQ's {greeting.mechanism}"
    elif greeting.socket and greeting.socket not in PUBLISHERS:
        yield f"is a {greeting.socket} socket, not a publisher"
