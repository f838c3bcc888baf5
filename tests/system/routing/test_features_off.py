"""Optional features are off by default: a request reaches its engine as the client sent it."""

import contextlib
from collections.abc import AsyncIterator, Mapping

from aiohttp import web

from extproc.config.schema import Config, Kubernetes
from tests.http_server import serving
from tests.system.system import CHAT, System, running

# What a feature would change: a salt, a priority, the fields and headers that name a class, a
# tenant, and a worker to pull from.
BODY = (
    b'{"cache_salt":"own", "model" : "tiny","priority":3,"kv_transfer_params":{"a":1},'
    b'"messages":[{"role":"user","content":"a"}]}'
)
HEADERS = {"content-type": "application/json", "x-tenant": "t", "x-class": "batch"}
FAMILIES = ("kvsteer_isolated_requests_total{", "kvsteer_class_requests_total{")
OF_STORES = ("kvsteer_store_blocks{", "kvsteer_store_events_total{")

Got = list[tuple[Mapping[str, str], bytes]]


@contextlib.asynccontextmanager
async def engine(got: Got) -> AsyncIterator[str]:
    """An engine that keeps what Envoy passes on to it; yields its address."""

    async def serve(request: web.Request) -> web.Response:
        content = await request.read()
        if "x-request-id" in request.headers:  # from Envoy; the router itself asks too
            got.append((request.headers, content))
        return web.json_response({})

    async with serving(serve) as address:
        yield address


@contextlib.asynccontextmanager
async def plain(got: Got) -> AsyncIterator[System]:
    """A router of a vLLM worker, with no feature configured."""
    async with engine(got) as endpoint:
        vllm = {"endpoint": endpoint, "engine": {"name": "vllm", "version": "0.32.0"}}
        async with running(
            workers=0, changes={"workers": [vllm, {"endpoint": "127.0.0.1:9"}]}
        ) as one:
            yield one


async def test_request_passes_unchanged_without_features() -> None:
    got: Got = []
    async with plain(got) as system:
        url = f"{system.envoy}{CHAT}"
        async with system.session.post(url, data=BODY, headers=HEADERS) as response:
            assert response.status == 200
        decision = await system.explain({"model": "tiny", "messages": []})
        workers = await system.status()
        async with system.session.get(f"{system.metrics}/metrics") as response:
            metrics = await response.text()
    ((headers, body),) = got
    assert body == BODY
    assert "x-vllm-priority" not in {name.lower() for name in headers}
    assert decision["class"] is None
    assert decision["source"] is None
    assert {one["fetch"] for one in decision["candidates"]} == {None}
    assert {one["cost_terms"]["fetched"] for one in decision["candidates"]} == {0.0}
    told = {(one["store"], one["store_share"], one["transfers"]) for one in workers}
    assert told == {(None, None, None)}
    assert not [one for one in (*FAMILIES, *OF_STORES) if one in metrics]


def test_siblings_and_deletion_costs_are_off() -> None:
    assert Config().policy.cost.siblings_percent == 0
    assert not Kubernetes("app=vllm").deletion_cost
