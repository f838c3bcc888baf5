"""Random sequences of what may happen to an exchange, in any order that a server can produce."""

import json
from collections import Counter
from collections.abc import Coroutine
from itertools import pairwise
from random import Random
from types import coroutine
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import ProtocolError
from extproc.config.reader import parse
from extproc.config.schema import Config
from extproc.features.feature import AskForTime, Feature
from extproc.fleet.workers import Workers
from extproc.observing.metrics import Metrics
from extproc.observing.outcomes import Outcome
from extproc.pb.kvsteer_ext_proc_pb2 import HttpBody, ProcessingRequest
from extproc.requests.request import RoutingRequest
from extproc.routing.decision import Decision
from extproc.routing.inputs.query import Query
from extproc.routing.load.endpoint_load import Ticket
from extproc.serving.exchange import MAY_FOLLOW, Exchange, Phase, Service
from extproc.serving.router import Routed, Router, no_more_time
from kvstate.fleet import FollowedWorkers
from tests.extproc.messages import body, head, read, response_head, trailers

PROMPT = json.dumps({"model": "m", "prompt": list(range(64))}).encode()
JSON = {"content-type": "application/json"}
PIECE = ProcessingRequest(response_body=HttpBody(body=b'{"usage": {"prompt_tokens": 64}}'))


class Ledger(Feature):
    """A feature that counts how often each decision began and ended."""

    def __init__(self) -> None:
        self.begun: Counter[int] = Counter()
        self.over: Counter[int] = Counter()
        self.kept: list[Decision] = []

    def begin(self, _: RoutingRequest, __: Query, decision: Decision, ___: float) -> None:
        self.kept.append(decision)  # so that its identity stays its own
        self.begun[id(decision)] += 1

    def note_end(
        self, decision: Decision, _: Outcome | None, *, is_booked: bool, is_sent: bool
    ) -> None:
        self.over[id(decision)] += 1


class Waiting(Router):
    """A router that waits in the middle of a request if asked to, and notes what it books."""

    waits = 0
    fails = False

    def __init__(self, config: Config, workers: Workers, metrics: Metrics, ledger: Ledger) -> None:
        super().__init__(config, workers, {}, metrics, Random(0), features=[ledger])
        self.booked: list[Ticket] = []
        self.released: Counter[Ticket] = Counter()

    async def route(
        self,
        request: RoutingRequest,
        traceparent: str = "",
        ask_for_time: AskForTime = no_more_time,
    ) -> Routed:
        for _ in range(self.waits):
            ask_for_time(1.0)
            await once()
        if self.fails:
            raise RuntimeError("a fault of ours")
        decision, ticket = await super().route(request, traceparent, ask_for_time)
        if ticket is not None:
            self.booked.append(ticket)
        return decision, ticket

    def release(self, ticket: Ticket) -> None:
        self.released[ticket] += 1
        super().release(ticket)


@coroutine
def once() -> Any:
    """Waits until the coroutine is driven on."""
    yield None


class Setting(NamedTuple):
    """What decides how a request is treated: the configuration, and the proxy's first message."""

    extra: str
    mode: int | None
    path: str
    waits: int
    fails: bool


FLEET = """\
models: [{name: m}]
workers: [{endpoint: "10.0.0.1:1"}, {endpoint: "10.0.0.2:1"}]
"""
EXTRAS = (
    "", "accounting: {responses: usage}", "accounting: {responses: headers}",
    "steering: {percent: 0}", "policy: {refuse: true}",
    "disaggregation: {mode: mirror, connector: sglang}",
)  # fmt: skip
SETTINGS = st.builds(
    Setting,
    st.sampled_from(EXTRAS),
    st.sampled_from([None, 0, 2, 4]),
    st.sampled_from(["/v1/completions", "/v1/models", "/unknown", "/v1/audio/speech"]),
    st.integers(0, 1),
    st.sampled_from([False, False, False, True]),
)
EVENTS = st.lists(
    st.sampled_from(
        ["head", "body", "part", "bad", "trailers", "status", "error", "served", "piece", "close"]
    ),
    max_size=9,
)


def message(event: str, setting: Setting) -> ProcessingRequest:
    """Returns the message of an event."""
    if event == "head":
        return head(setting.path, mode=setting.mode)
    if event in ("body", "part", "bad"):
        return body(b"[]" if event == "bad" else PROMPT, end_of_stream=event != "part")
    if event in ("status", "served"):
        return response_head(200, JSON)
    return {"trailers": trailers(), "error": response_head(503, JSON), "piece": PIECE}[event]


def opened(setting: Setting) -> tuple[Service, Waiting, Ledger]:
    """Returns a service with two workers that do not exist."""
    config = parse(FLEET + setting.extra, "test")
    workers = Workers(config, FollowedWorkers(1, lambda: 0.0), lambda _: [])
    metrics, ledger = Metrics(workers.states), Ledger()
    router = Waiting(config, workers, metrics, ledger)
    router.waits, router.fails = setting.waits, setting.fails
    return Service(config, router, metrics), router, ledger


def driven(exchange: Exchange, one: Coroutine[Any, Any, Any], *, closes: bool) -> None:
    """Drives what the exchange does with a message; closes it in the middle, if it waits."""
    try:
        while True:
            one.send(None)
            if closes:
                exchange.close()
    except StopIteration:
        return


@pytest.mark.parametrize("closes", [False, True])
@given(setting=SETTINGS, events=EVENTS, leading=st.booleans())
def test_exchange_ends_everything_once_whatever_comes(
    *,
    closes: bool,
    setting: Setting,
    events: list[str],
    leading: bool,
) -> None:
    service, router, ledger = opened(setting)
    exchange = service.open()
    seen = [exchange.phase]
    try:
        for event in ["head", "body", *events] if leading else events:
            if event == "close" or exchange.phase is Phase.CLOSED:
                break
            driven(exchange, exchange.receive(read(message(event, setting))), closes=closes)
            seen.append(exchange.phase)
    except (ProtocolError, RuntimeError):
        pass  # the server ends the stream
    finally:
        router.close()
    seen.append(exchange.phase)
    exchange.close()
    exchange.close()
    assert exchange.phase is Phase.CLOSED
    assert all(after in reachable(before) for before, after in pairwise(seen))
    assert router.released == Counter(dict.fromkeys(router.booked, 1))
    # a request that calls no model is never shown to the recorder
    assert {one: ledger.over[one] for one in ledger.begun} == ledger.begun
    assert service.metrics.open_streams == 0
    assert router.ledger.loads.in_flight("10.0.0.1:1") == 0
    assert sum(router.deliveries.looked_at.values()) == router.deliveries.results.total()


def reachable(phase: Phase) -> set[Phase]:
    """Returns the phases that may follow one at once or later, and itself."""
    found, waiting = {phase}, [phase]
    while waiting:
        new = MAY_FOLLOW[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def test_exchange_is_closed_for_ever() -> None:
    assert not MAY_FOLLOW[Phase.CLOSED]
    assert all(Phase.CLOSED in reachable(phase) for phase in Phase)
