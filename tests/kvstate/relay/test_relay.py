"""What several processes of a host know, of which one follows the feeds."""

import asyncio
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.errors import DamagedError
from kvstate.events import Batch, BlocksStored, EventBatch
from kvstate.feeds.feed import FeedState
from kvstate.feeds.feed_times import FeedTimes
from kvstate.feeds.transport import Disconnected
from kvstate.overlap import Prompt, Tokens
from kvstate.relay.records import VERSION, Hello
from tests.kvstate.publishing import block, chain
from tests.kvstate.relay.relaying import Process, Publisher, until_alike, until_same
from tests.waiting import until

# Blocks 1 to 4 are a chain, and 5 is a child of 2.
PARENTS = {1: None, 2: 1, 3: 2, 4: 3, 5: 2}
# After a silence, as on a busy machine, a feed asks for the last batch again.
NEVER_QUIET = FeedTimes(quiet_seconds=1_000.0)

PROMPTS = [chain(4), Prompt("m", Tokens("I", [1, 2, 5, 0]))]

BLOCKS = st.integers(1, 5)
STEPS = st.one_of(
    st.tuples(st.just("store"), BLOCKS),
    st.tuples(st.just("remove"), BLOCKS),
    st.tuples(st.sampled_from(["clear", "miss", "lose", "restart", "die", "begin"]), st.just(1)),
)


@pytest.fixture
def socket() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvsteer-") as directory:
        yield Path(directory) / "feeds"


def publish(publisher: Publisher, step: str, number: int) -> None:
    match step:
        case "store":
            publisher.publish(block(number, PARENTS[number]))
        case "remove":
            publisher.publish(["BlockRemoved", [number]])
        case "clear":
            publisher.publish(["AllBlocksCleared"])
        case "miss" | "lose":
            publisher.publish(block(1), block(2, 1), is_heard=False)
            if step == "lose":
                publisher.forget()
            publisher.publish(block(3, 2))
        case "restart":
            publisher.restart()
            publisher.publish(block(1), block(2, 1))


async def play(steps: list[tuple[str, int]], socket: Path) -> None:
    publisher = Publisher()
    process = functools.partial(Process, publisher)
    alone, leader, reader = process(), process(), process()
    alone.follow()
    await leader.lead(socket)
    reader.read(socket)
    publisher.publish(block(1))
    await until_same(alone, reader, PROMPTS)
    for step, number in [*steps, ("store", 1)]:
        if step == "die":
            await leader.end()
            assert not reader.certain_tokens
            leader, reader = reader, process()
            await leader.take_over(socket)
            reader.read(socket)
        elif step == "begin":
            await reader.end()
            reader = process()
            reader.read(socket)
        publish(publisher, step, number)
        await until(lambda: alone.sequence == publisher.number - 1)
        await until_alike(alone, leader, PROMPTS)
        await until_same(leader, reader, PROMPTS)
    for each in (reader, leader, alone):
        await each.end()


@given(st.lists(STEPS, max_size=8))
def test_a_process_that_reads_knows_what_one_that_follows_knows(
    steps: list[tuple[str, int]],
) -> None:
    with tempfile.TemporaryDirectory(prefix="kvsteer-") as directory:
        asyncio.run(play(steps, Path(directory) / "feeds"))


async def test_a_process_takes_over_without_asking_for_more_than_the_last_batch(
    socket: Path,
) -> None:
    publisher = Publisher()
    leader, reader = Process(publisher), Process(publisher, times=NEVER_QUIET)
    await leader.lead(socket)
    for number in range(1, 4):
        publisher.publish(block(number, PARENTS[number]))
    reader.read(socket)
    await until(lambda: reader.state is FeedState.LIVE)
    await leader.end()
    await reader.take_over(socket)
    await until(lambda: reader.state is FeedState.LIVE)
    assert publisher.transports[-1].replays == [2]
    assert reader.fleet.blocks.overlaps(chain(3))["w"].certain_tokens == 3
    await reader.end()


async def test_a_process_of_another_version_is_not_answered(socket: Path) -> None:
    publisher = Publisher()
    leader, reader = Process(publisher), Process(publisher, Hello(VERSION + 1, "layout", "proof"))
    await leader.lead(socket)
    reader.read(socket)
    assert reader.task is not None
    assert not await reader.task
    assert reader.state is FeedState.CONNECTING
    for process in (leader, reader):
        await process.end()


