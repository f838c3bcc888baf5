import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from extproc.config import schema
from extproc.config.reader import parse
from extproc.discovery.view import Found, Member
from extproc.picking.upstreams import Judge
from extproc.workers.record import Table
from extproc.workers.workers import Workers
from kvstate.feeds.feed_sources import FeedSource
from kvstate.feeds.transport import Connected, MemoryTransport
from kvstate.fleet import Fleet
from tests.extproc.workers.answering import worker

EVENTS = '{zmq: "tcp://127.0.0.1:5557", replay: "tcp://127.0.0.1:5558"}'


def workers(text: str, transports: list[MemoryTransport] | None = None) -> Workers:
    def make(_: FeedSource) -> list[MemoryTransport]:
        made = MemoryTransport()
        made.put(Connected())
        if transports is not None:
            transports.append(made)
        return [made]

    read = parse(f"models: [{{name: a}}, {{name: b}}]\nworkers: [{text}]", "c")
    return Workers(read, Fleet(12345678, lambda: 0.0), make)


async def until_live(one: Workers) -> dict[str, Any]:
    async with asyncio.timeout(5):
        while True:
            (status,) = one.status()
            if status["state"] == "live":
                return status
            await asyncio.sleep(0)


async def until_true(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.002)


async def test_the_status_has_every_field_of_the_contract() -> None:
    one = workers(f'{{endpoint: "127.0.0.1:1", model: a, block_size: 32, events: {EVENTS}}}')
    await one.start()
    status = await until_live(one)
    assert status["feeds"][0].items() >= {
        "rank": 0, "state": "live", "reason": "", "last_sequence": None, "blocks": 0,
        "orphans": 0, "gaps": 0, "replays": 1, "lag_seconds": 0.0,
    }.items()  # fmt: skip
    del status["feeds"]
    assert status == {
        "endpoint": "127.0.0.1:1",
        "name": "127.0.0.1:1",
        "model": "a",
        "state": "live",
        "reason": "",
        "block_size": 32,
        "blocks_by_tier": {"device": 0, "host": 0, "disk": 0, "remote": 0},
        "in_flight": 0,
        "tokens": {
            "checked": 0,
            "matched": 0,
            "mismatched": 0,
            "without_evidence": 0,
            "differs": False,
            "position": None,
            "ours": None,
            "engine": None,
            "verification": {
                "result": "off",
                "why": "",
                "compared": 0,
                "forms": [],
                "request": None,
                "position": None,
                "ours": None,
                "engine": None,
                "cause": None,
            },
        },
        "lora": None,
        "role": "both",
        "failed_halves": 0,
        "draining": False,
        "down": "",
        "astray": "",
        "excluded": "",
        "source": "workers",
        "source_fault": "",
        "speed": {
            "tokens_per_second": 8000,
            "confidence": 0.0,
            "used_tokens_per_second": 8000,
        },
        "predictions": {
            "requests": 0,
            "predicted_tokens": 0,
            "reported_tokens": 0,
            "causes": {},
        },
    }
    await one.close()


async def test_a_worker_without_events_is_unsupported_and_eligible() -> None:
    one = workers('{endpoint: "127.0.0.1:1", model: a}')
    await one.start()
    (candidate,) = one.candidates("a")
    assert (one.state(candidate.name), candidate.excluded) == ("unsupported", "")
    one.loads.begin("127.0.0.1:1", 0, 0.0)
    status = one.status()[0]
    assert (status["in_flight"], status["reason"]) == (1, "no events are configured for it")
    await one.close()


async def test_one_after_the_other_is_looked_at_but_for_those_that_went_meanwhile() -> None:
    one = workers(", ".join(f'{{endpoint: "127.0.0.1:{port}", model: a}}' for port in (1, 2, 3)))
    await one.start()
    looks = one.statuses()
    assert next(looks)["name"] == "127.0.0.1:1"
    await one.replace(members(*(following(f"127.0.0.1:{port}") for port in (1, 3, 4))))
    one.loads.begin("127.0.0.1:3", 0, 0.0)
    assert [(two["name"], two["in_flight"]) for two in looks] == [("127.0.0.1:3", 1)]
    await one.close()


async def test_a_worker_that_is_down_says_why() -> None:
    one = workers('{endpoint: "127.0.0.1:1", model: a}')
    await one.start()
    upstream = one.upstreams.get("127.0.0.1:1")
    assert upstream is not None
    one.upstreams.eject(upstream, Judge.PROBE, "is gone")
    assert one.status()[0]["down"] == "is gone"
    await one.close()


