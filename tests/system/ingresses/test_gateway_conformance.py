"""A gateway in front of a picker, by a real Envoy in both dialects.

The cases of the Gateway API inference extension's conformance suite that need no Kubernetes, and
what else a proxied request must survive. Where the suite's own picker takes the endpoint from a
header, here the header becomes the subset hint.
"""

import asyncio
import io
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web

from tests.ports import free_port
from tests.system.gateway import (
    BUFFERED,
    DUPLEX,
    PROMPT,
    SUBSET,
    Gateway,
    Tree,
    gateway,
    knowing_one_worker,
    picker,
    pool,
    served,
    with_h2_workers,
    with_original_destination,
    with_second_pool,
    without_override,
    without_retries,
)
from tests.system.ingresses.h2_peer import h2_request, h2_worker
from tests.system.system import all_answer
from tests.waiting import until

DIALECTS = [BUFFERED, DUPLEX]
BIG = 5 * 1024 * 1024


async def over(one: Gateway, endpoints: list[str]) -> None:
    """Waits until no request is under way."""

    async def none() -> bool:
        return not any(one.router.in_flight(endpoint) for endpoint in endpoints)

    await until(none, "no request in flight")


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_gateway_follows_the_pick_and_names_the_served_endpoint(dialect: str) -> None:
    async with pool(3) as endpoints, gateway(dialect, endpoints) as one:
        for endpoint in endpoints * 3:
            status, worker, answer = await one.post(headers={SUBSET: endpoint})
            assert (status, worker, json.loads(answer)) == (200, endpoint, PROMPT)
        for several in (endpoints[:2], endpoints[1:]):
            answers = [await one.post(headers={SUBSET: ",".join(several)}) for _ in range(6)]
            assert {worker for _, worker, _ in answers} <= set(several)
        await over(one, endpoints)
        for endpoint in endpoints:
            assert one.counted(f'kvsteer_responses_total{{status="2xx",worker="{endpoint}"}}') >= 3
        assert one.counted('kvsteer_answered_elsewhere_total{model="m"}') == 0


async def test_gateway_that_takes_a_single_address_is_given_one() -> None:
    edits = [with_original_destination]
    async with pool(3) as endpoints, gateway(DUPLEX, endpoints, edits=edits) as one:
        answers = [await one.post() for _ in range(12)]
        assert {status for status, _, _ in answers} == {200}
        assert {worker for _, worker, _ in answers} <= set(endpoints)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_requests_without_a_body_follow_the_pick(dialect: str) -> None:
    async with pool(2) as endpoints, gateway(dialect, endpoints) as one:
        for endpoint in endpoints:
            assert (await one.post(b"", headers={SUBSET: endpoint}))[:2] == (200, endpoint)
        await over(one, endpoints)


async def test_request_without_inference_is_steered_in_dialect_b_only() -> None:
    names = "x-saw-names"
    for dialect in DIALECTS:
        async with pool(2) as endpoints, gateway(dialect, endpoints) as one:
            answered = set()
            for _ in range(8 if dialect == DUPLEX else 40):  # Envoy chooses by chance there
                headers = {SUBSET: endpoints[0], "x-gateway-destination-endpoint": "10.9.9.9:9"}
                async with one.session.get(f"{one.url}/v1/models", headers=headers) as response:
                    assert response.status == 200
                    answered.add(response.headers["x-worker"])
                    is_named = "x-gateway-destination-endpoint" in response.headers[names]
                    assert is_named is (dialect == DUPLEX)
            assert answered == ({endpoints[0]} if dialect == DUPLEX else set(endpoints))
            await over(one, endpoints)


@pytest.mark.parametrize("mode", ["NONE", "STREAMED", "BUFFERED_PARTIAL"])
async def test_requests_in_other_body_modes_are_placed_by_load_and_pass_whole(mode: str) -> None:
    prompt = json.dumps({"model": "m", "prompt": "x" * 300_000}).encode()
    async with pool(2) as endpoints, gateway(mode, endpoints) as one:
        for endpoint in endpoints:
            status, worker, answer = await one.post(prompt, headers={SUBSET: endpoint})
            assert (status, worker, answer == prompt) == (200, endpoint, True)
        await over(one, endpoints)


