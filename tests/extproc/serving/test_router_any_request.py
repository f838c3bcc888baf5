"""Whatever a request is, the router decides it, and its end releases what was booked."""

import asyncio
import json
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from extproc.config.reader import parse
from extproc.fleet.workers import Workers
from extproc.observing.metrics import Metrics
from extproc.requests.request import Head, RoutingRequest
from extproc.serving.router import Router
from extproc.tokenizing.tokens import Tokenizer
from kvstate.fleet import FollowedWorkers
from kvtools.simulator.settings import TINY_MODEL

ENDPOINTS = ("127.0.0.1:1", "127.0.0.1:2")
CONFIG = parse(
    f"""
extproc: {{deadline_ms: 60000}}
envoy: {{message_timeout_ms: 60001}}
models: [{{name: tiny, tokenizer: "{TINY_MODEL}"}}, {{name: bare}}]
workers: [{{endpoint: "{ENDPOINTS[0]}", model: tiny}}, {{endpoint: "{ENDPOINTS[1]}", model: bare}}]
""",
    "c",
)
TOKENIZER = Tokenizer.load(CONFIG.models[0])
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/generate")

texts = st.text(max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
objects = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(["tiny", "bare", "nobody", "\ud800"]) | json_values,
        "messages": st.just([{"role": "user", "content": "hello"}]) | json_values,
        "prompt": st.lists(st.integers(-1, 2**33), max_size=5) | json_values,
        "max_tokens": json_values,
        "cache_salt": json_values,
        "stream": json_values,
    },
)
bodies = st.none() | st.binary(max_size=50) | objects.map(lambda one: json.dumps(one).encode())
heads = st.builds(
    Head,
    method=st.sampled_from(["POST", "GET"]) | texts,
    path=st.sampled_from(PATHS) | texts,
    content_length=st.none() | st.integers(-1, 2**70),
    policy=st.none() | st.sampled_from(["random", "cost"]) | texts,
    subset=st.none() | st.frozensets(st.sampled_from(ENDPOINTS) | texts, max_size=3),
    session=texts,
    conversation=texts,
)
asks = st.builds(
    RoutingRequest,
    heads,
    bodies,
    proxy_finds_model=st.booleans(),
    wants_endpoint=st.booleans(),
)


async def placed(request: RoutingRequest, percent: float) -> tuple[Any, dict[str, int]]:
    """The decision for a request, and what is in flight after its end."""
    assert TOKENIZER is not None
    workers = Workers(CONFIG, FollowedWorkers(12345678, lambda: 0.0), lambda _: [])
    await workers.start()
    router = Router(CONFIG, workers, {"tiny": TOKENIZER}, Metrics(workers.states), Random(0))
    router.steering.change(percent)
    try:
        decision, ticket = await router.route(request)
        if ticket is not None:
            router.release(ticket)
        return decision, {endpoint: router.in_flight(endpoint) for endpoint in ENDPOINTS}
    finally:
        router.close()
        await workers.close()


@given(asks, st.sampled_from([0.0, 50.0, 100.0]))
def test_route_decides_any_request_and_leaves_no_load_behind(
    request: RoutingRequest, percent: float
) -> None:
    decision, in_flight = asyncio.run(placed(request, percent))
    assert set(decision.pick) <= set(ENDPOINTS)
    assert in_flight == dict.fromkeys(ENDPOINTS, 0)
    assert decision.reason.replace("_", "").isalnum()
