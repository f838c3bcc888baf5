import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from extproc.discovery import endpoint_files
from extproc.discovery.endpoint_files import EndpointFiles
from extproc.envoy_endpoints import Lane, assignment, lanes_in, path_of
from tests.extproc.discovery.following import until

ONE, TWO = Lane("10.0.0.1:8000", is_open=True), Lane("[fd00::2]:8000", is_open=False)


class Fleet:
    """What is to be written."""

    def __init__(self, *lanes: Lane) -> None:
        self.lanes = {"workers": list(lanes)}
        self.is_complete = True


@contextlib.asynccontextmanager
async def written(directory: Path, fleet: Fleet) -> AsyncIterator[EndpointFiles]:
    files = EndpointFiles(str(directory), lambda: fleet.lanes, lambda: fleet.is_complete)
    await files.start()
    yield files
    await files.close()


def read(directory: Path) -> list[Lane]:
    return lanes_in(Path(path_of(str(directory), "workers")).read_bytes())


def names_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def leave(directory: Path, *lanes: Lane) -> None:
    Path(path_of(str(directory), "workers")).write_text(assignment("workers", lanes))


def test_a_file_says_what_envoy_reads() -> None:
    (load,) = json.loads(assignment("workers", [TWO, ONE, ONE]))["resources"]
    assert load["cluster_name"] == "workers"
    first, second = load["endpoints"][0]["lb_endpoints"]
    assert first["endpoint"]["address"]["socket_address"] == {
        "address": "10.0.0.1",
        "port_value": 8000,
    }
    assert (first.get("health_status"), second["health_status"]) == (None, "DRAINING")


def test_what_was_written_is_read_back() -> None:
    assert lanes_in(assignment("workers", [ONE, TWO]).encode()) == [ONE, TWO]
    assert lanes_in(assignment("workers", []).encode()) == []


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[]", b"{}", b'{"resources": [{}]}', b'{"resources": [{"endpoints": []}]}', b"\xff",
        assignment("w", [ONE]).replace("10.0.0.1", "name").encode(),
        assignment("w", [ONE]).replace('"10.0.0.1"', "7").encode(),
    ],
)  # fmt: skip
def test_a_file_of_another_kind_has_no_endpoints(text: bytes) -> None:
    assert lanes_in(text) == []


async def test_files_follow_the_fleet(tmp_path: Path) -> None:
    fleet = Fleet(ONE)
    async with written(tmp_path, fleet) as files:
        assert read(tmp_path) == [ONE]
        fleet.lanes["workers"] = [TWO]
        files.note_change()
        await until(lambda: read(tmp_path) == [TWO])
    assert names_in(tmp_path) == ["workers.json"]


async def test_a_file_that_stays_the_same_is_not_written_again(tmp_path: Path) -> None:
    fleet = Fleet(ONE)
    async with written(tmp_path, fleet) as files:
        path = tmp_path / "workers.json"
        path.unlink()
        files.note_change()
        fleet.lanes["other"] = []
        await until((tmp_path / "other.json").exists)
        assert not path.exists()


async def test_what_an_earlier_router_knew_stays_until_every_source_has_told(
    tmp_path: Path,
) -> None:
    leave(tmp_path, TWO)
    fleet = Fleet(ONE)
    fleet.is_complete = False
    async with written(tmp_path, fleet) as files:
        assert read(tmp_path) == [ONE, TWO]
        fleet.is_complete = True
        files.note_change()
        await until(lambda: read(tmp_path) == [ONE])


async def test_a_directory_that_is_not_there_is_a_fault_that_heals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(endpoint_files, "TRY_AGAIN_SECONDS", 0.01)
    directory = tmp_path / "later"
    async with written(directory, Fleet(ONE)) as files:
        assert files.fault.endswith("workers.json: cannot be written: No such file or directory")
        directory.mkdir()
        await until(lambda: files.fault == "")
        assert read(directory) == [ONE]
    assert caplog.text.count("Envoy knows no new workers") == 1