async def test_empty_subset_is_503_in_dialect_b_and_left_to_envoy_in_dialect_a() -> None:
    async with pool(2) as endpoints:
        async with gateway(DUPLEX, endpoints) as one:
            status, _, answer = await one.post(headers={SUBSET: "10.9.9.9:9"})
            assert (status, json.loads(answer)["error"]["code"]) == (503, 503)
        async with gateway(BUFFERED, endpoints) as one:
            assert (await one.post(headers={SUBSET: "10.9.9.9:9"}))[0] == 200


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_dead_pick_is_retried_and_its_load_moves(dialect: str) -> None:
    async with pool(1) as (alive,):
        dead = f"127.0.0.1:{free_port()}"
        async with gateway(dialect, [dead, alive]) as one:
            answers = [await one.post() for _ in range(12)]
            assert {(status, worker) for status, worker, _ in answers} == {(200, alive)}
            await over(one, [dead, alive])
            assert one.counted('kvsteer_answered_elsewhere_total{model="m"}') > 0
            assert one.counted(f'kvsteer_responses_total{{status="2xx",worker="{alive}"}}') == 12


@pytest.mark.parametrize(
    ("edit", "cause"),
    [(knowing_one_worker, "lacks this endpoint"), (without_override, "no pick is followed")],
)
async def test_picks_that_envoy_does_not_follow_are_reported_by_default(
    edit: Callable[[Tree], None], cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        pool(3) as endpoints,
        gateway(BUFFERED, endpoints, responses="none", edits=[edit]) as one,
    ):

        async def noticed() -> bool:
            assert (await one.post())[0] == 200
            return cause in one.workers.strays.cause(endpoints[1])

        await until(noticed, f"it is noticed: {cause}")
        name = f'kvsteer_served_elsewhere_total{{worker="{endpoints[1]}"}}'
        assert one.counted(name) >= 3
    assert "are answered by other servers" in caplog.text


async def test_picks_that_envoy_follows_raise_no_suspicion() -> None:
    async with pool(3) as endpoints, gateway(BUFFERED, endpoints, responses="none") as one:
        for _ in range(64):
            assert (await one.post())[0] == 200
        known = [f'kvsteer_served_known_total{{worker="{each}"}}' for each in endpoints]
        assert sum(map(one.counted, known)) == 8
        assert not one.workers.upstreams.has_suspects


