"""The cost of metrics: decisions with all of them, compared with decisions that are not counted."""

import asyncio
import json
import math
import time
from collections.abc import Coroutine, Sequence
from random import Random
from typing import Any, cast

import yaml
from extproc_load import MARK, conversations
from extproc_parts import TINY_MODEL
from measure import Cost, Figure, Goal, Row, interleave, timed

from extproc.config.reader import parse
from extproc.fleet.workers import Workers
from extproc.observing.decisions import BATCH, DecisionCounts, Timeline
from extproc.observing.metrics import Metrics
from extproc.requests.request import Head, RoutingRequest
from extproc.routing.decision import Decision
from extproc.serving.router import Routed, Router
from extproc.tokenizing.tokens import Tokenizer
from kvstate.fleet import FollowedWorkers

# A round counts the same number of batches as every other.
DECISIONS = 2 * BATCH
WORKERS = 8
SIZE = 2
LEAST_GOAL = Goal(2.0, "<= 2 us", of_ratio=False)

CHAT = Head("POST", "/v1/chat/completions", None)
CONFIGURATION = {
    "models": [{"name": "tiny", "tokenizer": str(TINY_MODEL)}],
    "workers": [{"endpoint": f"127.0.0.1:{port}"} for port in range(1, WORKERS + 1)],
}


class _Silent(Metrics):
    """Metrics that count no decision."""

    def observe_decision(self, decision: Decision, timeline: Timeline) -> None:
        pass

    def count_question(self, model: str, outcome: str) -> None:
        pass


def metrics_row(rounds: int) -> Row:
    """Returns the row for a decision's CPU, with all metrics and not counted."""
    return asyncio.run(_measured(rounds))


def least_row(rounds: int) -> Row:
    """Returns the row for the CPU of only a decision's metrics: its clocks and its counters."""
    made = asyncio.run(_decision())
    counts, clock = DecisionCounts(), time.monotonic

    def observed() -> Cost:
        with timed() as cost:
            for _ in range(DECISIONS):
                timeline = Timeline(clock, clock(), "", "/v1/chat/completions")
                timeline.parsed_at = timeline.clock()
                timeline.tokenized_at = timeline.clock()
                timeline.looked_at = timeline.clock()
                timeline.picked_at = timeline.clock()
                counts.note(made, timeline)
        return cost

    def timed_only() -> Cost:
        with timed() as cost:
            for _ in range(DECISIONS):
                clock()  # a decision itself needs the time twice
                clock()
        return cost

    costs = interleave(rounds, {"all": observed, "needed": timed_only})
    each = 1e6 / DECISIONS
    pairs = zip(costs["all"], costs["needed"], strict=True)
    figure = Figure([(one.cpu - other.cpu) * each for one, other in pairs])
    return Row("metrics of a decision, alone (us)", figure, Figure([1.0]), LEAST_GOAL)


async def _decision() -> Decision:
    """Returns any decision."""
    workers = await _workers()
    router = _router(workers, _Silent(workers.states))
    request = json.dumps(conversations(SIZE)[0]).encode()
    decision, _ = await router.route(RoutingRequest(CHAT, request))
    router.close()
    return decision


async def _measured(rounds: int) -> Row:
    fleets = [await _workers() for _ in range(2)]
    counting, silent = Metrics(fleets[0].states), _Silent(fleets[1].states)
    routers = [
        (metrics, _router(workers, metrics))
        for workers, metrics in zip(fleets, (counting, silent), strict=True)
    ]
    texts = [json.dumps(request) for request in conversations(SIZE)]
    numbers = iter(range(100_000_000, 999_999_999))

    def asks() -> Sequence[RoutingRequest]:
        chosen = (texts[number % len(texts)] for number in range(DECISIONS))
        return [
            RoutingRequest(CHAT, text.replace(MARK, str(next(numbers))).encode()) for text in chosen
        ]

    def one_round(metrics: Any, router: Router) -> Cost:
        requests = asks()
        with timed() as cost:
            for ask in requests:
                metrics.open_streams += 1
                _, ticket = _at_once(router.route(ask))
                if ticket is not None:
                    router.release(ticket)
                metrics.open_streams -= 1
        return cost

    for _, router in routers:  # what comes first may wait: templates, proofs of encoders
        for ask in asks():
            _, ticket = await router.route(ask)
            if ticket is not None:
                router.release(ticket)
    costs = interleave(
        rounds,
        {
            "with": lambda: one_round(*routers[0]),
            "without": lambda: one_round(*routers[1]),
        },
    )
    for _, router in routers:
        router.close()
    each = 1e6 / DECISIONS
    figures = [Figure([one.cpu * each for one in costs[name]]) for name in ("with", "without")]
    what = f"decision, {SIZE} KB chat, with all metrics / not counted (us)"
    return Row(what, figures[0], figures[1])


def _at_once(routing: Coroutine[Any, Any, Routed]) -> Routed:
    """Returns the decision, which must not wait."""
    try:
        routing.send(None)
    except StopIteration as done:
        return cast("Routed", done.value)
    raise AssertionError("the decision was not made at once")


async def _workers() -> Workers:
    config = parse(yaml.safe_dump(CONFIGURATION), "benchmark")
    workers = Workers(config, FollowedWorkers(1, lambda: 0.0), lambda _: [])
    await workers.start()
    return workers


def _router(workers: Workers, metrics: Metrics) -> Router:
    config = parse(yaml.safe_dump(CONFIGURATION), "benchmark")
    tokenizer = Tokenizer.load(config.models[0])
    assert tokenizer is not None
    router = Router(config, workers, {"tiny": tokenizer}, metrics, Random(1))
    # or a busy machine would have threads tokenize
    router.tokens._inline_seconds = math.inf  # noqa: SLF001 - the router has no such setting
    return router