async def test_workers_of_other_models_are_excluded() -> None:
    one = workers('{endpoint: "127.0.0.1:1", model: a}')
    assert one.candidates("b")[0].excluded == "serves a"
    assert (one.endpoints("a"), one.endpoints("b")) == (["127.0.0.1:1"], [])


async def test_a_host_name_is_resolved() -> None:
    one = workers('{endpoint: "localhost:7", model: a}')
    assert one.candidates("a")[0].excluded == "its host name could not be resolved"
    await one.start()
    (candidate,) = one.candidates("a")
    assert (candidate.name, candidate.excluded) == ("localhost:7", "")
    assert candidate.endpoint in ("127.0.0.1:7", "[::1]:7")
    await one.close()


async def test_an_address_stays_while_its_name_cannot_be_resolved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[str] = ["10.0.0.2", "10.0.0.1"]

    async def lookup(*_: object, **__: object) -> list[Any]:
        if not answers:
            raise socket.gaierror(socket.EAI_AGAIN, "try again")
        return [(0, 0, 0, "", (address, 7)) for address in answers]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup)
    monkeypatch.setattr("extproc.workers.workers.RESOLVE_INTERVAL_SECONDS", 0.0)
    one = workers('{endpoint: "w:7", model: a}')
    await one.start()
    assert one.candidates("a")[0].endpoint == "10.0.0.1:7"
    answers.clear()
    for _ in range(5):
        await asyncio.sleep(0)
    assert one.candidates("a")[0].endpoint == "10.0.0.1:7"
    answers.append("10.0.0.3")
    for _ in range(5):
        await asyncio.sleep(0)
    assert one.candidates("a")[0].endpoint == "10.0.0.3:7"
    await one.close()


async def test_a_resolver_that_is_away_does_not_hold_up_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def lookup(*_: object, **__: object) -> list[Any]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup)
    monkeypatch.setattr("extproc.workers.workers.FIRST_RESOLVE_SECONDS", 0.01)
    one = workers('{endpoint: "w:7", model: a}')
    await one.start()
    assert one.candidates("a")[0].excluded == "its host name could not be resolved"
    await one.close()


async def test_the_kill_switch_stops_and_starts_the_feeds() -> None:
    made: list[MemoryTransport] = []
    one = workers(f'{{endpoint: "127.0.0.1:1", model: a, events: {EVENTS}}}', made)
    await one.start()
    await until_live(one)
    await one.enable_events(enabled=False)
    assert one.status()[0]["state"] == "unsupported"
    assert not one.events_enabled
    await one.enable_events(enabled=True)
    await one.enable_events(enabled=True)
    await until_live(one)
    assert len(made) == 2
    await one.close()


async def test_feeds_switched_off_and_on_at_once_are_all_followed() -> None:
    zmq = '{{endpoint: "127.0.0.1:{0}", model: a, events: {{zmq: "tcp://127.0.0.1:555{0}"}}}}'
    listed = [zmq.format(n) for n in (1, 2)]
    one = workers(", ".join(listed))
    await one.start()
    off, on = one.enable_events(enabled=False), one.enable_events(enabled=True)
    await asyncio.gather(off, on)
    assert [len(status["feeds"]) for status in one.status()] == [1, 1]
    await one.close()


async def test_a_name_that_can_be_none_stops_no_other_from_being_resolved() -> None:
    bad = f"{'a' * 70}.example:1"
    one = workers(f'{{endpoint: "{bad}", model: a}}, {{endpoint: "localhost:2", model: a}}')
    await one.start()
    assert [bool(worker.excluded) for worker in one.candidates("a")] == [True, False]
    await one.close()


async def test_readiness_waits_for_replays() -> None:
    made: list[MemoryTransport] = []
    one = workers(f'{{endpoint: "127.0.0.1:1", model: a, events: {EVENTS}}}', made)
    await one.start()
    assert not one.replays_done()
    await until_live(one)
    assert one.replays_done()
    await one.close()


def members(*found: Found) -> dict[str, Member]:
    return {one.worker.endpoint: Member(one, "file") for one in found}


def following(endpoint: str, port: int = 5557, **more: Any) -> Found:
    worker = schema.Worker(endpoint, "a", events=schema.WorkerEvents(f"tcp://127.0.0.1:{port}"))
    return Found(worker, **more)


