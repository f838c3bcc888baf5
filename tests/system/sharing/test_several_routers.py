"""Several routers behind one Envoy, as `kvsteer envoy` prints it for them."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import yaml

from extproc.config.schema import Config
from extproc.envoy.envoy_config import render
from tests.ports import free_port
from tests.system.configuration import ENVOY_WAITS
from tests.system.ingresses.other_router import OtherRouter, decisions, other_router
from tests.system.system import System, chat, long_text, running
from tests.waiting import until

# That so many are all of one router has a chance of one in 2,048; of the most, of none to speak of.
CONVERSATIONS, MOST_CONVERSATIONS = 12, 60

# Of each worker: so many that nothing is evicted.
BLOCKS = 20_000
HEADER = "X-Session-Id"


class Routers:
    """The system's own router, the first, and one more; Envoy knows both."""

    def __init__(self, system: System, other: OtherRouter) -> None:
        self.system = system
        self.other = other

    async def decided(self) -> tuple[int, int]:
        """How many requests the first router, 0 if it does not run, and the other decided."""
        first = self.system.router
        runs = first is not None and first.returncode is None
        mine = await decisions(self.system.session, self.system.metrics) if runs else 0
        return mine, await self.other.decisions()

    async def send(self, conversation: str = "") -> str:
        """Sends a request that nobody has sent before; returns the worker that answered."""
        headers = {HEADER: conversation} if conversation else {}
        prompt = chat(long_text(f"{conversation} {next(_NUMBERS)}"))
        status, worker, answer = await self.system.send(prompt, headers=headers)
        assert status == 200, answer
        return worker

    async def passed_unsteered(self) -> int:
        """Requests that Envoy let pass because no router answered."""
        return await self._stat("failure_mode_allowed")

    async def failed_checks(self) -> int:
        """How often Envoy found that a router is not ready, or got no answer."""
        return await self._stat("health_check.failure")

    async def healthy(self) -> int:
        return await self._stat("membership_healthy")

    async def _stat(self, name: str) -> int:
        url = f"{self.system.envoy_admin}/stats?filter=(kvsteer|ext_proc).*{name}$"
        async with self.system.session.get(url) as response:
            lines = (await response.text()).splitlines()
        return sum(int(line.rpartition(" ")[2]) for line in lines)

    async def until_healthy(self, count: int) -> None:
        async def is_so() -> bool:
            return await self.healthy() == count

        await until(is_so, f"Envoy finds {count} routers ready")


_NUMBERS = iter(range(10**6))


def patient(config: Config) -> str:
    """The printed configuration of an Envoy that waits for a busy router's word on its health too.

    A dead router refuses connections, and one that is not ready says so: it waits for neither.
    """
    tree = yaml.safe_load(render(config))
    clusters = tree["static_resources"]["clusters"]
    (check,) = [check for one in clusters for check in one.get("health_checks", [])]
    check["timeout"] = ENVOY_WAITS
    return yaml.safe_dump(tree, sort_keys=False)


@contextlib.asynccontextmanager
async def two(
    choice: str, extproc: dict[str, Any] | None = None, dead: int = 0, **changes: Any
) -> AsyncIterator[Routers]:
    """Runs both routers, and an Envoy that also has addresses of `dead` routers that never run.

    extproc: further keys of that section. changes: sections to replace in the other's
    configuration.
    """
    listen = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    addresses = [*listen, *(f"127.0.0.1:{free_port()}" for _ in range(dead))]
    envoy = {
        "listen": f"127.0.0.1:{free_port()}",
        "admin": f"127.0.0.1:{free_port()}",
        "routers": {"addresses": addresses, "choice": choice},
    }
    sections = {"extproc": {"listen": listen[0], **(extproc or {})}, "envoy": envoy}
    async with (
        running(changes=sections, envoy_config=patient, blocks=BLOCKS) as system,
        other_router(system, listen[1], **changes) as other,
    ):
        yield Routers(system, other)


@contextlib.asynccontextmanager
async def under_load(routers: Routers) -> AsyncIterator[None]:
    """Four clients, each of which asks again when it is answered; every answer has to be 200."""
    is_over = asyncio.Event()

    async def client() -> None:
        while not is_over.is_set():
            await routers.send()

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(client())
        try:
            yield
        finally:
            is_over.set()


def heavy_text(seed: str) -> str:
    """A text long enough that no difference in load outweighs it."""
    return " ".join(long_text(f"{seed} {part}") for part in range(6))


@pytest.mark.slow
async def test_standby_takes_over_with_a_warm_index_and_gives_back() -> None:
    async with two("standby") as routers:
        system, other = routers.system, routers.other
        await routers.until_healthy(2)
        holder = system.workers[1]
        warm = [heavy_text(f"warm {number}") for number in range(8)]
        for text in warm:
            await system.serve(holder, text)

        async def is_warm() -> bool:
            told = [await other.explain(text) for text in warm]
            return all(any(c["overlap_tokens"] for c in one["candidates"]) for one in told)

        await until(is_warm, "the standby knows what the worker holds")
        async with under_load(routers):
            for _ in range(10):
                await routers.send()
            assert (await routers.decided())[1] == 0
            await system.stop_router()

            async def has_taken_over() -> bool:
                return await other.decisions() > 5

            await until(has_taken_over, "the standby decides")
            await routers.until_healthy(1)
            passed = await routers.passed_unsteered()
            for text in warm:
                status, worker, _ = await system.send(chat(text))
                assert (status, worker) == (200, holder.endpoint)
            assert await routers.passed_unsteered() == passed
            await system.start_router()
            await routers.until_healthy(2)

        async def has_given_back() -> bool:
            await routers.send()
            return (await routers.decided())[0] > 0

        await until(has_given_back, "the first one decides")
        before = await routers.decided()
        for _ in range(10):
            await routers.send()
        assert await routers.decided() == (before[0] + 10, before[1])


