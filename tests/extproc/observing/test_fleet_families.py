import time

from prometheus_client import generate_latest

from extproc.config.reader import parse
from extproc.fleet.workers import Workers
from extproc.observing.metrics import Metrics
from extproc.routing.claims.live_contexts import Context
from extproc.routing.health.evidence import Judge
from kvstate.fleet import FollowedWorkers

CONFIG = "models: [{name: m}]\nworkers: [{endpoint: '127.0.0.1:1'}, {endpoint: '127.0.0.1:2'}]"
ENGINE = "{endpoint: '127.0.0.1:3', engine: {name: vllm, version: '0.32.0'}}"


async def test_worker_down_is_distinct_from_a_worker_without_events() -> None:
    workers = Workers(parse(CONFIG, "c"), FollowedWorkers(12345678, lambda: 0.0), lambda _: [])
    gone = workers.upstreams.get("127.0.0.1:2")
    assert gone is not None
    workers.upstreams.eject(gone, Judge.PROBE, "is gone", 0.0)
    metrics = Metrics(workers.states)
    told = generate_latest(metrics).decode()
    assert 'kvsteer_worker_down{worker="127.0.0.1:1"} 0.0' in told
    assert 'kvsteer_worker_down{worker="127.0.0.1:2"} 1.0' in told


async def test_live_contexts_and_caches_of_workers_are_shown() -> None:
    workers = Workers(parse(CONFIG, "c"), FollowedWorkers(12345678, lambda: 0.0), lambda _: [])
    holdings = workers.candidates.holdings("127.0.0.1:1")
    holdings.capacity_tokens = 400_000
    holdings.contexts.count(time.monotonic(), Context(30_000.0, 8_000.0, 5))
    told = generate_latest(Metrics(workers.states)).decode()
    where = '{model="m",worker="127.0.0.1:1"}'
    assert f"kvsteer_live_context_tokens{where} 38000.0" in told
    assert f"kvsteer_cache_tokens{where} 400000.0" in told
    assert told.count("kvsteer_cache_tokens{") == 1


async def test_engine_of_a_worker_is_shown_with_its_release_or_as_unknown() -> None:
    config = parse(CONFIG[:-1] + f", {ENGINE}]", "c")
    workers = Workers(config, FollowedWorkers(12345678, lambda: 0.0), lambda _: [])
    told = generate_latest(Metrics(workers.states)).decode()
    name = "kvsteer_worker_engine"
    unknown = 'engine="unknown",frontend="unknown",version="unknown"'
    assert f'{name}{{{unknown},worker="127.0.0.1:1"}} 1.0' in told
    known = 'engine="vllm",frontend="python",version="0.32.0"'
    assert f'{name}{{{known},worker="127.0.0.1:3"}} 1.0' in told
