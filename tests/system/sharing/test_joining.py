"""A new replica gets from one that runs what no worker can replay any more."""

import contextlib
import signal
from pathlib import Path

import pytest

from tests.extproc.sharing.engine_process import needs_engine
from tests.system.ingresses.other_router import OtherRouter, other_router
from tests.system.processes.test_warm_restart import (
    BUFFER_BATCHES,
    CONVERSATIONS,
    STARTS,
    WORDS,
    fill,
    held,
)
from tests.system.sharing.test_sharing import carrier
from tests.system.system import long_text, running
from tests.waiting import until


async def certain(router: OtherRouter) -> list[list[int]]:
    """The tokens that each worker certainly holds of each conversation."""
    found = []
    for number in range(CONVERSATIONS):
        decision = await router.explain(long_text(f"conversation {number}"))
        found.append([one["overlap_tokens"] for one in decision["candidates"]])
    return found


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
        sharing = {"url": await stack.enter_async_context(carrier(kind, tmp_path))}
        sharing |= {"secret_file": str(secret)} if has_secret else {}
        changes = {"sharing": sharing, "events": {"ready_deadline_ms": 600_000}}
        begun = running(2, changes=changes, buffer_batches=BUFFER_BATCHES)
        system = await stack.enter_async_context(begun)
        await fill(system)
        before = await held(system)
        assert all(map(any, before))
        for number in range(STARTS):
            async with other_router(system) as other:
                await until(other.is_ready, "the new replica is ready")
                log, _, _ = other.file.with_suffix(".log").read_text().partition("serving ext_proc")
                if has_secret and WORDS not in log and number < STARTS - 1:
                    continue
                assert ("another router knows" in log) == (WORDS in log) == has_secret
                assert (await certain(other) == before) == has_secret
                assert await other.feeds() == ({"live"} if has_secret else {"degraded"})
                break


@pytest.mark.slow
async def test_state_file_of_another_secret_is_not_used(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the secret of this fleet")
    state = {"file": str(tmp_path / "state")}
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(carrier("directory", tmp_path))
        changes = {"sharing": {"url": url, "secret_file": str(secret)}, "state": state}
        system = await stack.enter_async_context(running(2, changes=changes))
        await system.stop_router(signal.SIGTERM)
        secret.write_text("another secret since then")
        await system.start_router()
        assert "is not used: sharing.secret_file is another one now" in system.log.read_text()
