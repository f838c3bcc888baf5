"""A router that is killed and started beside real vLLM engines whose buffers are short.

Without its state file it would begin `degraded` each time: of the batches that the engines have
published, they can replay the last hundred. `test_vllm.py` says what this needs.
"""

import asyncio
import contextlib
import signal
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.engines import vllm_engine
from tests.engines.held import Held
from tests.engines.test_vllm import MISSING, Fleet, log_lines, report, router_before

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

# A kill leaves no time to write: the buffers reach back to the last write.
WRITE_MS = 1_000

# At once, so that a whole round of them fits into the buffers.
CLIENTS = 2

# What is predicted when a request is sent may change until the engine begins it.
TIMING = {"evicted", "stored_meanwhile"}


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


@contextlib.asynccontextmanager
async def talking(fleet: Fleet) -> AsyncIterator[Counter[str]]:
    """Keeps sending requests, each of which has to be answered; counts them."""
    counts: Counter[str] = Counter()
    is_over = asyncio.Event()

    async def client() -> None:
        while not is_over.is_set():
            await fleet.converse(1)
            counts["answered"] += 1

    clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
    try:
        yield counts
    finally:
        is_over.set()
        await asyncio.gather(*clients)


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
    total, errors = await fleet.credits()
    assert total > 0
    assert errors == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_restarted_router_is_certain_before_its_first_pick(
    fleet: Fleet, number: signal.Signals
) -> None:
    await asyncio.gather(*(fleet.fill(at, PUBLISHED_BATCHES) for at in range(len(fleet.engines))))
    await fleet.converse(40)
    answered, wrong = 0, Counter[str]()
    for _ in range(RESTARTS // 2):
        async with talking(fleet) as counts:
            await asyncio.sleep(2 * WRITE_MS / 1000)
            lines = len(log_lines(fleet.system))
            await fleet.system.stop_router(number)
            await fleet.system.start_router()
        answered += counts["answered"]
        said = log_lines(fleet.system)[lines:]
        words = "2 workers are known again, 0 are not, 0 have not answered yet"
        assert words in began(said), "\n".join(said)
        await checked(fleet, wrong)
    report(f"{number.name}: answered, predictions that differed", (answered, wrong))
