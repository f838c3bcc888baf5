"""Long bodies are edited in turn: what one client sends delays itself."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from extproc.base.errors import UnclearError
from extproc.serving.turns import MAX_ALL_BYTES, MAX_WAITING_BYTES, VERY_LONG_BYTES, Turns

LONG, VERY_LONG = VERY_LONG_BYTES, VERY_LONG_BYTES + 1
QUARTER = MAX_WAITING_BYTES // 4


class Stage:
    """Turns whose first body is held until the others wait. order: of those that were edited."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.order: list[str] = []
        self._may_go_on = threading.Event()
        self._tasks: list[asyncio.Task[str]] = []

    def begin(self, name: str, whose: bytes, size: int) -> asyncio.Task[str]:
        job = self._named(name)
        task = asyncio.create_task(self.turns.run(whose, size, job))
        self._tasks.append(task)
        return task

    def _named(self, name: str) -> Callable[[], str]:
        def edit() -> str:
            if name == "first":
                self._may_go_on.wait(60)
            self.order.append(name)
            return name

        return edit

    async def end(self) -> list[str]:
        await asyncio.sleep(0)  # all tasks have entered their queues
        self._may_go_on.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return self.order


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    one = Stage()
    yield one
    await one.end()


async def test_one_body_after_another_of_each_client(stage: Stage) -> None:
    for name, whose in (("first", b"a"), ("a2", b"a"), ("a3", b"a"), ("b1", b"b"), ("c1", b"c")):
        stage.begin(name, whose, VERY_LONG)
    assert await stage.end() == ["first", "b1", "c1", "a2", "a3"]


async def test_who_sent_much_waits_for_who_sent_little(stage: Stage) -> None:
    stage.begin("first", b"a", QUARTER)
    stage.begin("a2", b"a", QUARTER)
    for n in range(3):
        stage.begin(f"b{n}", b"b", VERY_LONG)
    assert await stage.end() == ["first", "b0", "b1", "b2", "a2"]


async def test_short_body_does_not_wait_for_a_very_long_one(stage: Stage) -> None:
    stage.begin("first", b"a", VERY_LONG)
    assert await stage.begin("short", b"a", LONG) == "short"


async def test_client_has_a_bounded_place_to_wait(stage: Stage) -> None:
    stage.begin("first", b"a", VERY_LONG)
    for n in range(4):
        stage.begin(f"a{n}", b"a", QUARTER)
    with pytest.raises(UnclearError, match="crowded"):
        await stage.begin("too many", b"a", VERY_LONG)
    assert await stage.end() == ["first", "a0", "a1", "a2", "a3"]


async def test_who_has_most_makes_room_for_others(stage: Stage) -> None:
    stage.begin("first", b"a", VERY_LONG)
    lost = [stage.begin(f"a{n}", b"a", QUARTER) for n in range(4)][-1]
    for n in range((MAX_ALL_BYTES - MAX_WAITING_BYTES) // QUARTER):
        stage.begin(f"b{n}", b"%d" % (n // 2), QUARTER)
    stage.begin("new", b"new", VERY_LONG)
    with pytest.raises(UnclearError, match="crowded"):
        await lost
    order = await stage.end()
    assert "new" in order
    assert "a3" not in order


async def test_body_of_whom_all_others_have_less_finds_no_room(stage: Stage) -> None:
    stage.begin("first", b"a", VERY_LONG)
    for n in range(MAX_ALL_BYTES // QUARTER):
        stage.begin(f"a{n}", b"%d" % n, QUARTER)
    with pytest.raises(UnclearError, match="crowded"):
        await stage.begin("more", b"0", QUARTER)


async def test_body_whose_request_has_ended_is_not_edited(stage: Stage) -> None:
    stage.begin("first", b"a", VERY_LONG)
    ended = stage.begin("ended", b"a", VERY_LONG)
    await asyncio.sleep(0)
    ended.cancel()
    stage.begin("next", b"a", VERY_LONG)
    assert await stage.end() == ["first", "next"]


async def test_request_that_ends_while_it_is_edited_holds_up_no_other(stage: Stage) -> None:
    ended = stage.begin("first", b"a", VERY_LONG)
    await asyncio.sleep(0)
    ended.cancel()
    stage.begin("next", b"a", VERY_LONG)
    assert await stage.end() == ["first", "next"]


async def test_error_of_a_job_is_its_own() -> None:
    turns = Turns()

    def fail() -> None:
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        await turns.run(b"a", VERY_LONG, fail)
    assert await turns.run(b"a", VERY_LONG, lambda: 1) == 1
