import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from extproc.envoy.endpoint_files import Lane, assignment, lanes_in, path_of
from extproc.running.eds import EndpointFiles
from tests.waiting import until

ONE, TWO = Lane("10.0.0.1:8000", is_open=True), Lane("[fd00::2]:8000", is_open=False)


class Fleet:
    """The lanes to be written."""

    def __init__(self, *lanes: Lane) -> None:
        self.lanes = {"workers": list(lanes)}
        self.unplaced: set[str] | None = set()
        self.changed = asyncio.Event()

    def next_change(self) -> asyncio.Event:
        """Returns an event that is set at the next change of the fleet."""
        return self.changed

    def note_change(self) -> None:
        """Notes that anything in the fleet may have changed."""
        self.changed.set()
        self.changed = asyncio.Event()


@contextlib.asynccontextmanager
async def written(directory: Path, fleet: Fleet) -> AsyncIterator[EndpointFiles]:
    lanes, unplaced = lambda: fleet.lanes, lambda: fleet.unplaced
    files = EndpointFiles(str(directory), lanes, unplaced, fleet.next_change, again_seconds=0.01)
    await files.start()
    yield files
    await files.close()


def read(directory: Path) -> list[Lane]:
    return lanes_in(Path(path_of(str(directory), "workers")).read_bytes())


def names_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def leave(directory: Path, *lanes: Lane) -> None:
    Path(path_of(str(directory), "workers")).write_text(assignment("workers", lanes))


async def test_endpoint_files_follow_the_fleet(tmp_path: Path) -> None:
    fleet = Fleet(ONE)
    async with written(tmp_path, fleet):
        assert read(tmp_path) == [ONE]
        fleet.lanes["workers"] = [TWO]
        fleet.note_change()
        await until(lambda: read(tmp_path) == [TWO])
    assert names_in(tmp_path) == ["workers.json"]


async def test_endpoint_files_are_not_rewritten_unchanged(tmp_path: Path) -> None:
    fleet = Fleet(ONE)
    async with written(tmp_path, fleet):
        path = tmp_path / "workers.json"
        path.unlink()
        fleet.note_change()
        fleet.lanes["other"] = []
        await until((tmp_path / "other.json").exists)
        assert not path.exists()


async def test_endpoint_files_of_an_earlier_run_stay_until_all_workers_are_known(
    tmp_path: Path,
) -> None:
    leave(tmp_path, TWO)
    fleet = Fleet(ONE)
    fleet.unplaced = None
    async with written(tmp_path, fleet):
        assert read(tmp_path) == [ONE, TWO]
        fleet.unplaced = set()
        fleet.note_change()
        await until(lambda: read(tmp_path) == [ONE])


async def test_endpoint_of_an_earlier_run_stays_until_its_model_is_known(
    tmp_path: Path,
) -> None:
    leave(tmp_path, ONE, TWO)
    fleet = Fleet()
    fleet.unplaced = {ONE.endpoint}
    async with written(tmp_path, fleet):
        assert read(tmp_path) == [ONE]
        fleet.unplaced = set()
        fleet.note_change()
        await until(lambda: read(tmp_path) == [])


async def test_unwritable_lanes_are_a_fault_until_they_change(
    tmp_path: Path,
) -> None:
    fleet = Fleet(ONE)
    async with written(tmp_path, fleet) as files:
        fleet.lanes["workers"] = [Lane("nowhere", is_open=True)]
        fleet.note_change()
        await until(lambda: files.fault == "the files cannot be written: ValueError")
        fleet.lanes["workers"] = [TWO]
        await until(lambda: read(tmp_path) == [TWO])


async def test_missing_directory_is_a_fault_until_it_exists(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "later"
    async with written(directory, Fleet(ONE)) as files:
        assert files.fault.endswith("workers.json: No such file or directory")
        directory.mkdir()
        await until(lambda: files.fault == "")
        assert read(directory) == [ONE]
    assert caplog.text.count("Envoy does not see new workers") == 1
