"""What a process knows that begins to read late: all that the one that follows the feeds does."""

import asyncio
import functools
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.feeds.turns import Turns
from kvstate.index.owner import Owner
from kvstate.overlap import Prompt, Tokens
from kvstate.relay.holdings import Holding
from kvstate.relay.passing import StorePlace, TakeStore
from kvstate.relay.records import StoreBeginning
from kvstate.rows.format import SavedOwner
from kvstate.steps import Steps
from kvstate.stores.stores import StoreRules
from tests.kvstate.publishing import block, chain
from tests.kvstate.relay.relaying import Process, Publisher
from tests.waiting import until

WORKERS = ("v", "w")
STORES = [StoreRules("shared")]

# Blocks 1 to 6 are a chain, of which parts wait for their parents.
PROMPT = chain(6)
NUMBERS = st.integers(1, 6)
STEPS = st.one_of(
    st.tuples(
        st.sampled_from(["store", "share", "remove", "withdraw"]),
        st.sampled_from(WORKERS),
        NUMBERS,
    ),
    st.tuples(st.sampled_from(["restart", "begin"]), st.sampled_from(WORKERS), st.just(1)),
)
CHANGES = st.tuples(st.sampled_from(["share", "withdraw"]), st.sampled_from(WORKERS), NUMBERS)
LEAVING = st.tuples(
    st.sampled_from(["leave", "return"]), st.sampled_from(["leader", "reader"]), st.just(1)
)


@pytest.fixture
def socket() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvsteer-") as directory:
        yield Path(directory) / "feeds"


def shared(number: int) -> dict[str, Any]:
    """The event by which a worker tells that it put block `number` into the store."""
    return {
        "type": "BlockStored",
        "block_hashes": [number],
        "parent_block_hash": number - 1 if number > 1 else None,
        "token_ids": [number],
        "block_size": 1,
        "lora_id": None,
        "medium": "STORAGE",
        "locality": "REMOTE",
    }


def event(step: str, number: int) -> object:
    match step:
        case "store":
            return block(number, number - 1 if number > 1 else None)
        case "share":
            return shared(number)
        case "remove":
            return ["BlockRemoved", [number]]
        case _:
            fields = {"block_hashes": [number], "medium": "STORAGE", "locality": "REMOTE"}
            return {"type": "BlockRemoved", **fields}


