import asyncio
import math

import pytest

from extproc.base.engine import Engine, Release
from extproc.fleet.records.engine_identity import EngineAnswer
from tests.extproc.fleet.fleets import EVENTS, following, members, until_live, workers
from tests.memory_transport import MemoryTransport


async def test_enable_events_stops_and_starts_the_feeds() -> None:
    made: list[MemoryTransport] = []
    one = workers(f'{{endpoint: "127.0.0.1:1", model: a, events: {EVENTS}}}', made)
    await one.start()
    await until_live(one)
    await one.enable_events(enabled=False)
    assert next(one.states.statuses())["state"] == "unsupported"
    assert not one.events_enabled
    await one.enable_events(enabled=True)
    await one.enable_events(enabled=True)
    await until_live(one)
    assert len(made) == 2
    await one.close()


async def test_enable_events_follows_all_feeds_after_fast_toggling() -> None:
    zmq = '{{endpoint: "127.0.0.1:{0}", model: a, events: {{zmq: "tcp://127.0.0.1:555{0}"}}}}'
    listed = [zmq.format(n) for n in (1, 2)]
    one = workers(", ".join(listed))
    await one.start()
    off, on = one.enable_events(enabled=False), one.enable_events(enabled=True)
    await asyncio.gather(off, on)
    assert [len(status["feeds"]) for status in one.states.statuses()] == [1, 1]
    await one.close()


async def test_replace_adds_and_removes_workers() -> None:
    made: list[MemoryTransport] = []
    one = workers(f'{{endpoint: "127.0.0.1:1", model: a, events: {EVENTS}}}', made)
    await one.start()
    await until_live(one)
    await one.replace(members(following("127.0.0.1:2"), following("127.0.0.1:3")))
    assert one.candidates.endpoints("a") == ["127.0.0.1:2", "127.0.0.1:3"]
    assert one.candidates.places() == [("127.0.0.1:2",) * 2, ("127.0.0.1:3",) * 2]
    assert one.candidates.state("127.0.0.1:1") == "unsupported"
    assert (one.upstreams.get("127.0.0.1:1"), one.loads.in_flight("127.0.0.1:1")) == (None, 0)
    await one.replace(members(following("127.0.0.1:3")))
    assert (len(made), one.candidates.endpoints("a")) == (3, ["127.0.0.1:3"])
    await one.close()


async def test_replace_resets_the_state_of_another_engine_at_the_same_address() -> None:
    made: list[MemoryTransport] = []
    one = workers('{endpoint: "127.0.0.1:9", model: a}', made)
    await one.start()
    await one.replace(members(following("127.0.0.1:1", identity="old")))
    one.drain("127.0.0.1:1", draining=True)
    before = one.records["127.0.0.1:1"]
    one.loads.begin("127.0.0.1:1", 10, 0.0)
    await one.replace(members(following("127.0.0.1:1", identity="new")))
    assert (len(made), one.candidates.draining(), one.loads.in_flight("127.0.0.1:1")) == (
        2,
        set(),
        0,
    )
    assert one.records["127.0.0.1:1"] is not before
    await one.close()


async def test_replace_follows_a_worker_that_moves_its_feed() -> None:
    made: list[MemoryTransport] = []
    one = workers('{endpoint: "127.0.0.1:9", model: a}', made)
    await one.start()
    for port in (5557, 5557, 6000):
        await one.replace(members(following("127.0.0.1:1", port)))
    assert len(made) == 2
    await one.close()


async def test_names_of_one_endpoint_share_its_record_until_both_are_gone() -> None:
    async def look_up(_: str) -> list[str]:
        return ["127.0.0.1"]

    both = '{endpoint: "w:7", model: a}, {endpoint: "127.0.0.1:7", model: a}'
    one = workers(both, look_up=look_up)
    await one.start()
    one.loads.begin("127.0.0.1:7", 10, 0.0)
    assert [status["in_flight"] for status in one.states.statuses()] == [1, 1]
    await one.replace(members(following("127.0.0.1:7")))
    assert one.loads.in_flight("127.0.0.1:7") == 1
    await one.replace({})
    assert list(one.upstreams) == []
    await one.close()


async def test_enable_events_follows_another_engine_that_comes_meanwhile() -> None:
    one = workers('{endpoint: "127.0.0.1:9", model: a}')
    await one.start()
    old = [following("127.0.0.1:1", 5557, identity="old"), following("127.0.0.1:2", 5558)]
    await one.replace(members(*old))
    first = members(old[0], following("127.0.0.1:2", 5558, identity="new"))
    second = members(
        following("127.0.0.1:1", 5557, identity="new"),
        following("127.0.0.1:2", 5558, identity="new"),
    )
    await asyncio.gather(one.replace(first), one.replace(second))
    assert [(status["reason"], len(status["feeds"])) for status in one.states.statuses()] == [
        ("", 1)
    ] * 2
    await one.close()


@pytest.mark.parametrize(("asked_at", "expected"), [(0.0, True), (-math.inf, False)])
async def test_worker_that_was_asked_before_its_engine_was_known_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, asked_at: float, *, expected: bool
) -> None:
    one = workers('{endpoint: "127.0.0.1:1", model: a}')
    (worker,) = one.records.values()
    asked: list[str] = []
    monkeypatch.setattr(one.engines.verifying, "ask_now", lambda known: asked.append(known.name))
    worker.golden_questions.at = asked_at
    worker.identify(EngineAnswer(Engine("vllm", Release(0, 33)), ""))
    one.engines.identifying.expect(worker)
    assert bool(asked) is expected
