"""Requests that wait inside the router, on a real event loop."""

import asyncio
import itertools
from collections.abc import Iterator
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from extproc.config.reader import parse
from extproc.features.feature import Wait
from extproc.features.holding import holding
from extproc.features.holding.hold import BRIEF_SECONDS
from extproc.features.holding.holding import LOOK_SECONDS, Holding, LatestRecords, records_of
from extproc.fleet.workers import Workers
from extproc.requests.request import PLAIN_REQUEST
from kvstate.fleet import FollowedWorkers
from tests.extproc.features.holding.fleets import BOUND, HeldFleet
from tests.extproc.features.holding.test_hold import first
from tests.extproc.serving.routers import of
from tests.waiting import until

ASKED = BOUND + 10.0


class Gate:
    """A full fleet, and the feature in front of it. asked: the times for which it asked."""

    def __init__(self, most: int = 100, *, tenants: bool = False) -> None:
        self.fleet = HeldFleet(most=most)
        self.fleet.fill()
        self.feature = Holding(self.fleet.hold, ASKED, lambda: self.fleet.now, tenants=tenants)
        self.asked: list[float] = []
        self.request = PLAIN_REQUEST

    def wait_of(self, number: int) -> Wait:
        decision = self.fleet.decide(first(number))
        wait = self.feature.must_wait(self.request, decision, self.fleet.now)
        assert wait is not None
        return wait

    def grant(self, seconds: float) -> bool:
        self.asked.append(seconds)
        return True

    def begin(self, number: int) -> "asyncio.Task[bool]":
        return asyncio.create_task(self.wait_of(number).end(self.grant))

    def shown(self) -> Iterator[str]:
        registry = CollectorRegistry()
        for one in self.feature.collectors():
            registry.register(one)
        lines = generate_latest(registry).decode().splitlines()
        return (line for line in lines if line.startswith("kvsteer_hold") and "bucket" not in line)


async def test_request_waits_until_there_is_room_and_goes_on() -> None:
    gate = Gate()
    waiting = gate.begin(1)
    await until(lambda: gate.asked == [ASKED])
    assert not waiting.done()
    gate.fleet.is_known = False
    gate.fleet.now += BRIEF_SECONDS
    assert await waiting
    assert 'kvsteer_holds_total{model="m",outcome="let_in"} 1.0' in gate.shown()


async def test_request_is_refused_at_the_bound_after_one_that_went_on() -> None:
    gate = Gate()
    waits = [gate.begin(number) for number in (1, 2)]
    await until(lambda: len(gate.asked) == 2)
    gate.fleet.now += BOUND
    assert await asyncio.gather(*waits) == [True, False]
    shown = list(gate.shown())
    assert 'kvsteer_holds_total{model="m",outcome="refused"} 1.0' in shown
    assert f'kvsteer_hold_seconds_sum{{model="m"}} {2.0 * BOUND}' in shown


async def test_client_that_leaves_keeps_its_place() -> None:
    gate = Gate()
    waiting = gate.begin(1)
    await until(lambda: bool(gate.asked))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (gate.fleet.hold.waiting(), len(gate.fleet.hold)) == ({"m": 0}, 1)
    assert 'kvsteer_holds_total{model="m",outcome="left"} 1.0' in gate.shown()


async def test_call_that_ends_before_its_task_is_made_leaves_the_line() -> None:
    gate = Gate()
    begun = gate.wait_of(1).end(gate.grant)
    begun.send(None)
    begun.close()
    assert (gate.fleet.hold.waiting(), len(gate.fleet.hold)) == ({"m": 0}, 1)


async def test_request_goes_on_if_the_proxy_does_not_wait() -> None:
    gate = Gate()
    assert await gate.wait_of(1).end(lambda _: False)
    assert len(gate.fleet.hold) == 0
    assert list(gate.shown()) == ['kvsteer_holds_total{model="m",outcome="unheld"} 1.0']