async def test_workers_come_and_go() -> None:
    made: list[MemoryTransport] = []
    one = workers(f'{{endpoint: "127.0.0.1:1", model: a, events: {EVENTS}}}', made)
    await one.start()
    await until_live(one)
    await one.replace(members(following("127.0.0.1:2"), following("127.0.0.1:3")))
    assert one.endpoints("a") == ["127.0.0.1:2", "127.0.0.1:3"]
    assert one.places() == [("127.0.0.1:2",) * 2, ("127.0.0.1:3",) * 2]
    assert one.state("127.0.0.1:1") == "unsupported"
    assert (one.upstreams.get("127.0.0.1:1"), one.in_flight("127.0.0.1:1")) == (None, 0)
    await one.replace(members(following("127.0.0.1:3")))
    assert (len(made), one.endpoints("a")) == (3, ["127.0.0.1:3"])
    await one.close()


async def test_another_engine_under_the_same_address_begins_anew() -> None:
    made: list[MemoryTransport] = []
    one = workers('{endpoint: "127.0.0.1:9", model: a}', made)
    await one.start()
    await one.replace(members(following("127.0.0.1:1", identity="old")))
    one.drain("127.0.0.1:1", draining=True)
    before = one.records["127.0.0.1:1"]
    one.loads.begin("127.0.0.1:1", 10, 0.0)
    await one.replace(members(following("127.0.0.1:1", identity="new")))
    assert (len(made), one.draining(), one.in_flight("127.0.0.1:1")) == (2, set(), 0)
    assert one.records["127.0.0.1:1"] is not before
    await one.close()


async def test_a_worker_that_moves_its_feed_is_followed_there() -> None:
    made: list[MemoryTransport] = []
    one = workers('{endpoint: "127.0.0.1:9", model: a}', made)
    await one.start()
    for port in (5557, 5557, 6000):
        await one.replace(members(following("127.0.0.1:1", port)))
    assert len(made) == 2
    await one.close()


async def test_draining_is_by_source_and_by_hand() -> None:
    one = workers(
        '{endpoint: "127.0.0.1:1", model: a, draining: true}, {endpoint: "h:2", model: a}'
    )
    assert one.draining() == {"127.0.0.1:1"}
    assert one.drain("h:2", draining=True)
    assert one.draining() == {"127.0.0.1:1", "h:2"}
    assert one.drain("h:2", draining=False)
    assert not one.drain("nobody:1", draining=True)
    assert one.lanes() == {"a": [("127.0.0.1:1", False)]}


async def test_a_worker_that_is_not_ready_gets_no_requests() -> None:
    one = workers('{endpoint: "127.0.0.1:9", model: a}')
    await one.replace(members(Found(schema.Worker("127.0.0.1:1", "a"), "its pod is not ready")))
    assert one.candidates("a")[0].excluded == "its pod is not ready"
    assert one.lanes() == {"a": [("127.0.0.1:1", False)]}
    await one.close()


async def test_a_worker_of_an_unknown_model_waits_until_it_tells() -> None:
    listed = {"data": [{"id": "b"}, {"id": "x", "parent": "b"}]}
    async with worker(**{"v1/models": listed, "server_info": {"page_size": 64}}) as endpoint:
        made: list[MemoryTransport] = []
        one = workers(f"{{endpoint: '{endpoint}', learn: true, events: {EVENTS}}}", made)
        await one.start()
        assert one.candidates("b")[0].excluded == "its model is not known yet"
        await until_true(lambda: bool(made))
        (candidate,) = one.candidates("b")
        assert (candidate.excluded, candidate.loras) == ("", frozenset({"x"}))
        (status,) = one.status()
        assert (status["model"], status["block_size"], status["lora"]) == ("b", 64, ["x"])
        await one.close()


async def test_adapters_are_served_where_they_are_said_to_be() -> None:
    one = workers(
        '{endpoint: "127.0.0.1:1", model: a, lora: [x]}, {endpoint: "127.0.0.1:2", model: a}'
    )
    assert [each.loras for each in one.candidates("a")] == [frozenset({"x"}), None]


