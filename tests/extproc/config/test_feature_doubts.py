"""Whether a configuration in which an optional feature does nothing is noted."""

import pytest

from extproc.config.feature_doubts import feature_doubts
from extproc.config.reader import parse

MODELS = "models: [{name: m}, {name: n, policy: random}]"
ONE_MODEL = "models: [{name: m}]"
REMOTE = "models: [{name: m, tokenizer: {remote: true}}]"
RANDOM = "policy: {name: random}"
FEED = "events: {zmq: 'tcp://a:9'}"
WORKERS = f"workers: [{{endpoint: 'a:1', transfer_port: 5, {FEED}}}, {{endpoint: 'b:1'}}]"
NO_FEEDS = "workers: [{endpoint: 'a:1', transfer_port: 5}, {endpoint: 'b:1', transfer_port: 5}]"
OF_GRPC = "workers: [{endpoint: 'a:1', events: {grpc: 'a:9'}}, {endpoint: 'b:1'}]"
DRAINED = OF_GRPC.replace("grpc: '", "drain: 'http://")
OFF = "events: {enabled: false}"
USAGE = "accounting: {responses: usage}"
TENANTS = "isolation: {{header: h, secret_file: {}, share: [{}]}}"
CLASSES = "policy: {{classes: {{header: h, default: a, of: [{{name: a}}, {{name: b{}}}]}}}}"
SIBLINGS = "policy: {{name: {}, cost: {{siblings_percent: 60}}}}"
ROUTERS = "envoy: {{routers: {{addresses: ['r:1', 'q:1'], choice: {}}}}}"
HOLD = "policy: {{name: {}, hold: {{enabled: true}}}}"
HANDED = "policy: {hand_tokens: {enabled: true}}"
MISSES = "misses: {enabled: true}"
TOLD = "misses: {enabled: true, response_headers: true}"
PULLS = "disaggregation: {connector: offloading, min_pulled_tokens: 64, price_pulls: true}"
STORE = "stores: [{{name: s, workers: ['{}']{}}}]"
PODS = "discovery: {kubernetes: {selector: a, deletion_cost: true}}"
SHARED = "sharing: {url: 'directory:/d'}"


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ([ONE_MODEL, WORKERS], []),
        ([ONE_MODEL, WORKERS, TENANTS.format("f", "")], []),
        (
            [ONE_MODEL, WORKERS, TENANTS.format("f", "m")],
            ["share: names every model"],
        ),
        ([ONE_MODEL, WORKERS, CLASSES.format(", priority: 9")], []),
        ([ONE_MODEL, WORKERS, CLASSES.format("")], ["classes.of: all have the priority 0"]),
        ([ONE_MODEL, WORKERS, SIBLINGS.format("cost")], []),
        ([MODELS, WORKERS.replace("1'", "1', model: m"), SIBLINGS.format("cost")], ["for model n"]),
        ([ONE_MODEL, WORKERS, SIBLINGS.format("random")], ["nothing with policy.name random"]),
        ([ONE_MODEL, NO_FEEDS, SIBLINGS.format("cost")], ["nothing for workers without events"]),
        (
            [ONE_MODEL, WORKERS, SIBLINGS.format("cost"), "extproc: {processes: 2}"],
            ["several extproc.processes"],
        ),
        (
            [ONE_MODEL, WORKERS, SIBLINGS.format("cost"), ROUTERS.format("any")],
            ["several envoy.routers", "2 routers in turn, which share nothing"],
        ),
        ([ONE_MODEL, WORKERS, SIBLINGS.format("cost"), ROUTERS.format("standby")], []),
        ([ONE_MODEL, WORKERS, ROUTERS.format("any")], ["2 routers in turn, which share nothing"]),
        ([ONE_MODEL, WORKERS, ROUTERS.format("any"), SHARED], []),
        ([ONE_MODEL, WORKERS, ROUTERS.format("any").replace(", 'q:1'", "")], []),
        ([ONE_MODEL, WORKERS, "policy: {name: random, hold: {bound_seconds: 90}}"], []),
        ([ONE_MODEL, WORKERS, HOLD.format("cost")], []),
        ([ONE_MODEL, WORKERS, HOLD.format("random")], ["nothing with policy.name random"]),
        ([ONE_MODEL, NO_FEEDS, HOLD.format("cost")], ["nobody waits: without events"]),
        ([ONE_MODEL, WORKERS, OFF, HOLD.format("cost")], ["nobody waits: without events"]),
        ([ONE_MODEL, WORKERS, USAGE, HANDED], ["model m, which has no tokenizer"]),
        (
            [REMOTE, WORKERS, OFF, USAGE, HANDED],
            ["nothing is handed over: without events"],
        ),
        ([REMOTE, WORKERS, USAGE, MISSES], []),
        ([REMOTE, WORKERS, USAGE, TOLD, TENANTS.format("f", "")], []),
        (
            [REMOTE, WORKERS, USAGE, TOLD, TENANTS.format("f", "m")],
            ["names every model", "prompts of m"],
        ),
        (
            [ONE_MODEL, WORKERS, OFF, MISSES],
            ["not known what workers evict", "accounting.responses: usage", "has no tokenizer"],
        ),
        ([ONE_MODEL, WORKERS, PULLS], ["1 of 2 workers have a transfer_port"]),
        ([ONE_MODEL, WORKERS, PULLS, "discovery: {file: f}"], []),
        ([ONE_MODEL, NO_FEEDS, PULLS.replace("true", "false"), RANDOM], ["without events nobody"]),
        ([ONE_MODEL, NO_FEEDS, PULLS], ["without events nobody knows"]),
        (
            [ONE_MODEL, NO_FEEDS.replace("b:1", "a:2"), PULLS, RANDOM],
            ["a:5 is that of workers[0] too", "without events", "price_pulls: changes nothing"],
        ),
        ([ONE_MODEL, WORKERS, USAGE, STORE.format("a:1", "")], []),
        ([ONE_MODEL, WORKERS, STORE.format("a:1", "")], ["without accounting.responses: usage"]),
        ([ONE_MODEL, WORKERS, USAGE, "stores: [{name: s}]"], []),
        ([ONE_MODEL, WORKERS, USAGE, STORE.format("c:1", "")], ["'c:1' is the endpoint of no"]),
        (
            [ONE_MODEL, WORKERS, USAGE, STORE.format("c:1", ""), "discovery: {file: f}"],
            [],
        ),
        ([ONE_MODEL, WORKERS, USAGE, STORE.format("b:1", "")], ["b:1 has no events"]),
        ([ONE_MODEL, OF_GRPC, USAGE, STORE.format("a:1", "")], ["over grpc do not name"]),
        (
            [ONE_MODEL, DRAINED, USAGE, STORE.format("a:1", "")],
            ["over drain do not name"],
        ),
        ([ONE_MODEL, OF_GRPC, USAGE, STORE.format("a:1", ", media: [CPU]")], []),
        ([ONE_MODEL, OF_GRPC, USAGE, STORE.format("b:1", ", zmq: 'tcp://s:1'")], []),
        (
            [ONE_MODEL, WORKERS, USAGE, OFF, RANDOM, STORE.format("a:1", "")],
            ["while events.enabled is false", "stores[0]: changes nothing with policy.name"],
        ),
        ([ONE_MODEL, PODS], []),
        ([ONE_MODEL, PODS, OFF], ["deletion_cost: without events"]),
        ([ONE_MODEL, PODS, SHARED], ["deletion_cost: set it in one router only"]),
    ],
)
def test_feature_that_would_do_nothing_is_noted(sections: list[str], words: list[str]) -> None:
    config = parse("\n".join(sections), "c")
    found = list(feature_doubts(config))
    assert len(found) == len(words), found
    assert all(one in said for one, said in zip(words, found, strict=True))
