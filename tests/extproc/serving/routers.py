"""A router with workers that do not exist: decisions are real, requests go nowhere."""

from collections.abc import Callable
from random import Random
from typing import Any

from prometheus_client import generate_latest

from extproc.config.reader import parse
from extproc.config.schema import Config
from extproc.features.feature import AskForTime, Feature
from extproc.fleet.workers import Workers
from extproc.observing.metrics import Metrics
from extproc.observing.outcomes import Outcome
from extproc.requests.request import RoutingRequest
from extproc.routing.decision import Decision
from extproc.routing.inputs.query import Query
from extproc.routing.load.endpoint_load import Ticket
from extproc.serving.asking_exchange import service_of
from extproc.serving.exchange import Service
from extproc.serving.router import Routed, Router, no_more_time
from kvstate.fleet import FollowedWorkers

FIRST, SECOND = "10.0.0.1:1", "10.0.0.2:1"


class Seen(Feature):
    """Records what a router tells its features. ends: of each, whether the request was placed."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.served_by: list[str] = []
        self.ends: list[bool] = []

    def begin(self, _: RoutingRequest, __: Query, decision: Decision, ___: float) -> None:
        self.decisions.append(decision)

    def note_server(self, _: Decision, endpoint: str) -> None:
        self.served_by.append(endpoint)

    def note_end(self, _: Decision, __: Outcome | None, *, is_booked: bool, is_sent: bool) -> None:
        self.ends.append(is_sent)


class Failing(Router):
    """A router that fails as nobody foresaw, where a test says so.

    fault: raised by whatever is in `fails`: routing, or noting that another worker answered.
    """

    fault: Exception = RuntimeError("nobody foresaw this")
    fails: str = ""

    async def route(
        self,
        request: RoutingRequest,
        traceparent: str = "",
        ask_for_time: AskForTime = no_more_time,
    ) -> Routed:
        if self.fails == "route":
            raise self.fault
        return await super().route(request, traceparent, ask_for_time)

    def note_answer_elsewhere(self, *told: Any) -> Any:
        if self.fails == "note_answer_elsewhere":
            raise self.fault
        return super().note_answer_elsewhere(*told)


class Books(Failing):
    """A router that counts released bookings, and records the events that it shows.

    routed: called when a request is routed, before that is known to its stream.
    """

    released = 0
    routed: Callable[[], None] | None = None

    async def route(
        self,
        request: RoutingRequest,
        traceparent: str = "",
        ask_for_time: AskForTime = no_more_time,
    ) -> Routed:
        made = await super().route(request, traceparent, ask_for_time)
        if self.routed is not None:
            self.routed()
        return made

    def __init__(self, config: Config, workers: Workers, metrics: Metrics) -> None:
        self.seen, self.workers = Seen(), workers
        super().__init__(config, workers, {}, metrics, Random(0), features=[self.seen])

    def release(self, ticket: Ticket) -> None:
        self.released += 1
        super().release(ticket)


def service(extra: str = "", *endpoints: str) -> Service:
    """What a server's streams share; workers FIRST and SECOND unless others are named.

    extra: sections of the configuration.
    """
    listed = ", ".join(f"{{endpoint: '{one}'}}" for one in endpoints or (FIRST, SECOND))
    return of(f"models: [{{name: m}}]\nworkers: [{listed}]\n{extra}")


def of(text: str) -> Service:
    """The same, for a whole configuration."""
    config = parse(text, "test")
    workers = Workers(config, FollowedWorkers(12345678, lambda: 0.0), lambda _: [])
    metrics = Metrics(workers.states)
    return service_of(config, Books(config, workers, metrics), metrics)


def books(one: Service) -> Books:
    """The router of these services."""
    assert isinstance(one.router, Books)
    return one.router


def released(one: Service) -> int:
    """How often a request's load was released."""
    return books(one).released


def seen(one: Service) -> Seen:
    """The events that the router showed."""
    return books(one).seen


def fleet(one: Service) -> Workers:
    """The workers."""
    return books(one).workers


def in_flight(one: Service) -> int:
    """Requests under way on all workers."""
    return sum(one.router.in_flight(endpoint) for endpoint in (FIRST, SECOND))


def counted(one: Service, line: str) -> float:
    """The value of one metric, named with its labels; 0 if it is absent."""
    for shown in generate_latest(one.metrics).decode().splitlines():
        name, _, value = shown.rpartition(" ")
        if name == line:
            return float(value)
    return 0.0
