"""A real vLLM engine with two tenants: neither finds the other's blocks, and each finds its own.

tests/engines/test_vllm.py says what is needed.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from tests.engines import vllm_engine
from tests.engines.test_vllm import MISSING, Body, asked, report, router_before, text
from tests.engines.vllm_engine import BLOCK_TOKENS
from tests.system.system import System
from tests.waiting import until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]

BLOCKS = 400
KINDS = ("chat", "completion", "messages", "responses")
EXACT = 'kvsteer_prediction_error_tokens_count{model="tiny",sign="exact"}'
PREDICTED = 'kvsteer_predicted_cached_tokens_total{model="tiny"}'


@dataclass
class Shared:
    """An engine behind the router, for two tenants."""

    system: System
    compared: int = 0

    async def ask(self, tenant: str, kind: str) -> tuple[int, int]:
        """Sends a tenant's request; returns its predicted and its cached tokens."""
        turns = [{"role": "system", "content": text(kind, 90)}]
        path, body = asked(kind, [*turns, {"role": "user", "content": text("end", 40)}])
        before = await self.system.metric(PREDICTED) or 0
        url, headers = f"{self.system.envoy}{path}", {"x-tenant": tenant}
        async with self.system.session.post(url, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            found: Body = await answer.json()
        self.compared += 1

        async def is_exact() -> bool:
            return (await self.system.metric(EXACT) or 0) >= self.compared

        await until(is_exact, f"{kind} of {tenant} was predicted exactly")
        return int((await self.system.metric(PREDICTED) or 0) - before), cached_of(found)


def cached_of(answer: Body) -> int:
    """The prompt tokens that the engine found in its cache."""
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    if details is None:
        return int(usage.get("cache_read_input_tokens") or 0)
    return int(details["cached_tokens"] or 0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shared]:
    directory = tmp_path_factory.mktemp("tenants")
    secret: Path = directory / "secret"
    secret.write_text("0123456789abcdef")
    rules = {"header": "x-tenant", "secret_file": str(secret)}
    async with (
        vllm_engine.running(directory, BLOCKS, buffer_batches=10_000) as engines,
        router_before(engines, directory, waits=True, isolation=rules) as system,
    ):
        yield Shared(system)


@pytest.mark.parametrize("kind", KINDS)
async def test_tenant_finds_its_own_blocks_and_nobody_elses(shared: Shared, kind: str) -> None:
    first, other = await shared.ask("a", kind), await shared.ask("b", kind)
    again = [await shared.ask(tenant, kind) for tenant in ("a", "b")]
    report(f"predicted and cached tokens, {kind}: a, b, a, b", [first, other, *again])
    assert (first, other) == ((0, 0), (0, 0))
    assert all(predicted == cached >= 2 * BLOCK_TOKENS for predicted, cached in again)


async def test_request_without_a_tenant_does_not_reach_the_engine(shared: Shared) -> None:
    path, body = asked("chat", [{"role": "user", "content": "hello"}])
    async with shared.system.session.post(f"{shared.system.envoy}{path}", json=body) as answer:
        assert answer.status == 403