async def test_a_worker_may_have_no_adapters_whatever_it_tells(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "kvsteer.workers")
    listed = {"data": [{"id": "a"}, {"id": "x", "parent": "a"}]}
    async with worker(**{"v1/models": listed}) as endpoint:
        one = workers(
            f"{{endpoint: '{endpoint}', learn: true}},"
            f" {{endpoint: '127.0.0.1:1', model: a, learn: true, lora: []}}"
        )
        await one.start()
        await until_true(lambda: one.candidates("a")[0].loras == frozenset({"x"}))
        assert one.candidates("a")[1].loras == frozenset()
        assert "model a, 1 adapter, block size unknown" in caplog.text
        await one.close()


async def test_what_an_engine_told_is_not_believed_of_the_next_one() -> None:
    answers: dict[str, Any] = {"v1/models": {"data": [{"id": "b"}, {"id": "x", "parent": "b"}]}}
    async with worker(**answers) as endpoint:
        one = workers('{endpoint: "127.0.0.1:9", model: a}')
        await one.start()
        asked = schema.Worker(endpoint, learn=True)
        await one.replace(members(Found(asked, identity="old")))
        await until_true(lambda: one.model_of(endpoint) == "b")
        answers["v1/models"]["data"] = [{"id": "a"}]
        await one.replace(members(Found(asked, identity="new")))
        assert one.model_of(endpoint) is None
        await until_true(lambda: one.model_of(endpoint) == "a")
        assert [each.loras for each in one.candidates("a")] == [None]
        await one.close()


async def test_a_worker_whose_address_changed_is_gone_from_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = ["10.0.0.1"]

    async def lookup(*_: object, **__: object) -> list[Any]:
        return [(0, 0, 0, "", (address, 7)) for address in answers]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup)
    monkeypatch.setattr("extproc.workers.workers.RESOLVE_INTERVAL_SECONDS", 0.0)
    one = workers('{endpoint: "w:7", model: a}')
    await one.start()
    one.loads.begin("10.0.0.1:7", 10, 0.0)
    before = one.holdings("w:7")
    answers[:] = ["10.0.0.2"]
    await until_true(lambda: one.candidates("a")[0].endpoint == "10.0.0.2:7")
    assert (one.in_flight("10.0.0.1:7"), one.upstreams.get("10.0.0.1:7")) == (0, None)
    assert one.holdings("w:7") is not before
    await one.close()


async def test_names_are_looked_up_again_whatever_fails_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = ["10.0.0.1"]

    async def lookup(*_: object, **__: object) -> list[Any]:
        return [(0, 0, 0, "", (address, 7)) for address in answers]

    def fail(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup)
    monkeypatch.setattr("extproc.workers.workers.RESOLVE_INTERVAL_SECONDS", 0.0)
    one = workers('{endpoint: "w:7", model: a}')
    await one.start()
    with monkeypatch.context() as broken:
        broken.setattr(Table, "move", fail)
        answers[:] = ["10.0.0.2"]
        await until_true(lambda: "workers: a name cannot be looked up" in caplog.messages)
    answers[:] = ["10.0.0.3"]
    await until_true(lambda: one.candidates("a")[0].endpoint == "10.0.0.3:7")
    await one.close()


async def test_a_worker_has_no_place_before_its_address_and_its_model_are_known() -> None:
    one = workers('{endpoint: "h:1", learn: true}, {endpoint: "127.0.0.1:2", model: a}')
    assert one.unplaced() is None
    await one.replace(members(Found(schema.Worker("127.0.0.1:3")), following("127.0.0.1:2")))
    assert one.unplaced() == {"127.0.0.1:3"}
    await one.close()


async def test_two_names_of_one_endpoint_share_its_record_until_both_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def lookup(*_: object, **__: object) -> list[Any]:
        return [(0, 0, 0, "", ("127.0.0.1", 7))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup)
    one = workers('{endpoint: "w:7", model: a}, {endpoint: "127.0.0.1:7", model: a}')
    await one.start()
    one.loads.begin("127.0.0.1:7", 10, 0.0)
    assert [status["in_flight"] for status in one.status()] == [1, 1]
    await one.replace(members(following("127.0.0.1:7")))
    assert one.in_flight("127.0.0.1:7") == 1
    await one.replace({})
    assert list(one.upstreams) == []
    await one.close()


async def test_another_engine_that_comes_while_feeds_are_switched_is_followed_too() -> None:
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
    assert [(status["reason"], len(status["feeds"])) for status in one.status()] == [("", 1)] * 2
    await one.close()
