"""What live conversations need of the caches, and who waits for room: GET /contexts."""

from typing import Any

import aiohttp

from extproc.routing.claims.live_contexts import Context
from tests.extproc.admin.serving import Served

WORKER = "127.0.0.1:1"


async def contexts(client: aiohttp.ClientSession, served: Served) -> list[dict[str, Any]]:
    async with client.get(f"{served.url}/contexts") as response:
        found: list[dict[str, Any]] = await response.json()
        return found


def live(served: Served, tokens: float, cache_tokens: int | None = 100_000) -> None:
    """Has a conversation of so many tokens live on the worker."""
    holdings = served.workers.candidates.holdings(WORKER)
    holdings.capacity_tokens = cache_tokens
    holdings.contexts.count(served.workers.monotonic(), Context(tokens))


async def test_nothing_is_said_of_caches_of_unknown_size(
    served: Served, client: aiohttp.ClientSession
) -> None:
    live(served, 1_000.0, cache_tokens=None)
    assert await contexts(client, served) == []


async def test_nothing_is_said_while_no_conversation_lives(
    served: Served, client: aiohttp.ClientSession
) -> None:
    live(served, 0.0)
    (model,) = await contexts(client, served)
    assert (model["says"], model["more_workers"]) == ("", 0)


async def test_workers_that_are_missing_are_named(
    served: Served, client: aiohttp.ClientSession
) -> None:
    live(served, 260_000.0)
    now = served.workers.monotonic()
    records = served.workers.candidates.holdings(WORKER).contexts
    records.note_return(now - 60.0, 60.0, Context(5 * 220_000.0))
    (model,) = await contexts(client, served)
    assert model["more_workers"] > 1
    needed = model["needed_tokens"] / model["cache_tokens"]
    assert model["says"] == (
        f"live contexts fill 260% of the caches; those that return need {needed:.0%}: "
        f"{model['more_workers']} more workers would hold them"
    )


async def test_those_that_wait_are_shown_in_their_order(
    served: Served, client: aiohttp.ClientSession
) -> None:
    live(served, 90_000.0)
    line, now = served.router.ledger.lines.of("m"), served.workers.monotonic()
    line.join(0xAB, 12_000.0, 0, 0, now - 41.0)
    line.leave(line.join(0xCD, 9_000.0, 0, 0, now - 1.0), now)
    (model,) = await contexts(client, served)
    assert model["says"].endswith("; 1 request waits for room, the longest for 41 s")
    first, second = model["places"]
    assert (first["conversation"], first["tokens"]) == (f"{0xAB:016x}", 12_000)
    assert (first["is_away"], second["is_away"], model["waiting"]) == (False, True, 1)
