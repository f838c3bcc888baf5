"""A worker dies, or its host falls silent: this is detected, and it is left out until it is back.

The router's configuration asks for no probes. The workers' processes are real.
"""

import time
from typing import Any

import pytest

from tests.system.conftest import Row
from tests.system.load import body, client, counted, open_loop, post
from tests.system.parts import Part
from tests.system.stage import Stage
from tests.system.system import CHAT
from tests.waiting import until

REQUESTS = 100


class Seen:
    """What the router says of the first worker."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._session = client()

    async def down(self) -> str:
        """Why it is down, "" if it is not."""
        async with self._session.get(f"{self._stage.admin}/workers") as response:
            (one,) = [
                worker
                for worker in await response.json()
                if worker["endpoint"] == self._stage.endpoints[0]
            ]
        return str(one["down"])

    async def first_picks(self, behind: int) -> tuple[int, int]:
        """How many decisions after this number picked it first, and the last one's number."""
        url = f"{self._stage.admin}/decisions?since={behind}"
        async with self._session.get(url) as response:
            told = (await response.json())["decisions"]
        picks = [one["pick"][0] for one in told]
        return picks.count(self._stage.endpoints[0]), told[-1]["id"] if told else behind

    async def becomes(self, *, down: bool) -> float:
        """Waits until the worker is down, or up again; returns the seconds that this took."""
        began = time.monotonic()

        async def so() -> bool:
            return bool(await self.down()) is down

        await until(so, "down" if down else "not down any more")
        return time.monotonic() - began

    async def explanation(self) -> dict[str, Any]:
        """The decision for a new prompt."""
        envelope = {"path": CHAT, "headers": {}, "body": body()}
        async with self._session.post(f"{self._stage.admin}/explain", json=envelope) as response:
            decision: dict[str, Any] = await response.json()
            return decision

    async def close(self) -> None:
        await self._session.close()


def fails(worker: Part, *, silently: bool) -> None:
    if silently:
        worker.stop()
    else:
        worker.kill()


def comes_back(worker: Part, *, silently: bool) -> None:
    if silently:
        worker.go_on()
    else:
        worker.start()


@pytest.mark.slow
@pytest.mark.parametrize("silently", [False, True], ids=["killed", "silent"])
async def test_dead_worker_is_not_picked_until_it_is_back(
    stage: Stage,
    table: list[Row],
    silently: bool,
) -> None:
    seen = Seen(stage)
    worker = stage.workers[0]
    async with (
        client() as session,
        open_loop(lambda: post(session, stage.url, body()), rate=20) as load,
    ):
        await load.goes_on(20)
        await seen.becomes(down=False)
        fails(worker, silently=silently)
        took = await seen.becomes(down=True)
        _, last = await seen.first_picks(0)
        await load.goes_on(REQUESTS)
        picks, last = await seen.first_picks(last)
        comes_back(worker, silently=silently)
        back = await seen.becomes(down=False)

        async def picked_again() -> bool:
            return (await seen.first_picks(last))[0] > 0

        await until(picked_again, "it is picked again")
    await seen.close()
    note = f"left out after {took:.1f} s, back after {back:.1f} s"
    kind = "silent" if silently else "killed"
    lost, begun = counted(load.outcomes)
    table.append(Row(f"worker {kind}, no probe configured", "open",
                     len(load.outcomes), lost, begun, note=note))  # fmt: skip
    assert (picks, lost) == (0, 0)


@pytest.mark.slow
async def test_dead_workers_are_picked_where_all_are_dead(stage: Stage) -> None:
    seen = Seen(stage)
    for worker in stage.workers:
        worker.kill()
    await seen.becomes(down=True)
    decision = await seen.explanation()
    await seen.close()
    assert decision["verdict"] == "steer"
    assert decision["pick"]
