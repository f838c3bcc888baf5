import asyncio
from collections.abc import AsyncIterator

import pytest

from extproc.fleet.asking.polling import PeriodicCheck, Poll, Polling, Question
from tests.extproc.fleet.answering import worker
from tests.extproc.fleet.asked import client
from tests.waiting import until

NEVER = 3600.0
QUOTED = "what a request said"


@pytest.fixture
async def polling() -> AsyncIterator[Polling]:
    one = Polling()
    yield one
    await one.close()


def question(at_once: int = 9, retry_seconds: float = 0.01) -> Question:
    return Question("test", asyncio.Semaphore(at_once), retry_seconds)


async def test_poll_continues_after_a_failed_question(
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


async def test_poll_repeats_as_its_question_returns_until_cancelled(
    polling: Polling,
) -> None:
    asked = 0

    async def ask() -> float:
        nonlocal asked
        asked += 1
        return 0.0 if asked < 3 else NEVER

    poll = polling.poll(question(), "a", ask)
    await until(lambda: asked == 3)
    poll.ask_now()
    await until(lambda: asked == 4)
    poll.cancel()
    poll.ask_now()
    others: list[float] = []

    async def ask_other() -> float:
        others.append(0.0)
        return 0.0

    other = polling.poll(question(), "b", ask_other)
    await until(lambda: len(others) >= 3)
    other.cancel()
    assert asked == 4


async def test_poll_asks_once_more_if_called_during_its_question(polling: Polling) -> None:
    asked, may_end = 0, asyncio.Event()

    async def ask() -> float:
        nonlocal asked
        asked += 1
        await may_end.wait()
        return NEVER

    poll = polling.poll(question(), "a", ask)
    await until(lambda: asked == 1)
    poll.ask_now()
    may_end.set()
    await until(lambda: asked == 2)
    poll.cancel()


async def test_question_limits_its_parallel_polls_independently_of_others(
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


async def test_check_that_fails_is_repeated_and_ends_no_other_check(
    polling: Polling, caplog: pytest.LogCaptureFixture
) -> None:
    looks = 0
    failures = 0

    def fail() -> None:
        nonlocal failures
        failures += 1
        raise ValueError(QUOTED)

    def check() -> None:
        nonlocal looks
        looks += 1

    polling.start(
        [PeriodicCheck(fail, "it cannot be seen", 0.001), PeriodicCheck(check, "", 0.001)]
    )
    await until(lambda: looks >= 2 and failures >= 2)
    assert "it cannot be seen: ValueError" in caplog.text
    assert QUOTED not in caplog.text


async def test_client_reads_a_bounded_part_of_answers_with_status_200_only() -> None:
    async with worker(told="x" * 1000) as endpoint, client() as one:
        assert await one.get(endpoint, "/told", 9.0, 5) == (200, b'"xxxx')
        assert await one.get(endpoint, "/told", 9.0) == (200, b"")
        assert await one.get(endpoint, "/other", 9.0, 5) == (404, b"")


async def test_poll_cancelled_by_its_own_question_asks_no_more(polling: Polling) -> None:
    asked = 0

    async def ask() -> float:
        nonlocal asked
        asked += 1
        poll.cancel()
        return 0.0

    other_asked = 0

    async def ask_other() -> float:
        nonlocal other_asked
        other_asked += 1
        return 0.0

    poll = polling.poll(question(), "a", ask)
    other = polling.poll(question(), "b", ask_other, 0.001)
    await until(lambda: other_asked >= 5)
    other.cancel()
    assert asked == 1


async def test_run_logs_the_failure_of_a_background_task(
    polling: Polling, caplog: pytest.LogCaptureFixture
) -> None:
    async def failing() -> None:
        raise RuntimeError("nobody thought of this")

    polling.run(failing())
    await until(lambda: "a question to a worker failed" in caplog.messages)
