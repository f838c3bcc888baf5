"""A router that is killed and started beside real vLLM engines whose buffers are short.

Without its state file it would begin `degraded` each time: of the batches that the engines have
published, they can replay the last hundred. `test_vllm.py` says what this needs.
"""

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Self

import pytest
import pytest_asyncio

from tests import copies
from tests.engines import vllm_engine
from tests.engines.held_blocks import Held
from tests.engines.test_vllm import (
    KINDS,
    MISSING,
    Fleet,
    asked,
    log_lines,
    report,
    router_before,
    text,
)
from tests.waiting import until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(3600),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]

BLOCKS = (900, 1_200)
BUFFER_BATCHES = 100
PUBLISHED_BATCHES = 3 * BUFFER_BATCHES
RESTARTS = 20
REPLACEMENTS = 5

# A kill leaves no time to write: the buffers reach back to the last write.
WRITE_MS = 1_000

CLIENTS = 2

# What a router knows outlives a kill if the buffers reach back to the last write, however long the
# next one takes to start: the clients wait once so many batches came since.
MAX_BATCHES_SINCE_WRITE = 60

# What is predicted when a request is sent may change until the engine begins it.
TIMING = {"evicted", "stored_meanwhile", "uncertain"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """The engines, and a router with a state file and Envoy in front of them."""
    directory = tmp_path_factory.mktemp("engines")
    state = {"file": str(directory / "state"), "interval_ms": WRITE_MS}
    async with vllm_engine.running(directory, *BLOCKS, buffer_batches=BUFFER_BATCHES) as engines:
        held = [Held(one.ports.events) for one in engines]
        async with router_before(engines, directory, state=state) as system:
            yield Fleet(engines, held, system)
        await asyncio.gather(*(one.close() for one in held))


def written_ns(fleet: Fleet) -> int:
    """When the state file was last written."""
    return fleet.system.config_file.with_name("state").stat().st_mtime_ns


def is_rewritten(fleet: Fleet, since_ns: int) -> bool:
    return written_ns(fleet) != since_ns


class Talk:
    """Requests that are sent all the time, from conversations that nobody continues.

    lost: answers other than 200 while the router was away or began. elsewhere: the same while it
    ran: an engine closes an idle connection just when Envoy uses it.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.answered = self.lost = self.elsewhere = 0
        self.is_restarting = False
        self._fleet = fleet
        self._is_over = asyncio.Event()
        self._written_ns, self._batches = 0, [0 for _ in fleet.held]

    async def __aenter__(self) -> Self:
        self._is_over.clear()
        self._clients = [asyncio.create_task(self._client()) for _ in range(CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over.set()
        await asyncio.gather(*self._clients)

    def _fits(self) -> bool:
        """Whether the buffers of both engines still reach back to the last write of the state."""
        batches = [one.batches for one in self._fleet.held]
        if is_rewritten(self._fleet, self._written_ns):
            self._written_ns, self._batches = written_ns(self._fleet), batches
        since = max(now - then for now, then in zip(batches, self._batches, strict=True))
        return since < MAX_BATCHES_SINCE_WRITE

    async def _client(self) -> None:
        chances, system = self._fleet.chances, self._fleet.system
        while not self._is_over.is_set():
            await until(lambda: self._is_over.is_set() or self._fits(), "the state is written")
            words = text(chances.randrange(5), 90), text(chances.random(), 40)
            messages = [
                {"role": role, "content": said}
                for role, said in zip(("system", "user"), words, strict=True)
            ]
            path, body = asked(chances.choice(KINDS), messages)
            was_restarting = self.is_restarting
            async with system.session.post(f"{system.envoy}{path}", json=body) as answer:
                await answer.read()
            if answer.status == 200:
                self.answered += 1
            elif was_restarting or self.is_restarting:
                self.lost += 1
            else:
                self.elsewhere += 1


def began(lines: list[str]) -> str:
    """What a router's log says of its state file before it serves."""
    serving = next(n for n, line in enumerate(lines) if "serving ext_proc" in line)
    return next(line for line in lines[:serving] if "are known again" in line)


async def checked(fleet: Fleet, wrong: Counter[str]) -> None:
    """Compares predictions since the router's start with the engines' reports, and all credits."""
    await fleet.settled()
    _, causes = await fleet.compared(0)
    wrong.update(causes)
    assert causes.keys() <= TIMING
    total = 0
    while not total:  # the last conversations may be over, or evicted
        await fleet.converse(8)
        await fleet.settled()
        total, errors = await fleet.credits()
        assert errors == []


async def replaced(fleet: Fleet) -> None:
    """Another router takes over from the one that runs."""
    old = fleet.system.router
    assert old is not None
    with fleet.system.log.open("ab") as log:
        command = ["serve", "--config", str(fleet.system.config_file), "--take-over"]
        fleet.system.router = await copies.started(command, log)
    assert await asyncio.wait_for(old.wait(), 120) == 0


async def restarted(fleet: Fleet, number: signal.Signals) -> None:
    """The router is ended by a signal, and started again."""
    await fleet.system.stop_router(number)
    await fleet.system.start_router()


@pytest.mark.parametrize(
    ("how", "times"),
    [
        (partial(restarted, number=signal.SIGTERM), RESTARTS // 2),
        (partial(restarted, number=signal.SIGKILL), RESTARTS // 2),
        (replaced, REPLACEMENTS),
    ],
    ids=["ended", "killed", "replaced"],
)
async def test_new_router_is_certain_before_its_first_pick(
    fleet: Fleet, how: Callable[[Fleet], Awaitable[None]], times: int
) -> None:
    await asyncio.gather(*(fleet.fill(at, PUBLISHED_BATCHES) for at in range(len(fleet.engines))))
    await fleet.converse(40)
    talk, wrong = Talk(fleet), Counter[str]()
    for _ in range(times):
        async with talk:
            for _ in range(2):
                before = written_ns(fleet)
                await until(partial(is_rewritten, fleet, before), "the state is written")
            lines = len(log_lines(fleet.system))
            talk.is_restarting = True
            await how(fleet)
            talk.is_restarting = False
        said = log_lines(fleet.system)[lines:]
        words = "2 workers are known again, 0 are not, 0 have not answered yet"
        assert words in began(said), "\n".join(said)
        await checked(fleet, wrong)
    figures = (talk.answered, talk.lost, talk.elsewhere, wrong)
    report("answered, lost, lost while nothing happened, predictions that differed", figures)
    assert talk.lost == 0