class Host:
    """Two workers that share a store, one process that follows them, and one that reads."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.publishers = {name: Publisher() for name in WORKERS}
        self.process = functools.partial(Process, self.publishers["w"], stores=STORES)
        self.leader, self.reader = self.process(), self.process()

    async def start(self) -> None:
        await self.leader.lead(self.socket)
        self.follow_other(self.leader)
        self.read()

    def follow_other(self, process: Process) -> None:
        process.fleet.add_source("v", "m", 1, self.publishers["v"].connect)

    def read(self) -> None:
        self.reader.read(self.socket)
        self.follow_other(self.reader)

    async def begin(self) -> None:
        """Ends the process that reads; another one begins."""
        await self.reader.end()
        self.reader = self.process()
        self.read()

    def publish(self, step: str, worker: str, number: int) -> None:
        publisher = self.publishers[worker]
        if step == "restart":
            publisher.restart()
        publisher.publish(event("store" if step == "restart" else step, number))

    async def until_same(self) -> None:
        await until(self._is_leader_done)
        await until(self._is_same)

    def _is_leader_done(self) -> bool:
        feeds = {name: self.leader.fleet.feeds.statuses(name)[0] for name in WORKERS}
        return all(
            feed.last_sequence == self.publishers[name].number - 1 and not feed.unapplied
            for name, feed in feeds.items()
        )

    async def _is_same(self) -> bool:
        if await self.leader.position() != await self.reader.position():
            return False
        return known(self.leader) == known(self.reader)

    async def end(self) -> None:
        await self.reader.end()
        await self.leader.end()


def known(process: Process) -> list[object]:
    """What a process answers, and how much it holds."""
    fleet = process.fleet
    found = fleet.stores.stored(PROMPT)
    stored = [(one.store, one.tokens, sorted(one.workers)) for one in found]
    orphans = [fleet.feeds.statuses(name)[0].orphans for name in WORKERS]
    states = [fleet.feeds.state(name) for name in WORKERS]
    overlaps = sorted(fleet.blocks.overlaps(PROMPT).items())
    return [stored, list(fleet.stores.blocks()), orphans, states, overlaps]


async def play(steps: list[tuple[str, str, int]], socket: Path) -> None:
    host = Host(socket)
    await host.start()
    for name in WORKERS:
        host.publish("store", name, 1)
    for step, worker, number in steps:
        if step == "begin":
            await host.begin()
        else:
            host.publish(step, worker, number)
    await host.until_same()
    await host.begin()
    await host.until_same()
    for number in range(1, 7):  # the parents of all that waits
        host.publish("share", "w", number)
        host.publish("store", "v", number)
    await host.until_same()
    await host.end()


@given(st.lists(STEPS, max_size=8))
def test_a_process_that_joins_at_any_time_answers_as_the_one_that_follows(
    steps: list[tuple[str, str, int]],
) -> None:
    with tempfile.TemporaryDirectory(prefix="kvsteer-") as directory:
        asyncio.run(play(steps, Path(directory) / "feeds"))


async def test_a_process_that_joins_gets_all_blocks_that_wait_for_their_parents(
    socket: Path,
) -> None:
    count = 3_000
    waiting = list(range(2, count + 1))
    host = Host(socket)
    await host.start()
    host.publish("store", "v", 1)
    host.publishers["w"].publish(["BlockStored", waiting, 1, waiting, 1])
    await host.until_same()
    await host.begin()
    await host.until_same()
    assert host.reader.fleet.feeds.statuses("w")[0].orphans == count - 1
    host.publish("store", "w", 1)
    await host.until_same()
    prompt = Prompt("m", Tokens("I", range(1, count + 2)))
    assert host.reader.fleet.blocks.overlaps(prompt)["w"].certain_tokens == count
    await host.end()


async def test_a_process_that_joins_while_a_store_changes_misses_none_of_it(socket: Path) -> None:
    host = Host(socket)
    await host.start()
    for number in range(1, 200):
        host.publish("share", "v" if number % 2 else "w", number)
        if number % 50 == 0:
            await host.begin()
        await asyncio.sleep(0)
    await host.until_same()
    assert dict(host.reader.fleet.stores.blocks()) == {"shared": 199}
    await host.end()


class Counted:
    """Counts the stores that a process is sent, and notes for which workers this is done."""

    def __init__(self, host: Host) -> None:
        self.sent = 0
        self.done: set[str] = set()
        self._hand_over = host.leader.fleet.rows.copy_stores
        host.leader.passing.hand_over_stores = self._counted

    async def _counted(
        self, workers: Collection[str], known: Collection[StorePlace], take: TakeStore
    ) -> None:
        def counted(beginning: StoreBeginning, holding: Holding) -> Steps[None]:
            self.sent += 1
            yield from take(beginning, holding)

        await self._hand_over(workers, known, counted)
        self.done.update(workers)


async def test_a_worker_that_has_shared_nothing_brings_no_store_again(socket: Path) -> None:
    host = Host(socket)
    counted = Counted(host)
    await host.start()
    host.publish("store", "v", 1)
    host.publish("share", "w", 1)
    await host.until_same()
    before = counted.sent
    for process in (host.leader, host.reader):
        process.fleet.add_source("x", "m", 1, Publisher().connect)
    await until(lambda: "x" in counted.done)
    assert counted.sent == before > 0
    await host.end()


async def test_a_worker_that_returns_brings_what_it_shared_meanwhile(socket: Path) -> None:
    host = Host(socket)
    await host.start()
    host.publish("store", "v", 1)
    host.publish("share", "w", 1)
    await host.until_same()
    await host.reader.fleet.remove("v")
    host.publish("share", "v", 2)
    await until(lambda: dict(host.leader.fleet.stores.blocks()) == {"shared": 2})
    host.follow_other(host.reader)
    await host.until_same()
    assert dict(host.reader.fleet.stores.blocks()) == {"shared": 2}
    await host.end()


async def test_a_worker_that_shared_before_it_is_wanted_brings_the_store(socket: Path) -> None:
    host = Host(socket)
    await host.leader.lead(socket)
    host.follow_other(host.leader)
    host.reader.read(socket)
    host.publish("share", "w", 1)
    await until(lambda: dict(host.reader.fleet.stores.blocks()) == {"shared": 1})
    host.publish("share", "v", 2)
    await until(lambda: dict(host.leader.fleet.stores.blocks()) == {"shared": 2})
    host.follow_other(host.reader)
    await until(lambda: dict(host.reader.fleet.stores.blocks()) == {"shared": 2})
    await host.end()


@pytest.fixture
def slices_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything else goes on after each step, as on a machine that is busy."""
    monkeypatch.setattr(Turns, "is_over", lambda _: True)