async def test_request_whose_proxy_cannot_be_asked_leaves_nobody_in_the_line() -> None:
    gate = Gate()
    with pytest.raises(ZeroDivisionError):
        await gate.wait_of(1).end(lambda _: 1 // 0 > 0)
    assert (gate.fleet.hold.waiting(), len(gate.fleet.hold)) == ({"m": 0}, 0)


async def test_request_without_a_place_is_refused_at_once() -> None:
    gate = Gate(most=0)
    assert not await gate.wait_of(1).end(gate.grant)
    assert gate.asked == []


async def test_bodies_of_those_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extproc.features.holding.holding.MOST_BYTES", 150)
    gate = Gate()
    gate.request = msgspec.structs.replace(PLAIN_REQUEST, body=bytes(100))
    waiting = gate.begin(1)
    await until(lambda: bool(gate.asked))
    assert not await gate.wait_of(2).end(gate.grant)
    gate.fleet.is_known = False
    gate.fleet.now += BRIEF_SECONDS
    assert await waiting
    gate.fleet.is_known = True
    again = gate.begin(2)
    await until(lambda: len(gate.asked) == 2)
    again.cancel()


async def test_bodies_of_one_tenant_take_half_of_what_may_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("extproc.features.holding.holding.MOST_BYTES", 300)
    gate = Gate(tenants=True)
    gate.request = msgspec.structs.replace(PLAIN_REQUEST, body=bytes(100))
    waiting = gate.begin(1)
    await until(lambda: bool(gate.asked))
    assert not await gate.wait_of(2).end(gate.grant)
    waiting.cancel()


async def test_those_that_wait_go_on_in_order_when_the_router_stops() -> None:
    gate, order = Gate(), list[int]()
    waits = [gate.begin(number) for number in range(8)]
    for number, wait in enumerate(waits):
        wait.add_done_callback(lambda _, number=number: order.append(number))  # type: ignore[misc]
    await until(lambda: len(gate.asked) == 8)
    gate.feature.note_stop(1.0)
    assert gate.feature.must_wait(gate.request, gate.fleet.decide(first(9)), 0.0) is None
    await until(lambda: len(order) > 0, "the first goes on")
    assert len(order) < 8
    gate.fleet.now += 1.0
    assert await asyncio.gather(*waits) == [True] * 8
    assert order == list(range(8))
    assert 'kvsteer_holds_total{model="m",outcome="placed"} 8.0' in gate.shown()


async def test_error_ends_all_waits_so_that_requests_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate()
    waits = [gate.begin(number) for number in (1, 2)]
    await until(lambda: len(gate.asked) == 2)
    monkeypatch.setattr(gate.fleet.hold, "step", lambda _: 1 / 0)
    assert await asyncio.gather(*waits) == [True, True]
    assert len(gate.fleet.hold) == 0


CONFIG = """
models: [{name: m}]
workers: [{endpoint: '127.0.0.1:1'}, {endpoint: '127.0.0.1:2'}]
"""


async def test_records_are_those_of_workers_that_are_up_and_live() -> None:
    workers = Workers(parse(CONFIG, "c"), FollowedWorkers(12345678, lambda: 0.0), lambda _: [])
    assert records_of(workers, "m") is None
    assert records_of(workers, "unknown") is None


@given(st.lists(st.floats(0.0, 3 * LOOK_SECONDS), max_size=30))
def test_workers_that_may_answer_are_those_of_a_moment_ago_at_most(passed: list[float]) -> None:
    now, looked = [100.0], list[float]()
    workers = Workers(parse(CONFIG, "c"), FollowedWorkers(12345678, lambda: 0.0), lambda _: [])
    workers.monotonic = lambda: now[0]
    latest = LatestRecords(workers)
    with patch.object(holding, "records_of", lambda *_: looked.append(now[0])):
        for seconds in passed:
            now[0] += seconds
            latest("m")
            assert now[0] - looked[-1] < LOOK_SECONDS
    assert all(after - before >= LOOK_SECONDS for before, after in itertools.pairwise(looked))


def test_feature_is_made_only_if_it_is_enabled() -> None:
    enabled = of(CONFIG + "policy: {hold: {enabled: true}}")
    disabled = of(CONFIG)
    assert enabled.hooks.must_wait
    assert not disabled.hooks.must_wait
    for one in (enabled, disabled):
        one.router.close()
