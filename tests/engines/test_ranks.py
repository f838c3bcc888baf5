"""A real vLLM engine of two ranks: predictions are exact, or not certain, on each API.

tests/engines/test_vllm.py says what is needed.
"""

import asyncio
import random
from pathlib import Path

import pytest

from tests.engines import vllm_engine
from tests.engines.test_vllm import MISSING, Body, asked, report, router_before, text
from tests.system.system import System
from tests.waiting import until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]

RANKS, BLOCKS, REQUESTS, CLIENTS = 2, 400, 60, 3
COMPARED = 'kvsteer_prediction_error_tokens_count{model="tiny",sign="%s"}'


async def counted(system: System) -> dict[str, float]:
    return {
        sign: await system.metric(COMPARED % sign) or 0.0 for sign in ("exact", "over", "under")
    }


async def send(system: System, kind: str) -> dict[str, float]:
    """Sends conversations of one API; returns how their predictions compared."""
    before, chances = await counted(system), random.Random(kind)
    numbers = iter(range(REQUESTS))

    async def client() -> None:
        for number in numbers:
            system_turn = {"role": "system", "content": text(f"{kind} {number % 6}", 90)}
            user = {"role": "user", "content": text((kind, chances.random()), 30)}
            path, body = asked(kind, [system_turn, user])
            async with system.session.post(f"{system.envoy}{path}", json=body) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()

    await asyncio.gather(*(client() for _ in range(CLIENTS)))

    async def all_compared() -> bool:
        now = await counted(system)
        return sum(now.values()) - sum(before.values()) >= REQUESTS

    await until(all_compared, "all predictions are compared")
    return {sign: count - before[sign] for sign, count in (await counted(system)).items()}


async def test_predictions_are_never_over_on_any_api_of_a_worker_of_two_ranks(
    tmp_path: Path,
) -> None:
    async with (
        vllm_engine.running(tmp_path, BLOCKS, buffer_batches=10_000, ranks=RANKS) as engines,
        router_before(engines, tmp_path) as system,
    ):
        found = {}
        for kind in ("chat", "completion", "messages", "responses"):
            found[kind] = await send(system, kind)
        (worker,) = await system.status()
        pins: list[Body] = worker["pins"]
        report("compared by API", found)
        report("pins", pins)
        assert {kind: each["over"] for kind, each in found.items()} == dict.fromkeys(found, 0.0)
        assert all(found[kind]["exact"] > REQUESTS / 2 for kind in ("chat", "messages"))
        assert all(pin["named"] and not pin["ignored"] for pin in pins)
