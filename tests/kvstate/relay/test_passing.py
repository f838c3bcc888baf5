"""How a rank begins to be passed on: in steps, and as one piece of the stream."""

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kvstate.relay import passing
from kvstate.relay.holdings import Holding
from kvstate.relay.records import Beginning, Kind, Record, Wish, encoded, record_at
from kvstate.relay.taps import Tap
from kvstate.steps import Steps
from tests.kvstate.publishing import block
from tests.kvstate.relay.relaying import HELLO, Process, Publisher
from tests.waiting import until


@pytest.fixture
def socket() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvsteer-") as directory:
        yield Path(directory) / "feeds"


class Beginnings:
    """Does something after the first step of each beginning, and counts the steps.

    meanwhile: what it does.
    """

    def __init__(self, leader: Process, meanwhile: Callable[[Steps[None]], object]) -> None:
        self.steps = 0
        self._hand_over, self._meanwhile = leader.fleet.rows.copy_ranks, meanwhile
        leader.passing.hand_over = self._over

    async def _over(self, worker: str, take: passing.TakeRank) -> bool:
        def taken(
            tap: Tap, beginning: Beginning, holding: Holding, trusted: Callable[[], bool]
        ) -> Steps[None]:
            steps = take(tap, beginning, Holding(holding.rows * 5, []), trusted)
            next(steps)
            self._meanwhile(steps)
            for _ in steps:
                self.steps += 1
                yield

        return await self._hand_over(worker, taken)


async def records_of(socket: Path, last: Kind) -> list[Record]:
    """Reads worker "w" as another process does, until a record of this kind comes."""
    reader, writer = await asyncio.open_unix_connection(str(socket))
    for line in (HELLO, Wish("w", True)):
        writer.write(msgspec.json.encode(line) + b"\n")
    data, at, found = b"", 0, list[Record]()
    while not found or found[-1].kind != last:
        if (record := record_at(data, at)) is None:
            data += await asyncio.wait_for(reader.read(65536), 60)
        else:
            found.append(record)
            at += record.size
    writer.close()
    return found


async def followed(socket: Path) -> Process:
    publisher = Publisher()
    leader = Process(publisher)
    await leader.lead(socket)
    publisher.publish(block(1))
    await until(lambda: leader.certain_tokens == 1)
    return leader


async def test_what_happens_while_a_rank_begins_follows_it(
    socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passing, "ROWS_BYTES", 1)
    leader = await followed(socket)

    def meanwhile(_: Steps[None]) -> None:
        leader.fleet.subscriptions.taps.put(encoded(Kind.STATUS, 7))  # type: ignore[union-attr]
        leader.passing.flush()

    beginnings = Beginnings(leader, meanwhile)
    found = await records_of(socket, Kind.STATUS)
    begin = [one.kind for one in found].index(Kind.BEGIN)
    kinds = [one.kind for one in found[begin:]]
    assert kinds == [Kind.BEGIN, *[Kind.ROWS] * 5, Kind.END, Kind.STATUS]
    assert beginnings.steps == 4
    await leader.end()


@pytest.mark.parametrize("is_removed", [True, False])
async def test_a_rank_whose_beginning_does_not_end_is_gone(
    socket: Path, monkeypatch: pytest.MonkeyPatch, *, is_removed: bool
) -> None:
    monkeypatch.setattr(passing, "ROWS_BYTES", 1)
    leader = await followed(socket)

    def end(steps: Steps[None]) -> None:
        if is_removed:
            leader.fleet.subscriptions.taps.remove("w")  # type: ignore[union-attr]
        else:
            steps.close()

    Beginnings(leader, end)
    found = await records_of(socket, Kind.GONE)
    assert Kind.END not in [one.kind for one in found]
    await leader.end()
