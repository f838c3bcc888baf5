import asyncio
import socket

import pytest

from extproc.fleet.asking.asking_times import AskingTimes
from extproc.fleet.identity.resolving import SEVERAL
from tests.extproc.fleet.fleets import workers
from tests.waiting import until

W7 = '{endpoint: "w:7", model: a}'


async def test_host_name_of_a_worker_is_resolved() -> None:
    one = workers('{endpoint: "localhost:7", model: a}')
    assert one.candidates.list_for("a")[0].excluded == "its host name could not be resolved"
    await one.start()
    (candidate,) = one.candidates.list_for("a")
    assert (candidate.name, candidate.excluded) == ("localhost:7", "")
    assert candidate.endpoint in ("127.0.0.1:7", "[::1]:7")
    await one.close()


async def test_address_stays_while_its_name_cannot_be_resolved() -> None:
    answers: list[str] = ["10.0.0.2", "10.0.0.1"]
    failed = 0

    async def look_up(_: str) -> list[str]:
        nonlocal failed
        if not answers:
            failed += 1
            raise socket.gaierror(socket.EAI_AGAIN, "try again")
        return list(answers)

    one = workers(W7, times=AskingTimes(resolve_seconds=0.0), look_up=look_up)
    await one.start()
    assert one.candidates.list_for("a")[0].endpoint == "10.0.0.1:7"
    answers.clear()
    await until(lambda: failed > 1)  # what the first one led to is over
    assert one.candidates.list_for("a")[0].endpoint == "10.0.0.1:7"
    answers.append("10.0.0.3")
    await until(lambda: one.candidates.list_for("a")[0].endpoint == "10.0.0.3:7")
    await one.close()


async def test_start_does_not_wait_for_an_absent_resolver() -> None:
    async def look_up(_: str) -> list[str]:
        await asyncio.Event().wait()
        return []

    one = workers(W7, times=AskingTimes(first_resolve_seconds=0.01), look_up=look_up)
    await one.start()
    assert one.candidates.list_for("a")[0].excluded == "its host name could not be resolved"
    await one.close()


async def test_impossible_host_name_blocks_no_other_resolution() -> None:
    bad = f"{'a' * 70}.example:1"
    one = workers(f'{{endpoint: "{bad}", model: a}}, {{endpoint: "localhost:2", model: a}}')
    await one.start()
    assert [bool(worker.excluded) for worker in one.candidates.list_for("a")] == [True, False]
    await one.close()


async def test_changed_address_removes_the_old_endpoint() -> None:
    answers = ["10.0.0.1"]

    async def look_up(_: str) -> list[str]:
        return list(answers)

    one = workers(W7, times=AskingTimes(resolve_seconds=0.0), look_up=look_up)
    await one.start()
    one.loads.begin("10.0.0.1:7", 10, 0.0)
    before = one.candidates.holdings("w:7")
    answers[:] = ["10.0.0.2"]
    await until(lambda: one.candidates.list_for("a")[0].endpoint == "10.0.0.2:7")
    assert (one.loads.in_flight("10.0.0.1:7"), one.upstreams.get("10.0.0.1:7")) == (0, None)
    assert one.candidates.holdings("w:7") is not before
    await one.close()


async def test_resolution_of_names_repeats_after_any_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers: list[str] | None = ["10.0.0.1"]

    async def look_up(_: str) -> list[str]:
        if answers is None:
            raise RuntimeError("nobody foresaw this")
        return answers

    one = workers(W7, times=AskingTimes(resolve_seconds=0.0), look_up=look_up)
    await one.start()
    answers = None
    await until(lambda: "workers: a name cannot be looked up" in caplog.messages)
    answers = ["10.0.0.3"]
    await until(lambda: one.candidates.list_for("a")[0].endpoint == "10.0.0.3:7")
    await one.close()


async def test_other_addresses_of_a_name_are_told(caplog: pytest.LogCaptureFixture) -> None:
    looked_up = 0

    async def look_up(_: str) -> list[str]:
        nonlocal looked_up
        looked_up += 1
        return ["10.0.0.2", "10.0.0.1"]

    one = workers(W7, times=AskingTimes(resolve_seconds=0.0), look_up=look_up)
    await one.start()
    await until(lambda: looked_up > 2)
    assert [status["other_endpoints"] for status in one.states.statuses()] == [("10.0.0.2:7",)]
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told == [SEVERAL % ("w:7", "10.0.0.2:7", "10.0.0.1:7")]
    await one.close()
