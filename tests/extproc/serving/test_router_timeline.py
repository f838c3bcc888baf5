"""What a router measures of a request on its way, and passes to the recorder."""

import json
import re
from collections.abc import AsyncIterator
from random import Random

import pytest
from prometheus_client import generate_latest

from extproc.config.reader import parse
from extproc.fleet.workers import Workers
from extproc.observing.decisions import Timeline, TraceContext
from extproc.observing.metrics import Metrics
from extproc.requests.costly_json import INLINE_BYTES
from extproc.requests.request import Head, RoutingRequest
from extproc.routing.decision import Decision
from extproc.serving.router import Router
from extproc.tokenizing.tokens import Tokenizer
from kvstate.fleet import FollowedWorkers
from kvtools.simulator.settings import TINY_MODEL

CHAT = Head("POST", "/v1/chat/completions", None)
CONFIG = f"""
models: [{{name: tiny, tokenizer: "{TINY_MODEL}"}}]
workers: [{{endpoint: "127.0.0.1:1"}}]
log: {{decisions_percent: 100}}
extproc: {{deadline_ms: 60000}}
envoy: {{message_timeout_ms: 60001}}
"""
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


class Recorder:
    """Keeps the courses that it is given."""

    def __init__(self) -> None:
        self.courses: list[Timeline] = []

    def record(self, _: Decision, timeline: Timeline) -> TraceContext:
        self.courses.append(timeline)
        return TraceContext(TRACE, is_sampled=True)


@pytest.fixture
def workers() -> Workers:
    return Workers(parse(CONFIG, "c"), FollowedWorkers(12345678, lambda: 0.0), lambda _: [])


@pytest.fixture
def metrics(workers: Workers) -> Metrics:
    return Metrics(workers.states)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
async def router(workers: Workers, metrics: Metrics, recorder: Recorder) -> AsyncIterator[Router]:
    config = parse(CONFIG, "c")
    tokenizer = Tokenizer.load(config.models[0])
    assert tokenizer is not None
    await workers.start()
    one = Router(config, workers, {"tiny": tokenizer}, metrics, Random(0), traces=recorder)
    yield one
    one.close()
    await workers.close()


def chat(text: str) -> RoutingRequest:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
    return RoutingRequest(CHAT, json.dumps(body).encode())


def phases_of(recorder: Recorder) -> list[str]:
    return [phase for phase, _, _ in recorder.courses[-1].phases()]


@pytest.mark.parametrize("text", ["hello", "word " * INLINE_BYTES])
async def test_route_times_every_phase_of_a_decision(
    router: Router, recorder: Recorder, metrics: Metrics, text: str
) -> None:
    await router.route(chat(text))
    assert phases_of(recorder) == ["parse", "tokens", "lookup", "pick"]
    counts = re.findall(
        rb'kvsteer_phase_seconds_count{phase="(\w+)"} 1.0', generate_latest(metrics)
    )
    assert counts == [b"parse", b"tokens", b"lookup", b"pick"]


async def test_route_of_a_request_without_a_prompt_times_the_pick_only(
    router: Router, recorder: Recorder
) -> None:
    await router.route(RoutingRequest(CHAT, None, "no_body"))
    assert phases_of(recorder) == ["pick"]


async def test_route_of_an_unreadable_body_times_its_parsing(
    router: Router, recorder: Recorder
) -> None:
    await router.route(RoutingRequest(CHAT, b"{"))
    assert phases_of(recorder) == ["parse", "pick"]


async def test_route_records_a_decision_with_the_trace_of_its_request(
    router: Router, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG", "kvsteer"):
        await router.route(chat("hello"), "the parent")
    assert recorder.courses[-1].traceparent == "the parent"
    assert {getattr(one, "trace_id", None) for one in caplog.records} >= {TRACE}
    assert any(f'"trace_id":"{TRACE}"' in line for line in caplog.messages)


async def test_explain_records_no_decision(router: Router, recorder: Recorder) -> None:
    await router.explain(CHAT, b"{}")
    assert recorder.courses == []