async def decided_for(routers: Routers, number: int) -> int | None:
    """Which router decided for all requests of a conversation, None if both did."""
    before = await routers.decided()
    for _ in range(3):
        await routers.send(f"conversation {number}")
    after = await routers.decided()
    told = [there - here for here, there in zip(before, after, strict=True)]
    assert sum(told) == 3
    return told.index(3) if 3 in told else None


async def routers_of(
    routers: Routers, conversations: range, expected: list[int] | None = None
) -> list[int]:
    """Which router decided for each conversation, while Envoy finds both ready.

    If it is none, or not the expected one, Envoy found a router failing meanwhile, as it may on a
    busy machine; then they are asked again.
    """
    while True:
        await routers.until_healthy(2)
        failed = await routers.failed_checks()
        each = [await decided_for(routers, number) for number in conversations]
        found = [one for one in each if one is not None]
        if len(found) == len(each) and expected in (None, found):
            return found
        assert await routers.failed_checks() > failed, (each, expected)


@pytest.mark.slow
async def test_conversation_stays_with_its_router_while_it_runs() -> None:
    async with two("conversation") as routers:
        conversations = range(0)
        found: list[int] = []
        while set(found) != {0, 1}:  # their ports decide, which are drawn
            more = range(len(found), len(found) + CONVERSATIONS)
            assert more.stop <= MOST_CONVERSATIONS
            found += await routers_of(routers, more)
            conversations = range(more.stop)
        await routers_of(routers, conversations, found)
        await routers.system.stop_router()
        await routers.until_healthy(1)
        assert {await decided_for(routers, number) for number in conversations} == {1}
        assert await routers.passed_unsteered() == 0
        await routers.system.start_router()
        await routers_of(routers, conversations, found)


@pytest.mark.slow
async def test_requests_without_a_conversation_are_spread_over_the_routers() -> None:
    async with two("conversation") as routers:
        await routers.until_healthy(2)
        for _ in range(40):
            await routers.send()
        assert min(await routers.decided()) > 5
        assert await routers.passed_unsteered() == 0


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["any", "standby"])
async def test_leaving_router_loses_no_request(choice: str) -> None:
    async with two(choice, {"leave_ms": 3_000}) as routers:
        await routers.until_healthy(2)
        async with under_load(routers):
            leaving = asyncio.create_task(routers.system.stop_router(signal.SIGTERM))
            await routers.until_healthy(1)
            await leaving
            before = (await routers.decided())[1]
            for _ in range(10):
                await routers.send()
        assert (await routers.decided())[1] >= before + 10
        assert await routers.passed_unsteered() == 0
        assert routers.system.router is not None
        assert routers.system.router.returncode == 0


@pytest.mark.parametrize(
    "choice",
    ["any", *(pytest.param(one, marks=pytest.mark.slow) for one in ("standby", "conversation"))],
)
async def test_router_killed_between_requests_loses_none(choice: str) -> None:
    async with two(choice) as routers:
        await routers.until_healthy(2)
        for number in range(6):
            await routers.send(f"conversation {number}")
        await routers.system.stop_router()
        for number in range(6):
            await routers.send(f"conversation {number}")
        assert await routers.passed_unsteered() == 0


async def test_router_that_is_not_ready_is_not_asked() -> None:
    listed = {"endpoint": "127.0.0.1:1", "events": {"zmq": f"tcp://127.0.0.1:{free_port()}"}}
    waits: dict[str, Any] = {"workers": [listed], "events": {"ready_deadline_ms": 600_000}}
    async with two("any", **waits) as routers:

        async def has_begun() -> bool:
            return (await routers.other.readiness())[0] == 503

        await until(has_begun, "the other router says that it is not ready")
        await routers.until_healthy(1)
        for _ in range(20):
            await routers.send()
        assert await routers.decided() == (20, 0)


async def test_new_router_is_ready_without_replays() -> None:
    waits = {"ready_deadline_ms": 600_000}
    async with running(changes={"events": waits}) as system:
        listed = yaml.safe_load(system.config_file.read_text())["workers"]
        for worker in listed:
            del worker["events"]["replay"]
        async with other_router(system, workers=listed) as newcomer:
            await until(newcomer.is_ready, "it is ready")
            assert await newcomer.feeds() == {"degraded"}
            text = long_text("after it came")
            await system.serve(system.workers[0], text)

            async def is_learned() -> bool:
                candidates = (await newcomer.explain(text))["candidates"]
                return any(one["overlap_tokens"] for one in candidates)

            await until(is_learned, "it knows what was stored since")


@pytest.mark.slow
async def test_dead_routers_are_not_asked() -> None:
    async with two("any", dead=3) as routers:
        await routers.until_healthy(2)
        for _ in range(30):
            await routers.send()
        assert sum(await routers.decided()) == 30
        assert await routers.passed_unsteered() == 0
