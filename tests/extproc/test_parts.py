"""The parts of a router start in order, and stop in the reverse order, whatever fails."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import StartError
from extproc.config.reader import parse
from extproc.running.app import running
from extproc.running.parts import Part, started, task_part
from tests.ports import free_port
from tests.waiting import until

NAMES = st.lists(st.sampled_from("abcdef"), unique=True, min_size=1)


class Diary:
    """Parts that note what was done to them."""

    def __init__(self, names: Sequence[str], failing: str = "") -> None:
        self.notes: list[str] = []
        self.failing = failing
        self.parts = [self.part(name) for name in names]

    def part(self, name: str) -> Part:
        async def start() -> None:
            await asyncio.sleep(0)
            self.note(f"start {name}")

        return Part(name, start, lambda: self.note(f"stop {name}"))

    def note(self, what: str) -> None:
        self.notes.append(what)
        if what == self.failing:
            raise StartError(what)

    async def run(self) -> None:
        async with started(self.parts):
            self.notes.append("run")


@given(NAMES)
def test_parts_stop_in_the_reverse_order_of_their_start(names: Sequence[str]) -> None:
    diary = Diary(names)
    asyncio.run(diary.run())
    starts, stops = [f"start {one}" for one in names], [f"stop {one}" for one in names]
    assert diary.notes == [*starts, "run", *reversed(stops)]


@given(NAMES, st.data())
def test_part_that_fails_to_start_stops_itself_and_those_before_it(
    names: Sequence[str], data: st.DataObject
) -> None:
    failing = data.draw(st.sampled_from(names))
    before = names[: names.index(failing) + 1]
    diary = Diary(names, f"start {failing}")
    with pytest.raises(StartError):
        asyncio.run(diary.run())
    assert diary.notes == [f"start {one}" for one in before] + [
        f"stop {one}" for one in reversed(before)
    ]


@given(NAMES, st.data())
def test_part_that_fails_to_stop_leaves_the_others_stopped(
    names: Sequence[str], data: st.DataObject
) -> None:
    diary = Diary(names, f"stop {data.draw(st.sampled_from(names))}")
    with pytest.raises(StartError):
        asyncio.run(diary.run())
    assert diary.notes[-len(names) :] == [f"stop {one}" for one in reversed(names)]


async def test_task_part_ends_its_task_when_it_is_stopped() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with started([task_part("work", work)]):
        await asyncio.sleep(0)
    assert ended.is_set()


async def test_router_that_cannot_listen_leaves_no_task_behind() -> None:
    async with asyncio.timeout(60):
        taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = taken.sockets[0].getsockname()[1]
        config = parse(
            f"""
            models: [{{name: m}}]
            workers: [{{endpoint: "127.0.0.1:1"}}]
            extproc: {{listen: "127.0.0.1:{port}"}}
            admin: {{listen: "127.0.0.1:{free_port()}"}}
            metrics: {{listen: "127.0.0.1:{free_port()}"}}
            """,
            "test",
        )
        before = asyncio.all_tasks()
        with pytest.raises(StartError, match="cannot listen"):
            async with running(config):
                pass
        taken.close()
        await until(lambda: asyncio.all_tasks() <= before)
