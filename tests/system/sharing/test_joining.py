"""A new replica gets from one that runs what no worker can replay any more."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.extproc.sharing.engine_process import needs_engine, running_engine
from tests.system.ingresses.other_router import OtherRouter, other_router
from tests.system.processes.test_warm_restart import (
    BUFFER_BATCHES,
    CONVERSATIONS,
    WORDS,
    fill,
    held,
)
from tests.system.system import long_text, running
from tests.waiting import until


async def certain(router: OtherRouter) -> list[list[int]]:
    """The tokens that each worker certainly holds of each conversation."""
    found = []
    for number in range(CONVERSATIONS):
        decision = await router.explain(long_text(f"conversation {number}"))
        found.append([one["overlap_tokens"] for one in decision["candidates"]])
    return found


@contextlib.asynccontextmanager
async def meeting(kind: str, folder: Path) -> AsyncIterator[str]:
    """The URL at which routers share."""
    if kind == "directory":
        yield f"directory:{folder}/routers"
        return
    async with running_engine(folder) as engine:
        yield engine.url


@pytest.mark.parametrize(
    ("kind", "has_secret"),
    [
        ("directory", True),
        pytest.param("directory", False, marks=pytest.mark.slow),
        pytest.param("engine", True, marks=[needs_engine, pytest.mark.slow]),
    ],
)
async def test_new_replica_knows_what_no_worker_can_replay(
    kind: str, has_secret: bool, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the secret of this fleet")
    async with contextlib.AsyncExitStack() as stack:
        sharing = {"url": await stack.enter_async_context(meeting(kind, tmp_path))}
        sharing |= {"secret_file": str(secret)} if has_secret else {}
        begun = running(2, changes={"sharing": sharing}, buffer_batches=BUFFER_BATCHES)
        system = await stack.enter_async_context(begun)
        await fill(system)
        before = await held(system)
        assert all(map(any, before))
        async with other_router(system) as other:
            await until(other.is_ready, "the new replica is ready")
            log, _, _ = other.file.with_suffix(".log").read_text().partition("serving ext_proc")
            assert ("another router knows" in log) == (WORDS in log) == has_secret
            assert (await certain(other) == before) == has_secret
            assert await other.feeds() == ({"live"} if has_secret else {"degraded"})
