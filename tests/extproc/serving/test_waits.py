"""Requests that a feature has wait before they are booked."""

import asyncio
import json
from collections.abc import Iterator

import pytest

from extproc.features.feature import AskForTime, Feature, Wait
from extproc.observing.decisions import Timeline
from extproc.requests.request import RoutingRequest
from extproc.routing.decision import Decision
from extproc.serving.exchange import Exchange, Service
from tests.extproc.messages import answers_of, body, head
from tests.extproc.serving.routers import counted, in_flight, seen, service
from tests.waiting import until

PROMPT = json.dumps({"model": "m", "prompt": list(range(40))}).encode()


class Waiting(Feature):
    """Has each request wait for the gate. goes_on: how waits end. asked: what the proxy granted."""

    def __init__(self) -> None:
        self.gate, self.goes_on, self.is_broken = asyncio.Event(), True, False
        self.asked: list[bool] = []

    def must_wait(self, request: RoutingRequest, decision: Decision, now: float) -> Wait | None:
        if self.is_broken:
            raise RuntimeError("nobody foresaw this")
        return _Gate(self)


class _Gate(Wait):
    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting

    async def end(self, ask_for_time: AskForTime) -> bool:
        self._waiting.asked.append(ask_for_time(60.0))
        await asyncio.sleep(0)
        await self._waiting.gate.wait()
        return self._waiting.goes_on


@pytest.fixture
def one() -> Iterator[Service]:
    made = service()
    yield made
    made.router.close()


@pytest.fixture
def recomputed(one: Service, monkeypatch: pytest.MonkeyPatch) -> list[Decision]:
    """The decisions that were counted for what is computed again after a wait."""
    noted: list[Decision] = []
    monkeypatch.setattr(one.metrics, "note_recomputed", lambda one, _: noted.append(one))
    return noted


@pytest.fixture
def waiting(one: Service) -> Waiting:
    made = Waiting()
    one.hooks.must_wait.append(made.must_wait)
    return made


async def begun(one: Service, waiting: Waiting) -> "tuple[Exchange, asyncio.Task[bytes]]":
    """A request that waits, or is decided already, and its first answer."""
    exchange = one.open()
    await exchange.receive(one.decoder.decode(head("/v1/completions").SerializeToString()))

    async def decided() -> bytes:
        answers = await exchange.receive(one.decoder.decode(body(PROMPT).SerializeToString()))
        return answers_of(answers)[0].SerializeToString()

    task = asyncio.create_task(decided())
    await until(lambda: bool(waiting.asked) or task.done())
    return exchange, task


async def test_request_is_decided_anew_and_booked_after_its_wait(
    one: Service, waiting: Waiting, recomputed: list[Decision]
) -> None:
    exchange, task = await begun(one, waiting)
    assert (in_flight(one), seen(one).decisions, waiting.asked) == (0, [], [False])
    waiting.gate.set()
    assert b"10.0.0." in await task
    assert (in_flight(one), len(seen(one).decisions), len(recomputed)) == (1, 1, 1)
    assert seen(one).decisions[0].held_seconds > 0
    exchange.close()
    assert in_flight(one) == 0


async def test_request_that_waited_in_vain_is_answered_429(
    one: Service, waiting: Waiting, recomputed: list[Decision]
) -> None:
    waiting.goes_on = False
    waiting.gate.set()
    exchange, task = await begun(one, waiting)
    answer = await task
    assert b"retry-after" in answer
    assert b"live conversations fill the caches" in answer
    assert (in_flight(one), recomputed) == (0, [])
    assert counted(one, 'kvsteer_decisions_total{model="m",reason="no_room"}') == 1
    exchange.close()


async def test_feature_that_fails_has_nobody_wait(one: Service, waiting: Waiting) -> None:
    waiting.is_broken = True
    exchange, task = await begun(one, waiting)
    assert b"10.0.0." in await task
    exchange.close()


async def test_request_is_decided_anew_after_a_wait_that_fails(
    one: Service, waiting: Waiting, recomputed: list[Decision], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "gate", None)
    exchange, task = await begun(one, waiting)
    assert b"10.0.0." in await task
    assert (len(recomputed), len(seen(one).decisions)) == (1, 1)
    exchange.close()


async def test_stream_that_ends_while_it_waits_leaves_nothing(
    one: Service, waiting: Waiting
) -> None:
    exchange, task = await begun(one, waiting)
    exchange.close()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (in_flight(one), waiting.asked) == (0, [False])


def test_time_of_a_wait_is_no_time_of_the_decision() -> None:
    ticks = iter((1.0, 1.5))
    timeline = Timeline.begin(lambda: next(ticks))
    timeline.parsed_at = timeline.clock()
    timeline.pause(90.0)
    timeline.picked_at = 92.0
    assert list(timeline.phases()) == [("parse", 91.0, 91.5), ("pick", 91.5, 92.0)]