async def test_gateway_fails_open_without_a_picker_and_follows_it_when_it_returns() -> None:
    async with pool(2) as endpoints, gateway(BUFFERED, endpoints, starts=False) as one:
        await all_answer(lambda: one.post(headers={SUBSET: endpoints[0]}), endpoints)
        await one.server.start()

        async def steered() -> bool:
            picked = [await one.post(headers={SUBSET: endpoints[0]}) for _ in range(6)]
            return {worker for _, worker, _ in picked} == {endpoints[0]}

        await until(steered, "requests follow the pick again")
        await one.server.stop()
        assert (await one.post())[0] == 200


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_pools_share_requests_by_weight_and_follow_their_own_pickers(
    dialect: str,
) -> None:
    async with pool(4) as endpoints, picker(endpoints[2:]) as other:
        second = with_second_pool(endpoints[2:], 30, other.listen)
        async with gateway(dialect, endpoints[:2], edits=[second]) as one:
            answers = [await one.post() for _ in range(100)]
            assert {status for status, _, _ in answers} == {200}
            shares = Counter(worker in endpoints[2:] for _, worker, _ in answers)
            # 30 of 100 are expected there; these bounds fail less than once in 10^9 runs
            assert 5 <= shares[True] <= 60
            for chosen in (endpoints[0], endpoints[3]):
                headers = {SUBSET: chosen, "x-test-pool": str(endpoints.index(chosen) // 2)}
                picked = [await one.post(headers=headers) for _ in range(6)]
                assert {worker for _, worker, _ in picked} == {chosen}


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_http2_workers_get_their_picks_and_trailers_pass_both_ways(
    dialect: str,
) -> None:
    ports = [free_port(), free_port()]
    endpoints = [f"127.0.0.1:{port}" for port in ports]
    # Envoy 1.40 sends a streamed body that ends with trailers twice if it may be retried
    # (envoy#45470, open as #46095): docs/internals/gateways.md says so.
    edits = [with_h2_workers, *([without_retries] if dialect == DUPLEX else [])]
    async with (
        h2_worker(ports[0]) as first,
        h2_worker(ports[1]) as second,
        gateway(dialect, endpoints, edits=edits) as one,
    ):
        body = json.dumps(PROMPT).encode()
        for endpoint, requests in ((endpoints[0], first), (endpoints[1], second)):
            headers = [(SUBSET, endpoint), ("x-twice", "a"), ("x-twice", "b")]
            answer = await h2_request(one.port, "/v1/completions", body, headers, [("x-late", "1")])
            assert answer.get("x-worker") == [endpoint]
            assert answer.get("set-cookie") == ["a=1", "b=2"]
            assert answer.trailers == [("x-checksum", "42")]
            (request,) = requests
            assert request.body == body
            assert request.trailers == [("x-late", "1")]
            assert request.get("x-twice") in (["a", "b"], ["a,b"])
        await over(one, endpoints)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_large_bodies_pass_whole_both_ways(dialect: str) -> None:
    prompt = json.dumps({"model": "m", "prompt": "x" * BIG}).encode()

    async def chunked() -> AsyncIterator[bytes]:
        for start in range(0, len(prompt), 100_000):
            yield prompt[start : start + 100_000]

    async with pool(2) as endpoints, gateway(dialect, endpoints) as one:
        for body in (io.BytesIO(prompt), chunked()):
            status, worker, answer = await one.post(body, headers={SUBSET: endpoints[1]})
            assert (status, worker) == (200, endpoints[1])
            assert answer == prompt
        await over(one, endpoints)


async def test_body_over_our_limit_is_placed_by_load_and_passes_whole_in_dialect_b() -> None:
    changes = {"extproc": {"max_body_bytes": 100_000}}
    prompt = json.dumps({"model": "m", "prompt": "x" * 1_000_000}).encode()

    async def chunked() -> AsyncIterator[bytes]:
        for start in range(0, len(prompt), 50_000):
            yield prompt[start : start + 50_000]

    async with pool(1) as endpoints, gateway(DUPLEX, endpoints, changes=changes) as one:
        for body in (io.BytesIO(prompt), chunked()):
            status, _, answer = await one.post(body)
            assert (status, answer == prompt) == (200, True)
        assert one.counted('kvsteer_decisions_total{model="",reason="body_too_large"}') == 2


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_headers_pass_unchanged_except_for_a_pick_of_the_client(dialect: str) -> None:
    async with pool(2) as endpoints, gateway(dialect, endpoints) as one:
        body = json.dumps(PROMPT).encode()
        headers = {SUBSET: endpoints[0], "x-gateway-destination-endpoint": endpoints[1]}
        url = f"{one.url}/v1/completions"
        async with one.session.post(url, data=body, headers=headers) as response:
            assert response.headers["x-worker"] == endpoints[0]
            # Envoy drops content-length where a body streams through a picker, and sends chunks.
            assert response.headers["x-saw-length"] in (str(len(body)), "")
            assert response.headers.getall("set-cookie") == ["a=1", "b=2"]


def event_app(events: list[bytes], *, ends: bool) -> web.Application:
    """Streams events; without an end it goes on until the client leaves."""

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(event)
            await asyncio.sleep(0)
        while not ends:
            await response.write(b": still here\n\n")
            await asyncio.sleep(0.02)
        return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", stream)
    return app


EVENTS = [
    *(f'data: {{"choices": [{{"text": "{number}"}}]}}\n\n'.encode() for number in range(20)),
    b'data: {"choices": [], "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_',
    b'tokens": 2}}}\n\n',
    b"data: [DONE]\n\n",
]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_event_stream_passes_unchanged_and_its_usage_is_read(dialect: str) -> None:
    port = free_port()
    endpoint = f"127.0.0.1:{port}"
    async with (
        served(event_app(EVENTS, ends=True), port),
        gateway(dialect, [endpoint], responses="usage") as one,
    ):
        status, _, answer = await one.post()
        assert (status, answer) == (200, b"".join(EVENTS))
        await over(one, [endpoint])
        assert one.counted('kvsteer_reported_cached_tokens_total{model="m"}') == 2


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_event_stream_is_not_delayed_and_its_end_releases_the_load(dialect: str) -> None:
    port = free_port()
    endpoint = f"127.0.0.1:{port}"
    async with (
        served(event_app(EVENTS, ends=False), port),
        gateway(dialect, [endpoint], responses="usage") as one,
    ):
        body = json.dumps(PROMPT).encode()
        async with one.session.post(f"{one.url}/v1/completions", data=body) as response:
            await response.content.readuntil(b": still here\n\n")
            assert one.router.in_flight(endpoint) == 1
            response.close()
        await over(one, [endpoint])


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_statuses_are_counted_by_worker(dialect: str) -> None:
    async with pool(1) as (endpoint,), gateway(dialect, [endpoint]) as one:
        for status in (200, 404, 500, 503):
            assert (await one.post(headers={"x-test-status": str(status)}))[0] == status
        await over(one, [endpoint])
        for label in ("2xx", "4xx", "5xx", "503"):
            name = f'kvsteer_responses_total{{status="{label}",worker="{endpoint}"}}'
            assert one.counted(name) == 1


async def test_missing_picker_fails_open_in_dialect_b_only_without_a_body() -> None:
    async with pool(1) as endpoints, gateway(DUPLEX, endpoints, starts=False) as one:
        async with one.session.get(f"{one.url}/v1/models") as response:
            assert response.status == 200
        assert (await one.post())[0] == 500