async def test_a_worker_that_the_leader_follows_no_more_is_forgotten(socket: Path) -> None:
    publisher = Publisher()
    leader, reader = Process(publisher), Process(publisher)
    await leader.lead(socket)
    publisher.publish(block(1))
    reader.read(socket)
    await until(lambda: reader.held(PROMPTS) == leader.held(PROMPTS) != [None, None])
    await leader.fleet.remove("w")
    await until(lambda: reader.state is FeedState.CONNECTING)
    assert reader.held(PROMPTS) == [None, None]
    leader.follow()  # as after a change of its configuration
    await until(lambda: reader.state is FeedState.LIVE)
    assert reader.held(PROMPTS)[0]
    for process in (leader, reader):
        await process.end()


async def test_a_process_that_reads_saves_what_another_can_begin_with(socket: Path) -> None:
    publisher = Publisher()
    leader, reader = Process(publisher), Process(publisher)
    await leader.lead(socket)
    for number in range(1, 4):
        publisher.publish(block(number, PARENTS[number]))
    reader.read(socket)
    await until(lambda: reader.state is FeedState.LIVE)
    (saved,) = [one async for one in reader.fleet.rows.saved_ranks(lambda _: "engine")]
    assert (saved.rank.feed.next, saved.rank.owner.blocks) == (3, 3)
    for process in (leader, reader):
        await process.end()


async def test_a_process_that_ends_before_it_is_connected_reads_nothing(socket: Path) -> None:
    publisher = Publisher()
    leader, reader = Process(publisher), Process(publisher)
    await leader.lead(socket)
    reader.read(socket)
    assert reader.task is not None
    assert reader.reading is not None
    await asyncio.sleep(0)  # it begins to connect
    reader.reading.close()
    assert not await asyncio.wait_for(reader.task, 60)
    for process in (leader, reader):
        await process.end()


async def test_damaged_records_end_the_reading(socket: Path) -> None:
    reader = Process(Publisher())

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\xff" * 64)
        writer.close()

    server = await asyncio.start_unix_server(answer, str(socket))
    reader.read(socket)
    assert reader.task is not None
    with pytest.raises(DamagedError):
        await reader.task
    server.close()
    await reader.end()


class Listener:
    """Listens to all workers while it is not idle."""

    def __init__(self) -> None:
        self.is_idle = True
        self.heard: list[BlocksStored] = []

    def listens(self, _: str) -> bool:
        return not self.is_idle

    def hear(self, _: str, event: BlocksStored) -> None:
        self.heard.append(event)


async def test_a_listener_hears_what_another_process_follows(socket: Path) -> None:
    publisher = Publisher()
    leader, reader, listener = Process(publisher), Process(publisher), Listener()
    reader.fleet.index.listen(listener)
    await leader.lead(socket)
    reader.read(socket)
    publisher.publish(block(1))
    await until(lambda: reader.certain_tokens == 1)
    listener.is_idle = False
    publisher.publish(block(2, 1))  # the leader may pass on its changes before it knows
    await until(lambda: reader.certain_tokens == 2)
    await until(lambda: leader.is_heard)
    publisher.publish(block(3, 2))
    await until(lambda: reader.certain_tokens == 3)
    listener.is_idle = True
    publisher.publish(block(4, 3))
    await until(lambda: reader.certain_tokens == 4)
    assert [event.hashes for event in listener.heard][-1:] == [[3]]
    await reader.end()
    await until(lambda: not leader.is_heard)
    await leader.end()


async def test_typed_batches_and_news_reach_a_process_that_reads(socket: Path) -> None:
    publisher = Publisher()
    leader, reader = Process(publisher), Process(publisher)
    await leader.lead(socket)
    reader.read(socket)
    await until(lambda: reader.state is FeedState.LIVE)
    store = BlocksStored([1], None, Tokens("I", [1]), 1)
    publisher.transports[0].put(Batch(0, EventBatch(0.0, [store])))
    await until(lambda: reader.certain_tokens == 1)
    publisher.number = 1
    publisher.publish(["AllBlocksCleared"])
    await until(lambda: reader.news == ["emptied"])
    publisher.restart()
    publisher.publish(block(1))
    await until(lambda: reader.news == ["emptied", "emptied"])
    publisher.transports[0].put(Disconnected())
    await until(lambda: reader.news[2:] == ["cut"])
    for process in (leader, reader):
        await process.end()
