"""Shared stores, from the recorded events of two vLLM engines to the pick."""

import base64
import json
from pathlib import Path
from random import Random
from typing import Any

from prometheus_client import generate_latest

from extproc.config.reader import parse
from extproc.features.fetching.stores import store_rules
from extproc.features.hooks import tell
from extproc.fleet.workers import Workers
from extproc.observing.metrics import Metrics
from extproc.observing.outcomes import Account
from extproc.requests.request import Head, RoutingRequest
from extproc.serving.router import Router
from kvstate.events import Batch
from kvstate.feeds.transport import Connected
from kvstate.fleet import FollowedWorkers
from tests.memory_transport import MemoryTransport
from tests.waiting import until

RECORDED = Path(__file__).parents[2] / "kvstate" / "stores" / "vllm_0.32.0_full.jsonl"
HEAD = Head("POST", "/v1/completions", None)
CONFIG = """
models: [{name: m}]
workers:
- {endpoint: "127.0.0.1:1", events: {zmq: "tcp://127.0.0.1:7"}}
- {endpoint: "127.0.0.1:2", events: {zmq: "tcp://127.0.0.1:8"}}
- {endpoint: "127.0.0.1:3", events: {zmq: "tcp://127.0.0.1:9"}}
accounting: {responses: usage}
stores: [{name: files, workers: ["127.0.0.1:1", "127.0.0.1:3"], worth_percent: 90}]
"""

NOTHING_CACHED = json.dumps(
    {"usage": {"prompt_tokens": 300, "prompt_tokens_details": {"cached_tokens": 0}}}
).encode()


def of_worker(name: str) -> list[dict[str, Any]]:
    records = map(json.loads, RECORDED.read_text().splitlines())
    return [one for one in records if one["kind"] == "frame" and one["worker"] == name]


async def test_idle_worker_that_mounts_the_store_is_picked_over_a_busy_holder() -> None:
    config, feeds = parse(CONFIG, "c"), [MemoryTransport() for _ in range(3)]
    opened = iter(feeds)
    fleet = FollowedWorkers(12345678, lambda: 0.0, stores=store_rules(config.stores))
    workers = Workers(config, fleet, lambda _: [next(opened)])
    await workers.start()
    metrics = Metrics(workers.states)
    router = Router(config, workers, {}, metrics, Random(0))
    frames = of_worker("a")[:3]
    for feed in feeds:
        feed.put(Connected())
    for frame in frames:
        feeds[0].put(Batch(frame["seq"], base64.b64decode(frame["payload_b64"])))
    body = json.dumps({"model": "m", "prompt": frames[0]["prompt_token_ids"]}).encode()
    await until(lambda: dict(workers.followed.stores.blocks()) == {"files": 16})
    assert (await router.route(RoutingRequest(HEAD, body)))[0].worker == "127.0.0.1:1"
    workers.loads.begin("127.0.0.1:1", 2_000.0, workers.monotonic())
    shown = await router.explain(HEAD, body)
    fetches = {one["name"]: one["fetch"] for one in shown["candidates"]}
    loaded = {"tokens": 256, "value": 230, "from": "files", "share": 1.0}
    assert fetches == {"127.0.0.1:1": None, "127.0.0.1:2": None, "127.0.0.1:3": loaded}
    assert shown["pick"][0] == "127.0.0.1:3"
    assert shown["source"] is None
    assert 'kvsteer_store_blocks{store="files"} 16.0' in generate_latest(metrics.registry).decode()
    mounts = {one["name"]: one["store"] for one in workers.states.statuses()}
    assert mounts == {"127.0.0.1:1": "files", "127.0.0.1:2": None, "127.0.0.1:3": "files"}
    decision, ticket = await router.route(RoutingRequest(HEAD, body))
    assert ticket is not None
    account = Account(decision, ticket.compared, 0.0)
    account.read(NOTHING_CACHED, 0.0, is_last=True)
    tell(router.hooks.note_end, decision, account.outcome(), is_booked=True, is_sent=True)
    router.release(ticket)
    shares = {one["name"]: one["store_share"] for one in workers.states.statuses()}
    nothing = {"share": 0.987, "offered_tokens": 256, "loaded_tokens": 0}
    assert shares == {"127.0.0.1:1": None, "127.0.0.1:2": None, "127.0.0.1:3": nothing}
    router.close()
    await workers.close()
    await fleet.close()
