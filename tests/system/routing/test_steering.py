"""A share of the requests is steered and the rest is left to a real Envoy's own choice."""

import json
import time
from typing import Any

import pytest

from tests.system.gateway import (
    BUFFERED,
    DUPLEX,
    Gateway,
    gateway,
    knowing_one_worker,
    pool,
    without_override,
)
from tests.system.system import chat, long_text, running
from tests.waiting import until

DESTINATION = "x-gateway-destination-endpoint"


def share(percent: float, **others: Any) -> dict[str, Any]:
    return {"steering": {"percent": percent, **others}}


def prompt(seed: int) -> bytes:
    return json.dumps({"model": "m", "prompt": [seed] * 200}).encode()


async def sent(one: Gateway, seed: int, headers: dict[str, str] | None = None) -> tuple[str, bool]:
    """Sends a request; returns who answered, and whether Envoy was told where to send it."""
    url, body = f"{one.url}/v1/completions", prompt(seed)
    async with one.session.post(url, data=body, headers=headers) as response:
        assert response.status == 200
        named = response.headers["x-saw-names"].split(",")
        return response.headers["x-worker"], DESTINATION in named


async def counted(one: Gateway, line: str, count: float) -> None:
    async def is_counted() -> bool:
        return one.counted(line) == count

    await until(is_counted, f"{line} {count}")


@pytest.mark.parametrize("mode", [BUFFERED, "NONE"])
async def test_share_of_0_percent_lets_envoy_choose_and_counts_the_endpoint(mode: str) -> None:
    async with (
        pool(2) as endpoints,
        gateway(mode, endpoints, responses="none", changes=share(0)) as one,
    ):
        answered: list[str] = []
        while len(answered) < 20 or set(answered) != set(endpoints):
            client_steers = {DESTINATION: endpoints[0]}
            worker, is_named = await sent(one, 1, client_steers)  # steered ones go to one worker
            answered.append(worker)
            assert not is_named
            assert len(answered) < 200
        count = len(answered)
        assert (
            one.counted(
                'kvsteer_unsteered_total{model=""}'
                if mode == "NONE"
                else 'kvsteer_unsteered_total{model="m"}'
            )
            == count
        )
        assert one.router.deliveries.totals(one.router.ledger.steered)["delivered"] == 0
        for endpoint in endpoints:  # responses are shown, though none need be
            line = f'kvsteer_responses_total{{status="2xx",worker="{endpoint}"}}'
            await counted(one, line, answered.count(endpoint))
        assert not any(one.router.in_flight(endpoint) for endpoint in endpoints)


async def test_share_of_50_percent_keeps_each_conversation_on_one_side() -> None:
    async with (
        pool(2) as endpoints,
        gateway(BUFFERED, endpoints, responses="none", changes=share(50)) as one,
    ):
        sides = {seed: [(await sent(one, seed))[1] for _ in range(3)] for seed in range(40)}
        assert {len(set(side)) for side in sides.values()} == {1}
        steered = {seed for seed, side in sides.items() if side[0]}
        assert 5 < len(steered) < 35
        one.router.steering.change(80)
        more = {seed for seed in sides if (await sent(one, seed))[1]}
        assert more > steered
        one.router.steering.change(100)
        assert all([(await sent(one, seed))[1] for seed in sides])


async def test_share_by_header_keeps_requests_of_one_value_on_one_side() -> None:
    changes = share(50, header="X-Tenant")
    async with pool(2) as endpoints, gateway(BUFFERED, endpoints, changes=changes) as one:
        sides = {
            tenant: {(await sent(one, seed, {"x-tenant": tenant}))[1] for seed in range(10)}
            for tenant in map(str, range(12))
        }
        assert {len(side) for side in sides.values()} == {1}
        assert {is_steered for side in sides.values() for is_steered in side} == {True, False}


async def test_share_of_0_percent_names_a_random_endpoint_in_dialect_b() -> None:
    async with pool(3) as endpoints, gateway(DUPLEX, endpoints, changes=share(0)) as one:
        answered: list[str] = []
        while set(answered) != set(endpoints):
            worker, is_named = await sent(one, 1)
            assert is_named
            answered.append(worker)
            assert len(answered) < 100
        assert one.counted('kvsteer_unsteered_total{model="m"}') == len(answered)
        for endpoint in endpoints:
            line = f'kvsteer_responses_total{{status="2xx",worker="{endpoint}"}}'
            await counted(one, line, answered.count(endpoint))
        assert one.counted('kvsteer_answered_elsewhere_total{model="m"}') == 0


async def test_steered_requests_are_sampled_and_counted_as_delivered() -> None:
    async with pool(2) as endpoints, gateway(BUFFERED, endpoints, responses="none") as one:
        for seed in range(16):
            await sent(one, seed)
        delivered = 'kvsteer_steered_total{model="m",result="delivered"}'
        assert one.counted(delivered) == 2  # one request in eight is checked
        assert one.counted('kvsteer_steered_total{model="m",result="unknown"}') == 14
        assert one.counted('kvsteer_steered_total{model="m",result="elsewhere"}') == 0
        assert one.router.delivery.fault() == ""


@pytest.mark.parametrize(
    ("edit", "words"),
    [(knowing_one_worker, "lacks this endpoint"), (without_override, "no override_host policy")],
)
async def test_workers_unknown_to_envoy_are_reported_within_a_minute(
    edit: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        pool(3) as endpoints,
        gateway(BUFFERED, endpoints, responses="none", edits=[edit]) as one,
    ):
        began_at, seed = time.monotonic(), 0

        async def is_named() -> bool:
            nonlocal seed
            seed += 1
            await sent(one, seed)
            return words in one.router.delivery.fault()

        await until(is_named, "it is told that steered requests are not delivered")
        assert time.monotonic() - began_at < 60
        if words == "lacks this endpoint":
            assert any(endpoint in one.router.delivery.fault() for endpoint in endpoints[1:])
        warnings = [text for text in caplog.messages if "of steered requests reached" in text]
        assert len(warnings) == 1
        assert one.counted('kvsteer_steered_total{model="m",result="elsewhere"}') >= 3


async def test_share_changes_at_run_time() -> None:
    async with running(workers=2) as system:

        async def posted(percent: float) -> dict[str, Any]:
            url, body = f"{system.admin}/steering", {"percent": percent}
            async with system.session.post(url, json=body) as response:
                assert response.status == 200
                told: dict[str, Any] = await response.json()
                return told

        body = chat(long_text("alpha"))
        _, holder, _ = await system.send(body)
        await system.learned(body, holder)
        assert {(await system.send(body))[1] for _ in range(8)} == {holder}
        assert (await posted(0))["percent"] == 0

        async def envoy_chooses() -> bool:
            return (await system.send(body))[1] != holder

        await until(envoy_chooses, "Envoy chooses by itself")
        told = await system.explain(body)
        assert (told["steered"], told["why"].startswith("not steered")) == (False, True)
        assert (await posted(100))["unsteered"] > 0
        assert {(await system.send(body))[1] for _ in range(8)} <= {
            worker.endpoint for worker in system.workers
        }
        assert (await system.explain(body))["steered"]