@pytest.mark.usefixtures("slices_of_one_step")
async def test_a_worker_that_leaves_at_any_step_ends_no_reading(socket: Path) -> None:
    host = Host(socket)
    await host.start()
    for name in WORKERS:
        host.publish("store", name, 1)
    await host.until_same()
    for rounds in range(100):
        host.publish("store", "v", 1 + rounds % 6)
        host.publish("share", "v", 1 + rounds % 6)
        for _ in range(rounds):
            await asyncio.sleep(0)
        await host.reader.fleet.remove("v")
        host.follow_other(host.reader)
    await host.until_same()
    await host.end()


@pytest.mark.usefixtures("slices_of_one_step")
async def test_a_worker_that_is_saved_may_leave_while_its_process_takes_over(
    socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, steps, saving = Host(socket), list[int](), Owner.saving

    def saving_slowly(owner: Owner, rows: list[bytes]) -> Steps[SavedOwner]:
        for _ in range(10_000 if owner.worker == "v" else 0):
            steps.append(owner.blocks)
            yield
        return (yield from saving(owner, rows))

    monkeypatch.setattr(Owner, "saving", saving_slowly)
    await host.start()
    for name in WORKERS:
        host.publish("store", name, 1)
    await host.until_same()
    saved = asyncio.create_task(host.reader.position())
    await until(lambda: steps)
    await host.leader.end()
    assert host.reader.task is not None
    await host.reader.task
    taking_over = asyncio.create_task(host.reader.fleet.relayed.take_over())
    await asyncio.sleep(0)  # it has taken over w
    await host.reader.fleet.remove("v")
    assert await saved == [1]
    await taking_over
    await host.reader.end()


async def leave_and_return(steps: list[tuple[str, str, int]], socket: Path) -> None:
    host = Host(socket)
    await host.start()
    for name in WORKERS:
        host.publish("store", name, 1)
    away: set[str] = set()
    for step, place, number in steps:
        process = host.leader if place == "leader" else host.reader
        if step == "leave" and place not in away:
            away.add(place)
            await process.fleet.remove("v")
        elif step == "return" and place in away:
            away.discard(place)
            host.follow_other(process)
        elif step not in ("leave", "return"):
            host.publish(step, place, number)
    for place in away:
        host.follow_other(host.leader if place == "leader" else host.reader)
    await host.until_same()
    await host.end()


@given(st.lists(st.one_of(CHANGES, LEAVING), max_size=8))
def test_stores_are_the_same_once_all_workers_are_back(steps: list[tuple[str, str, int]]) -> None:
    with tempfile.TemporaryDirectory(prefix="kvsteer-") as directory:
        asyncio.run(leave_and_return(steps, Path(directory) / "feeds"))
