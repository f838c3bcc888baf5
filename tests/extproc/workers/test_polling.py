import asyncio
from collections.abc import AsyncIterator

import pytest

from extproc.workers.polling import Look, Poll, Polling, Question
from tests.extproc.workers.answering import worker
from tests.extproc.workers.asked import client, until

NEVER = 3600.0


@pytest.fixture
async def polling() -> AsyncIterator[Polling]:
    one = Polling()
    yield one
    await one.close()


def question(at_once: int = 9, retry_seconds: float = 0.01) -> Question:
    return Question("test", asyncio.Semaphore(at_once), retry_seconds)


async def test_a_question_that_fails_ends_nothing(
    polling: Polling, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []
    polls: list[Poll] = []

    def failing(name: str) -> Poll:
        async def ask() -> float:
            asked.append(name)
            raise RuntimeError("nobody thought of this")

        return polling.poll(question(), name, ask)

    polls = [failing(name) for name in "ab"]
    await until(lambda: asked.count("a") > 1 and asked.count("b") > 1)
    for poll in polls:
        poll.cancel()
    assert "worker a could not be asked" in caplog.messages


async def test_a_worker_is_asked_again_as_its_answer_says_and_no_more_once_cancelled(
    polling: Polling,
) -> None:
    asked = 0

    async def ask() -> float:
        nonlocal asked
        asked += 1
        return 0.0 if asked < 3 else NEVER

    poll = polling.poll(question(), "a", ask)
    await until(lambda: asked == 3)
    poll.now()
    await until(lambda: asked == 4)
    poll.cancel()
    poll.now()
    others: list[float] = []

    async def ask_other() -> float:
        others.append(0.0)
        return 0.0

    other = polling.poll(question(), "b", ask_other)
    await until(lambda: len(others) >= 3)
    other.cancel()
    assert asked == 4


async def test_one_that_is_wanted_while_it_is_asked_is_asked_once_more(polling: Polling) -> None:
    asked, may_end = 0, asyncio.Event()

    async def ask() -> float:
        nonlocal asked
        asked += 1
        await may_end.wait()
        return NEVER

    poll = polling.poll(question(), "a", ask)
    await until(lambda: asked == 1)
    poll.now()
    may_end.set()
    await until(lambda: asked == 2)
    poll.cancel()


async def test_so_many_are_asked_at_once_and_those_of_another_question_besides(
    polling: Polling,
) -> None:
    asked: list[str] = []

    async def ask(name: str) -> float:
        asked.append(name)
        await asyncio.Event().wait()
        return NEVER

    one, other = question(at_once=2), question(at_once=1)
    for name in "abc":
        polling.poll(one, name, lambda name=name: ask(name))  # type: ignore[misc]
    polling.poll(other, "d", lambda: ask("d"))
    await until(lambda: len(asked) >= 3)
    await asyncio.sleep(0)
    assert sorted(asked) == ["a", "b", "d"]


async def test_a_look_that_fails_ends_no_other(
    polling: Polling, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extproc.workers.polling.LOOK_SECONDS", 0.001)
    looks = 0

    def fail() -> None:
        raise RuntimeError

    def look() -> None:
        nonlocal looks
        looks += 1

    polling.start([Look(fail, "it cannot be seen"), Look(look, "")])
    await until(lambda: looks >= 2)
    assert "it cannot be seen" in caplog.messages


async def test_of_an_answer_so_much_is_read_and_nothing_but_of_200() -> None:
    async with worker(told="x" * 1000) as endpoint, client() as one:
        assert await one.get(endpoint, "/told", 9.0, 5) == (200, b'"xxxx')
        assert await one.get(endpoint, "/told", 9.0) == (200, b"")
        assert await one.get(endpoint, "/other", 9.0, 5) == (404, b"")
