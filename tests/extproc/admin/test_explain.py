"""POST /explain of requests with tenants and classes: the decision that such a request gets."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extproc.base.engine import Engine, Release
from extproc.requests.request import Head, RoutingRequest
from extproc.requests.request_class import RequestClass
from extproc.requests.tenant_salt import SaltMaker
from extproc.serving.tenants import IsolationOutcome
from extproc.serving.treatment import with_treatment
from tests.extproc.admin.serving import CONFIG, Served, serving

SECRET = b"0123456789abcdef"
PROMPT = [*range(512)]
CLASSES = """
policy:
  classes: {header: x-class, default: people, of: [{name: people}, {name: batch, priority: 10}]}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    return f"{CONFIG}\nisolation: {{header: x-tenant, secret_file: '{secret}'}}{CLASSES}"


async def explained(
    served: Served, path: str = "/v1/completions", own: str | None = None, **headers: str
) -> dict[str, Any]:
    named = {f"X-{name}": value for name, value in headers.items()}
    body = {"model": "m", "prompt": PROMPT, **({} if own is None else {"cache_salt": own})}
    asked = {"path": path, "headers": named, "body": body}
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{served.url}/explain", json=asked) as response,
    ):
        found: dict[str, Any] = await response.json()
        return found


async def send(served: Served, tenant: bytes) -> None:
    """Routes a request of a tenant, which its worker then is expected to hold."""
    salt = SaltMaker(SECRET).salt(tenant, None)
    body = b'{"model":"m","prompt":%b,"cache_salt":"%b"}' % (str(PROMPT).encode(), salt.encode())
    await served.router.route(RoutingRequest(Head("POST", "/v1/completions", None), body))


def claimed(shown: dict[str, Any]) -> int:
    (one,) = shown["candidates"]
    return int(one["speculative_tokens"] + one["approximate_tokens"])


async def test_explain_shows_a_tenant_its_own_cache_alone(config: str) -> None:
    async with serving(config, 20_000) as served:
        await send(served, b"a")
        own, other = await explained(served, Tenant="a"), await explained(served, Tenant="b")
        salt = SaltMaker(SECRET).salt(b"a", None)
        guessed = await explained(served, Tenant="b", own=salt)
    assert claimed(own) > 0
    assert claimed(other) == claimed(guessed) == 0
    assert own["treatment"]["isolation"] == "salted"
    assert "only this tenant's blocks count" in own["treatment"]["why"]


@pytest.mark.parametrize(
    ("path", "headers", "why"),
    [
        ("/v1/completions", {}, "403: the request does not name one tenant"),
        ("/v1/completions", {"Tenant": "a", "tenant": "b"}, "403: the request does not name one"),
        ("/v1/score", {"Tenant": "a"}, "403: this API cannot keep tenants apart"),
    ],
)
async def test_explain_says_why_a_request_is_refused(
    config: str, path: str, headers: dict[str, str], why: str
) -> None:
    async with serving(config, 20_000) as served:
        shown = await explained(served, path, **headers)
    assert (shown["pick"], shown["candidates"], shown["verdict"]) == ([], [], "refused")
    assert why in shown["why"]


async def test_explain_counts_the_queue_of_the_class(config: str) -> None:
    batch = RequestClass("batch", 1, 10, None)
    async with serving(config, 20_000) as served:
        body = b'{"model":"m","prompt":%b}' % str([*range(5_000, 8_000)]).encode()
        head = Head("POST", "/v1/completions", None)
        await served.router.route(RoutingRequest(head, body, of_class=batch))
        shown = [await explained(served, Tenant="a", Class=name) for name in ("people", "batch")]
    queued = [one["candidates"][0]["cost_terms"]["queued"] for one in shown]
    assert queued[0] == 0 < queued[1]
    assert [one["class"] for one in shown] == ["people", "batch"]
    assert "is not known, so it gets no priority" in shown[1]["treatment"]["why"]


BATCH = RequestClass("batch", 1, 10, None)
VLLM, OLD = Engine("vllm", Release(0, 32)), Engine("vllm", Release(0, 9))


@pytest.mark.parametrize(
    ("engine", "path", "priority", "why"),
    [
        (VLLM, "/v1/messages", {"header": "x-vllm-priority", "value": 10}, "gets priority 10 in"),
        (VLLM, "/v1/embeddings", {"field": "priority", "value": 10}, "in the field priority"),
        (OLD, "/v1/messages", None, "vllm 0.9.0 reads no priority on this path"),
        (None, "/v1/messages", None, "is not known"),
    ],
)
def test_treatment_names_the_priority(
    engine: Engine | None, path: str, priority: dict[str, Any] | None, why: str
) -> None:
    treatment = with_treatment({}, IsolationOutcome.SHARED, BATCH, engine, path)["treatment"]
    assert treatment["priority"] == priority
    assert why in treatment["why"]
    assert "the blocks of all tenants count; in class batch" in treatment["why"]


async def test_explain_of_a_router_without_tenants_and_classes_has_no_treatment() -> None:
    async with serving(max_body_bytes=20_000) as served:
        shown = await explained(served, Tenant="a", Class="batch", own="x")
    assert shown["pick"] == ["127.0.0.1:1"]
    assert not any(shown["treatment"].values())
