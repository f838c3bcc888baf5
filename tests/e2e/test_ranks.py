"""Data-parallel ranks behind one HTTP port: the rank that holds a prompt is named to the engine."""

import contextlib
import socket
from collections.abc import AsyncIterator

from tests.e2e.system import System, chat, long_text, running

RANKS = 3
HEADER = "X-data-parallel-rank"


def free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for port in range(first + 1, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return int(first)


@contextlib.asynccontextmanager
async def a_worker_of_ranks(policy: dict[str, str]) -> AsyncIterator[System]:
    first = free_ports(2 * RANKS)
    async with running(
        1,
        changes={"policy": policy},
        ranks=RANKS,
        events_endpoint=f"tcp://127.0.0.1:{first}",
        replay_endpoint=f"tcp://127.0.0.1:{first + RANKS}",
    ) as system:
        yield system


async def test_a_follow_up_reaches_the_rank_that_holds_its_prefix() -> None:
    async with a_worker_of_ranks({"rank_header": HEADER}) as system:
        endpoint = system.workers[0].endpoint
        for rank in range(RANKS):
            first = chat(long_text(f"seed {rank}"))
            await system.send(first, headers={HEADER: str(rank)})
            await system.learned(first, endpoint)
            follow_up = chat(long_text(f"seed {rank}") + " And then?")
            decision = await system.explain(follow_up)
            _, _, answer = await system.send(follow_up, headers={HEADER: str((rank + 1) % RANKS)})
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert decision["rank"] == rank
            assert cached == decision["candidates"][0]["overlap_tokens"] > 0


async def test_without_the_key_no_rank_is_named() -> None:
    async with a_worker_of_ranks({}) as system:
        first = chat(long_text("seed"))
        await system.send(first, headers={HEADER: "1"})
        await system.learned(first, system.workers[0].endpoint)
        _, _, answer = await system.send(first, headers={HEADER: "2"})
        assert (await system.explain(first))["rank"] is None
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
