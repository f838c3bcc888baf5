import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from extproc.config.schema import WorkerSettings
from extproc.fleet.discovery.discovery import Discovery, DiscoveryCollector
from extproc.fleet.discovery.view import Fleet, Source, SourceReport, listed
from tests.waiting import until

A, B, C = (WorkerSettings(f"10.0.0.{number}:1") for number in (1, 2, 3))


class OwnAnswer:
    """A source that reports what the test tells it to."""

    def __init__(self, name: str = "file") -> None:
        self.name = name
        self.report: SourceReport | None = None
        self.begun = 0

    async def run(self, report: SourceReport) -> None:
        self.begun += 1
        self.report = report
        await asyncio.Event().wait()

    def see(self, *workers: WorkerSettings, note: str = "") -> None:
        assert self.report is not None
        self.report.view(listed(workers), note)

    def fail(self, fault: str) -> None:
        assert self.report is not None
        self.report.fault(fault)


class Failing(OwnAnswer):
    """A source that fails with its own error."""

    async def run(self, report: SourceReport) -> None:
        self.begun += 1
        raise ValueError(f"not {report}")


class Applied:
    """The fleets that were applied."""

    def __init__(self) -> None:
        self.fleets: list[Fleet] = []
        self.fails = False
        self.tries = 0
        self.now = 100.0

    async def apply(self, fleet: Fleet) -> None:
        self.tries += 1
        if self.fails:
            raise ValueError
        self.fleets.append(fleet)

    @property
    def last(self) -> list[tuple[str, str]]:
        return [(name, one.source) for name, one in self.fleets[-1].items()] if self.fleets else []


@contextlib.asynccontextmanager
async def followed(
    sources: Sequence[Source], static: Sequence[WorkerSettings] = (), max_found: int = 100
) -> AsyncIterator[tuple[Discovery, Applied]]:
    applied = Applied()
    one = Discovery(
        listed(static),
        sources,
        lambda: applied.now,
        max_found=max_found,
        begin_again_seconds=0.001,
    )
    await one.start(applied.apply)
    await asyncio.sleep(0)
    yield one, applied
    await one.close()


def source_of(one: Discovery, name: str) -> dict[str, Any]:
    return next(source for source in one.status() if source["source"] == name)


async def test_discovery_merges_all_views_into_one_fleet() -> None:
    file, names = OwnAnswer(), OwnAnswer("dns:x")
    async with followed([file, names], [A]) as (one, applied):
        file.see(B)
        before = one.is_complete
        names.see(C)
        await until(lambda: len(applied.last) == 3)
        assert (before, one.is_complete) == (False, True)
        assert applied.last == [
            ("10.0.0.1:1", "workers"), ("10.0.0.2:1", "file"), ("10.0.0.3:1", "dns:x"),
        ]  # fmt: skip


async def test_discovery_is_complete_once_every_view_is_applied() -> None:
    file, names = OwnAnswer(), OwnAnswer("dns:x")
    one = Discovery((), [file, names])
    may_end = asyncio.Event()
    seen: list[tuple[bool, int]] = []

    async def apply(fleet: Fleet) -> None:
        seen.append((one.is_complete, len(fleet)))
        await may_end.wait()

    await one.start(apply)
    await asyncio.sleep(0)
    file.see(B)
    await until(lambda: len(seen) == 1)
    names.see(C)
    assert not one.is_complete
    may_end.set()
    await until(lambda: len(seen) == 2)
    assert seen == [(False, 1), (True, 2)]
    await one.close()


async def test_discovery_applies_an_unchanged_view_once() -> None:
    file = OwnAnswer()
    async with followed([file]) as (one, applied):
        file.see(A)
        await until(lambda: len(applied.fleets) == 1)
        applied.now += 5.0
        file.see(A)
        for _ in range(10):  # a change is applied within two turns of the loop
            await asyncio.sleep(0)
        assert (applied.tries, source_of(one, "file")["age_seconds"]) == (1, 0.0)


async def test_discovery_logs_a_fault_once_and_shows_it_until_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = OwnAnswer()
    async with followed([file]) as (one, applied):
        file.see(A)
        await until(lambda: len(applied.fleets) == 1)
        applied.now += 3600.0
        file.fail("gone")
        file.fail("gone")
        assert source_of(one, "file") == {
            "source": "file", "workers": 1, "age_seconds": 3600.0, "fault": "gone", "note": "",
            "faults": 1,
        }  # fmt: skip
        assert caplog.text.count("gone") == 1
        assert (one.fault("file"), one.fault("workers")) == ("gone", "")
        assert file.report is not None
        file.report.confirm()
        assert (one.fault("file"), len(applied.fleets)) == ("", 1)
        file.fail("gone")
        assert source_of(one, "file")["faults"] == 2


async def test_discovery_names_no_last_view_in_a_fault_before_the_first_view(
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = OwnAnswer()
    async with followed([file]):
        file.fail("missing")
        file.see(A)
        file.fail("gone")
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "discovery: file: missing; it has listed no workers yet",
        "discovery: file: gone; its last list is still used",
    ]


async def test_discovery_shows_doubles_and_notes() -> None:
    file = OwnAnswer()
    async with followed([file], [A]) as (one, applied):
        file.see(A, B, note="a pod is odd")
        await until(lambda: bool(applied.fleets))
        double = "10.0.0.1:1 is taken from workers, which names it too"
        assert source_of(one, "file")["note"] == f"a pod is odd; {double}"
        file.see(B)
        await until(lambda: source_of(one, "file")["note"] == "")


async def test_view_of_too_many_workers_is_a_fault() -> None:
    file = OwnAnswer()
    async with followed([file], max_found=1) as (one, applied):
        file.see(A, B)
        assert one.fault("file") == "lists 2 workers; the limit is 1"
        assert applied.fleets == []


async def test_discovery_restarts_a_source_that_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing, file = Failing(), OwnAnswer("dns:x")
    async with followed([failing, file]) as (one, applied):
        await until(lambda: failing.begun > 2)
        assert one.fault("file") == "ended with ValueError"
        (record,) = caplog.records
        assert record.exc_info
        file.see(A)
        await until(lambda: bool(applied.fleets))


async def test_discovery_applies_a_view_after_one_that_failed() -> None:
    file = OwnAnswer()
    async with followed([file]) as (_, applied):
        applied.fails = True
        file.see(A)
        await until(lambda: applied.tries == 1)
        applied.fails = False
        file.see(A, B)
        await until(lambda: len(applied.last) == 2)


async def test_discovery_metrics_show_every_source() -> None:
    file = OwnAnswer()
    async with followed([file], [A]) as (one, _):
        file.fail("gone")
        samples = {
            (sample.name, sample.labels["source"]): sample.value
            for family in DiscoveryCollector(one.status).collect()
            for sample in family.samples
        }
        assert samples == {
            ("kvsteer_discovery_workers", "workers"): 1,
            ("kvsteer_discovery_workers", "file"): 0,
            ("kvsteer_discovery_age_seconds", "workers"): 0.0,
            ("kvsteer_discovery_fault", "workers"): 0,
            ("kvsteer_discovery_fault", "file"): 1,
            ("kvsteer_discovery_faults_total", "workers"): 0,
            ("kvsteer_discovery_faults_total", "file"): 1,
        }
