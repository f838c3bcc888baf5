"""The whole path behind a real Envoy: steering, and everything that must not be lost."""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.ports import free_port
from tests.system.system import CHAT, System, all_answer, chat, long_text, running
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def system() -> AsyncIterator[System]:
    """For a test that stops a part of the system."""
    async with running() as one:
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[System]:
    """For tests that leave the system as it was; each has its own prompts."""
    async with running() as one:
        yield one


def of_short_bodies() -> dict[str, object]:
    """The section of a router that reads no body of more than 4 KiB."""
    return {"listen": f"127.0.0.1:{free_port()}", "max_body_bytes": 4096}


async def test_follow_up_reaches_the_worker_that_holds_its_prefix(shared: System) -> None:
    for seed in ("alpha", "beta", "gamma"):
        first = chat(long_text(seed))
        _, holder, _ = await shared.send(first)
        await shared.learned(first, holder)
        follow_up = chat(long_text(seed) + " And then?")
        decision = await shared.explain(follow_up)
        _, worker, answer = await shared.send(follow_up)
        predicted = {one["endpoint"]: one["overlap_tokens"] for one in decision["candidates"]}
        assert worker == holder == decision["pick"][0]
        assert predicted[holder] == answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_dead_worker_named_first_loses_no_request(system: System) -> None:
    body = chat(long_text("alpha"))
    _, holder, _ = await system.send(body)
    await system.learned(body, holder)
    await until(lambda: system.in_flight(0), "no request in flight")
    await system.stop_worker(holder)
    pick = (await system.explain(body))["pick"]
    answers = [await system.send(body) for _ in range(20)]
    assert pick[0] == holder
    assert {status for status, _, _ in answers} == {200}
    assert holder not in {worker for _, worker, _ in answers}


async def test_destination_header_of_a_client_never_steers(system: System) -> None:
    body = chat(long_text("alpha"))
    _, holder, _ = await system.send(body)
    await system.learned(body, holder)
    other = next(one.endpoint for one in system.workers if one.endpoint != holder)
    headers = {"x-gateway-destination-endpoint": other}
    up = [await system.send(body, headers=headers) for _ in range(10)]
    await system.stop_router()
    assert {worker for _, worker, _ in up} == {holder}
    workers = [one.endpoint for one in system.workers]
    await all_answer(lambda: system.send(body, headers=headers), workers)


async def test_models_are_answered_by_their_own_workers() -> None:
    async with running(workers=4, models=("tiny", "other")) as system:
        serving = {
            model: {one.endpoint for one in system.workers[offset::2]}
            for offset, model in enumerate(("tiny", "other"))
        }
        for model in ("tiny", "other"):
            answers = [await system.send(chat(long_text(str(n)), model)) for n in range(8)]
            assert {status for status, _, _ in answers} == {200}
            assert {worker for _, worker, _ in answers} <= serving[model]


@pytest.mark.parametrize("position", ["first", "last"])
async def test_models_are_answered_by_their_own_workers_without_a_router(position: str) -> None:
    async with running(workers=2, models=("tiny", "other")) as system:
        await system.stop_router()
        for model, own in zip(("tiny", "other"), system.workers, strict=True):
            quoted = 'the "model": "tiny" is not "model": "other"'
            body = chat(quoted, model)
            if position == "last":
                body["model"] = body.pop("model")
            answers = [await system.send(body) for _ in range(4)]
            assert {(status, worker) for status, worker, _ in answers} == {(200, own.endpoint)}


async def test_unread_body_reaches_a_worker_of_its_model() -> None:
    changes = {"extproc": of_short_bodies()}
    async with running(2, ("tiny", "other"), changes) as system:
        body = chat("word " * 1_000, "other")

        async def placed() -> bool:
            status, worker, _ = await system.send(body)
            assert (status, worker) == (200, system.workers[1].endpoint)
            name = 'kvsteer_decisions_total{model="",reason="body_too_large"}'
            return await system.metric(name) == 4

        await until(placed, "four of these requests are placed")


