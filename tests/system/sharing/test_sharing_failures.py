"""The engine through which two routers share fails, in every way: each goes on alone."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.extproc.sharing.engine_process import EngineProcess, needs_engine, running_engine
from tests.ports import free_port
from tests.system.conftest import Row
from tests.system.load import LOOPS, body, client, counted, post
from tests.system.sharing.link import CUT, Link, linked
from tests.system.stage import Place, Stage, staged
from tests.system.steering import Probes
from tests.waiting import until

pytestmark = [pytest.mark.slow, needs_engine]

AWAY_REQUESTS = 60

# A router is alone after ten ticks and 100 ms; the rest allows for a busy machine.
ALONE_SECONDS = 30.0

ALONE = "not sharing with other routers"
SHARED = "sharing with other routers over"


class Failure:
    """Something that happens to the engine. is_silent: whether no message passes any more."""

    is_silent = True

    def __init__(self, engine: EngineProcess, link: Link) -> None:
        self.engine = engine
        self.link = link

    async def begin(self) -> None:
        """Breaks it."""

    async def end(self) -> None:
        """Repairs it."""


class Stopped(Failure):
    async def begin(self) -> None:
        self.engine.process.send_signal(signal.SIGSTOP)

    async def end(self) -> None:
        self.engine.process.send_signal(signal.SIGCONT)


class Killed(Failure):
    async def begin(self) -> None:
        await self.engine.end()

    async def end(self) -> None:
        await self.engine.start()


class Slow(Failure):
    """Whatever passes takes longer than a router waits for a reply."""

    is_silent = False  # what arrives late is counted

    async def begin(self) -> None:
        await self.link.become("0.3")

    async def end(self) -> None:
        await self.link.become("0")


class Partitioned(Failure):
    """Nothing passes, and no connection ends."""

    async def begin(self) -> None:
        await self.link.become(CUT)

    async def end(self) -> None:
        await self.link.become("0")


class Full(Failure):
    """It has as many clients as it accepts, and the routers are not among them."""

    async def begin(self) -> None:
        self._own = await asyncio.open_connection("127.0.0.1", self.engine.port)
        await self._say("CONFIG SET maxclients 1", "CLIENT KILL TYPE pubsub")

    async def end(self) -> None:
        await self._say("CONFIG SET maxclients 1000")
        self._own[1].close()
        await self._own[1].wait_closed()

    async def _say(self, *commands: str) -> None:
        reader, writer = self._own
        for command in commands:
            writer.write(f"{command}\r\n".encode())
            assert (await reader.readline())[:1] in b"+:"


class Refusing(Failure):
    """It answers every message with an error."""

    async def begin(self) -> None:
        assert "OK" in await self.engine.ask("ACL", "SETUSER", "default", "-publish")

    async def end(self) -> None:
        assert "OK" in await self.engine.ask("ACL", "SETUSER", "default", "+publish")


@pytest.fixture(scope="module")
def ports() -> tuple[int, int]:
    """Where the routers look for the engine."""
    return free_port(), free_port()


@pytest.fixture(scope="module")
def sharing_stage(
    ports: tuple[int, int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    url = f"redis://127.0.0.1:{ports[0]}"
    with staged(tmp_path_factory.mktemp("sharing"), url) as stage:
        yield stage


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[EngineProcess]:
    async with running_engine(tmp_path) as running:
        yield running


@pytest.fixture
async def link(engine: EngineProcess, ports: tuple[int, int]) -> AsyncIterator[Link]:
    async with linked(ports[0], engine.port) as one:
        yield one


@pytest.fixture
async def two(sharing_stage: Stage, link: Link) -> Stage:
    """Two routers behind one Envoy, which share through the link."""
    await asyncio.to_thread(sharing_stage.heal)
    for part in (sharing_stage.routers[1], sharing_stage.envoy_of_two):
        if not part.runs:
            part.start()
        await asyncio.to_thread(part.wait)
    return sharing_stage


class Listener:
    """What the routers say of their sharing."""

    def __init__(self, session: aiohttp.ClientSession, stage: Stage) -> None:
        self._session = session
        self._stage = stage

    async def all_share(self) -> bool:
        """Whether all say that they share, by readiness and metrics."""
        return all([await self._alone(place) == ("ready", "0.0", "1.0") for place in self._places])

    async def all_are_alone(self) -> bool:
        told = [await self._alone(place) for place in self._places]
        return all(words == "ready" and alone == "1.0" for words, alone, _ in told)

    async def none_counts_the_other(self) -> bool:
        """Whether each has forgotten the load of the other."""
        return all([(await self._alone(place))[2] == "0.0" for place in self._places])

    def logged(self) -> list[int]:
        """How many lines each has logged about whether it shares."""
        return [len(lines) for lines in self._lines()]

    def has_warned_at_most_once_since(self, before: list[int]) -> bool:
        """Whether each has warned of its first outage, and at most once since then.

        Outages that repeat, as they do here from test to test, are logged less and less often.
        """
        return all(
            any(ALONE in line for line in lines)
            and sum(ALONE in line for line in lines[logged:]) <= 1
            for lines, logged in zip(self._lines(), before, strict=True)
        )

    def _lines(self) -> list[list[str]]:
        return [
            [line for line in router.log_lines() if ALONE in line or SHARED in line]
            for router in self._stage.routers
        ]

    @property
    def _places(self) -> list[Place]:
        return self._stage.places

    async def _alone(self, place: Place) -> tuple[str, str, str]:
        """The first line of /readyz, and two metrics: alone ("?" if /readyz disagrees), routers."""
        async with self._session.get(f"{place.metrics}/readyz") as response:
            first, _, rest = (await response.text()).partition("\n")
        async with self._session.get(f"{place.metrics}/metrics") as response:
            lines = (await response.text()).splitlines()
        values = dict(line.rpartition(" ")[::2] for line in lines if line[:1] != "#")
        alone = values["kvsteer_sharing_alone"]
        is_said = rest.startswith(ALONE)
        return (
            first,
            alone if is_said == (alone == "1.0") else "?",
            values["kvsteer_sharing_routers"],
        )


# In an open loop as well, what keeps a router waiting for an answer.
@pytest.mark.parametrize(
    ("name", "kind", "loop"),
    [
        ("engine stopped (SIGSTOP), goes on", Stopped, "closed"),
        ("engine stopped (SIGSTOP), goes on", Stopped, "open"),
        ("engine killed, started again", Killed, "closed"),
        ("engine slow (0.3 s a piece)", Slow, "closed"),
        ("engine slow (0.3 s a piece)", Slow, "open"),
        ("engine partitioned, back again", Partitioned, "closed"),
        ("engine full (takes no client)", Full, "closed"),
        ("engine answers errors", Refusing, "closed"),
    ],
)
async def test_routers_without_their_engine_decide_alone(
    two: Stage,
    engine: EngineProcess,
    link: Link,
    table: list[Row],
    name: str,
    kind: type[Failure],
    loop: str,
) -> None:
    failure = kind(engine, link)
    async with client() as session:
        told = Listener(session, two)
        await until(told.all_share, "they share")
        probes = Probes(session, two, two.url_of_two)
        await probes.prepare()
        async with LOOPS[loop](lambda: post(session, two.url_of_two, body())) as load:
            await load.goes_on(30)
            before = told.logged()
            began = time.monotonic()
            await failure.begin()
            await until(told.all_are_alone, "they say that they decide alone")
            alone = time.monotonic() - began
            assert alone < ALONE_SECONDS
            await probes.steered_after(began)
            await load.goes_on(AWAY_REQUESTS)
            assert told.has_warned_at_most_once_since(before)
            if failure.is_silent:
                await until(told.none_counts_the_other, "they count each other no more")
            ended = time.monotonic()
            await failure.end()
            await until(told.all_share, "they share again")
            again = time.monotonic() - ended
            await load.goes_on(30)
    row = Row(name, loop, len(load.outcomes), *counted(load.outcomes))
    note = f"alone after {1e3 * alone:.0f} ms, shared again after {1e3 * again:.0f}"
    table.append(row._replace(note=note))
    assert table[-1].lost_by_us == 0


@pytest.mark.parametrize("loop", ["closed"])
async def test_restarted_sharing_engine_loses_no_request(
    two: Stage, engine: EngineProcess, table: list[Row], loop: str
) -> None:
    async with client() as session:
        told = Listener(session, two)
        await until(told.all_share, "they share")
        async with LOOPS[loop](lambda: post(session, two.url_of_two, body())) as load:
            await load.goes_on(30)
            ended = time.monotonic()
            await engine.end()
            await engine.start()
            await load.goes_on(30)
            await until(told.all_share, "they share again")
            again = time.monotonic() - ended
    row = Row("engine restarted", loop, len(load.outcomes), *counted(load.outcomes))
    table.append(row._replace(note=f"shared again after {1e3 * again:.0f} ms"))
    assert table[-1].lost_by_us == 0
