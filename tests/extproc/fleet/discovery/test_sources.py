import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from extproc.config.reader import MAX_FILE_BYTES, parse
from extproc.fleet.discovery.sources import WorkerFile
from tests.extproc.fleet.discovery.following import Seen, following
from tests.waiting import until

ONE = '- endpoint: "10.0.0.1:8000"\n'
TWO = '- {endpoint: "10.0.0.2:8000", draining: true}\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "workers.yaml"
    write(path, ONE)
    return path


def write(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


@pytest.fixture
async def seen(file: Path) -> AsyncIterator[Seen]:
    config = parse(f"models: [{{name: a}}, {{name: b}}]\ndiscovery: {{file: {file}}}", "c")
    write(file, ONE.replace("\n", "\n  model: a\n"))
    async with following(WorkerFile(str(file), config, look_seconds=0.01)) as one:
        await until(lambda: one.endpoints == ["10.0.0.1:8000"])
        yield one


async def test_worker_file_change_is_followed(file: Path, seen: Seen) -> None:
    write(file, '- {endpoint: "10.0.0.2:8000", model: b, draining: true}')
    await until(lambda: seen.endpoints == ["10.0.0.2:8000"])
    assert (seen.found("10.0.0.2:8000").worker.draining, seen.faults) == (True, [])


async def test_worker_file_without_a_change_confirms_its_view_unread(seen: Seen) -> None:
    confirmed = seen.confirmed
    await until(lambda: seen.confirmed > confirmed + 3)
    assert seen.views == 1


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "must be a list of workers, is empty"),
        ("workers: []", "must be a list of workers, is a mapping"),
        ("- {endpoint: ", "not YAML: "),
        ("- {endpoint: a:1, modle: a}", "[0].modle: unknown key; did you mean model?"),
        ("- {endpoint: a:1, model: c}", "[0].model: 'c' is not under models"),
        ('- "a:1"', "[0]: must be a mapping, is 'a:1'"),
        (
            "[{endpoint: a:1, model: a}, {endpoint: a:1, model: b}]",
            "[1].endpoint: a:1 is the endpoint of [0] too",
        ),
        (
            "- {endpoint: a, model: c}",
            "[0].endpoint: must be host:port, is 'a' (line 1) (and 1 more fault)",
        ),
    ],
)
async def test_worker_file_with_an_error_is_a_fault_and_keeps_the_last_view(
    file: Path, seen: Seen, text: str, fault: str
) -> None:
    write(file, text)
    await until(lambda: bool(seen.fault))
    assert seen.fault.startswith(f"{file}: {fault}")
    assert seen.endpoints == ["10.0.0.1:8000"]
    write(file, "[]")
    await until(lambda: seen.endpoints == [])
    assert (len(seen.faults), seen.fault) == (1, "")


async def test_worker_file_that_vanishes_keeps_the_last_view(file: Path, seen: Seen) -> None:
    await asyncio.to_thread(file.unlink)
    await until(lambda: seen.fault == f"{file}: cannot be read: No such file or directory")
    assert seen.endpoints == ["10.0.0.1:8000"]
    write(file, '- {endpoint: "10.0.0.3:8000", model: a}')
    await until(lambda: seen.endpoints == ["10.0.0.3:8000"])


async def test_worker_file_beyond_its_size_limit_is_a_fault(file: Path, seen: Seen) -> None:
    write(file, "#" * (MAX_FILE_BYTES + 1))
    await until(lambda: seen.fault == f"{file}: larger than 4194304 bytes")


async def test_worker_file_link_is_followed(tmp_path: Path, file: Path, seen: Seen) -> None:
    other = tmp_path / "other.yaml"
    other.write_text('- {endpoint: "10.0.0.4:8000", model: a}')
    link = tmp_path / "link"
    link.symlink_to(other)
    link.replace(file)
    await until(lambda: seen.endpoints == ["10.0.0.4:8000"])
