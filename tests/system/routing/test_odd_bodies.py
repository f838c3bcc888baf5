"""Bodies that only engines read, behind a real Envoy, with two models."""

import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.system.system import CHAT, System, chat, long_text, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

JSON = {"content-type": "application/json"}
NAN, HALF = float("nan"), "\ud83d"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[System]:
    """Two workers of each of two models; each test has its own prompts."""
    async with running(workers=4, models=("tiny", "second")) as one:
        yield one


async def posted(
    system: System, body: bytes, headers: dict[str, str] | None = None
) -> tuple[int, str, int]:
    """The status, the answering worker, and how many tokens it had cached."""
    url = f"{system.envoy}{CHAT}"
    async with system.session.post(url, data=body, headers=JSON | (headers or {})) as response:
        worker = response.headers.get("x-worker", "")
        if response.status != 200:
            return response.status, worker, 0
        usage = (await response.json())["usage"]
        return 200, worker, usage["prompt_tokens_details"]["cached_tokens"]


def serves(system: System, worker: str) -> str:
    (model,) = (one.settings.model for one in system.workers if one.endpoint == worker)
    return model


@pytest.mark.parametrize(
    ("encoding", "fields"),
    [
        ("utf-8-sig", {}),
        ("utf-16", {}),
        ("utf-8", {"temperature": NAN}),
        ("utf-8", {"metadata": {"user": HALF, "limit": float("-inf")}}),
    ],
)
@pytest.mark.parametrize("model", ["tiny", "second"])
async def test_odd_body_reaches_the_worker_that_holds_its_prefix(
    shared: System, model: str, encoding: str, fields: dict[str, Any]
) -> None:
    text = long_text(f"{model} {encoding} {len(fields)}")
    plain = chat(text, model=model)
    body = json.dumps(plain | fields).encode(encoding)
    status, holder, _ = await posted(shared, body)
    assert (status, serves(shared, holder)) == (200, model)
    await shared.learned(plain, holder)
    follow_up = json.dumps(chat(text + " And then?", model=model) | fields).encode(encoding)
    status, worker, cached = await posted(shared, follow_up)
    assert (status, worker) == (200, holder)
    assert cached > 100


async def test_compressed_body_is_counted_by_its_own_reason(shared: System) -> None:
    body = gzip.compress(json.dumps(chat("hello")).encode())
    for headers in ({}, {"content-encoding": "gzip"}):
        assert (await posted(shared, body, headers))[1]  # a worker answers, as it will
    line = 'kvsteer_decisions_total{model="",reason="unsupported_compression"}'
    assert await shared.metric(line) == 2


async def test_ids_of_a_client_reach_the_worker_that_holds_their_blocks(shared: System) -> None:
    first = chat(long_text("ids"))
    _, holder, _ = await shared.send(first)
    await shared.learned(first, holder)
    tokenize = f"{holder}/tokenize"
    async with shared.session.post(
        f"http://{tokenize}", json={"messages": first["messages"]}
    ) as it:
        ids = (await it.json())["tokens"]
    other = chat("other words", kv_transfer_params={"prompt_token_ids": ids})
    told = await shared.explain(other)
    (one,) = (each for each in told["candidates"] if each["endpoint"] == holder)
    assert told["pick"][0] == holder
    assert one["overlap_tokens"] + one["uncertain_tokens"] > 100
    status, worker, answer = await shared.send(other)
    assert (status, worker) == (200, holder)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