BAD_BODIES = [
    (b'{"model": "tiny", "messages": [', "bad_json", 400),
    (b'{"model": "tiny", "messages": []}', "empty_prompt", 400),
    (b"\xff\xfe\x00", "bad_json", 400),
    (b'{"model": "nobody", "messages": [{"role": "user", "content": "x"}]}', "unknown_model", 404),
    (b"", "no_body", 400),
]


async def test_invalid_bodies_reach_a_worker_and_are_counted(shared: System) -> None:
    url, headers = f"{shared.envoy}{CHAT}", {"content-type": "application/json"}
    for body, reason, status in BAD_BODIES:
        model = "tiny" if status == 400 and body else ""
        name = f'kvsteer_decisions_total{{model="{model}",reason="{reason}"}}'
        before = await shared.metric(name)
        async with shared.session.post(url, data=body, headers=headers) as response:
            assert response.status == status, body
            assert response.headers["x-worker"], body
        assert await shared.metric(name) == before + 1, body


async def test_get_request_reaches_a_worker_and_is_not_listed(shared: System) -> None:
    async def recorded() -> list[Any]:
        async with shared.session.get(f"{shared.admin}/decisions") as response:
            decisions: list[Any] = (await response.json())["decisions"]
            return decisions

    name = 'kvsteer_decisions_total{model="",reason="not_inference"}'
    count, decisions = await shared.metric(name), await recorded()
    async with shared.session.get(f"{shared.envoy}/v1/models") as response:
        assert response.status == 200
    assert await shared.metric(name) == count + 1
    assert await recorded() == decisions


async def test_events_switch_takes_effect_at_run_time(shared: System) -> None:
    body = chat(long_text("kill switch"))
    _, holder, _ = await shared.send(body)
    await shared.learned(body, holder)
    url = f"{shared.admin}/events"
    async with shared.session.post(url, json={"enabled": False}) as response:
        assert await response.json() == {"enabled": False}
    assert (await shared.explain(body))["reason"] == "approximate_overlap"
    assert (await shared.send(body))[0] == 200
    async with shared.session.post(url, json={"enabled": True}) as response:
        assert await response.json() == {"enabled": True}
    await shared.learned(body, holder)


async def test_restarted_worker_keeps_no_credit_for_lost_blocks(shared: System) -> None:
    body = chat(long_text("restart"))
    _, holder, _ = await shared.send(body)
    await shared.learned(body, holder)
    worker = next(one for one in shared.workers if one.endpoint == holder)
    async with shared.session.post(f"{worker.url}/reset_prefix_cache") as response:
        assert response.status == 200
    async with shared.session.post(f"{worker.url}{CHAT}", json=chat("hi")) as response:
        assert response.status == 200

    async def forgotten() -> bool:
        return all(one["overlap_tokens"] == 0 for one in (await shared.explain(body))["candidates"])

    await until(forgotten, "the cleared worker is credited with nothing")


async def test_log_contains_no_text_of_request_bodies(shared: System) -> None:
    await shared.send(chat("a secret nobody may read"))
    async with shared.session.post(
        f"{shared.envoy}{CHAT}", data=json.dumps(chat("secret too"))[:-1]
    ):
        pass
    with contextlib.suppress(FileNotFoundError):
        assert "secret" not in shared.log.read_text()


async def test_session_without_tokens_stays_on_its_worker() -> None:
    blind = {
        "models": [{"name": "tiny"}],
        "policy": {"session_header": "X-Session"},
    }
    async with running(workers=3, changes=blind) as system:
        for session in ("one", "two"):
            headers = {"x-session": session}
            texts = [long_text(f"{session} asks {number}") for number in range(8)]
            answers = [await system.send(chat(text), headers=headers) for text in texts]
            assert {status for status, _, _ in answers} == {200}
            assert len({worker for _, worker, _ in answers}) == 1
        envelope = {"path": CHAT, "headers": {"x-Session": "two"}, "body": chat("hello")}
        async with system.session.post(f"{system.admin}/explain", json=envelope) as response:
            explained = await response.json()
        assert explained["session"] == explained["pick"][0] == answers[-1][1]
