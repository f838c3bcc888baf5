import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import dns.rcode
import dns.resolver
import pytest

from extproc.config.reader import parse
from extproc.config.schema import DnsName, FoundWorker
from extproc.discovery import configured
from extproc.discovery.configured import DnsNames, WorkerFile
from tests.extproc.discovery.dns_server import DnsServer, dns_server
from tests.extproc.discovery.following import Seen, following, until

NAME = "vllm.example"


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DnsServer]:
    monkeypatch.setattr(configured, "LEAST_SECONDS", 0.02)
    monkeypatch.setattr(configured, "LOOKUP_SECONDS", 1.0)
    async with dns_server() as one:
        one.ttl = 0
        yield one


def source(server: DnsServer, *, srv: bool = False, name: str = NAME) -> DnsNames:
    worker = FoundWorker(port=8000, events="auto")
    return DnsNames(DnsName(name, srv=srv, nameserver=server.address, worker=worker))


async def test_every_address_is_a_worker_and_changes_are_seen(server: DnsServer) -> None:
    server.records = {(NAME, "A"): ["10.0.0.2", "10.0.0.1"], (NAME, "AAAA"): ["fd00::1"]}
    async with following(source(server)) as seen:
        await until(lambda: seen.endpoints == ["10.0.0.1:8000", "10.0.0.2:8000"])
        assert seen.found("10.0.0.1:8000").worker.events == "auto"
        server.records[NAME, "A"] = ["10.0.0.3"]
        await until(lambda: seen.endpoints == ["10.0.0.3:8000"])


async def test_a_name_without_ipv4_is_known_by_ipv6(server: DnsServer) -> None:
    server.records = {(NAME, "AAAA"): ["fd00::1"]}
    async with following(source(server)) as seen:
        await until(lambda: seen.endpoints == ["[fd00::1]:8000"])


async def test_service_records_tell_hosts_and_ports(server: DnsServer) -> None:
    service = "_http._tcp.example"
    server.records = {
        (service, "SRV"): ["0 0 8001 one.example.", "0 0 8002 two.example."],
        ("one.example", "A"): ["10.0.0.1"],
        ("two.example", "AAAA"): ["fd00::2"],
    }
    async with following(source(server, srv=True, name=service)) as seen:
        await until(lambda: seen.endpoints == ["10.0.0.1:8001", "[fd00::2]:8002"])
        server.records[service, "SRV"] = ["0 0 0 ."]
        await until(lambda: bool(seen.fault))
        assert len(seen.endpoints or ()) == 2


@pytest.mark.slow
async def test_a_name_that_vanishes_keeps_its_last_addresses(server: DnsServer) -> None:
    server.records = {(NAME, "A"): ["10.0.0.1"]}
    async with following(source(server)) as seen:
        await until(lambda: seen.views > 0)
        server.records = {}
        await until(lambda: seen.fault == f"{NAME} has no address now")
        server.records = {(NAME, "TXT"): ["empty"]}
        await until(lambda: len(seen.faults) > 30 or "has no address" in seen.fault)
        assert seen.endpoints == ["10.0.0.1:8000"]
        server.records = {(NAME, "A"): ["10.0.0.2"]}
        await until(lambda: seen.endpoints == ["10.0.0.2:8000"])
        assert seen.fault == ""


@pytest.mark.parametrize("rcode", [dns.rcode.SERVFAIL, dns.rcode.REFUSED])
@pytest.mark.slow
async def test_a_server_that_fails_is_a_fault(server: DnsServer, rcode: dns.rcode.Rcode) -> None:
    server.records = {(NAME, "A"): ["10.0.0.1"]}
    async with following(source(server)) as seen:
        await until(lambda: seen.views > 0)
        server.rcode = rcode
        await until(lambda: seen.fault.startswith(f"{NAME}: lookup failed: "))
        assert seen.endpoints == ["10.0.0.1:8000"]
        server.rcode = None
        await until(lambda: seen.fault == "")


async def test_a_server_that_is_silent_is_a_fault(server: DnsServer) -> None:
    server.is_silent = True
    async with following(source(server)) as seen:
        await until(lambda: "lookup failed" in seen.fault)


async def test_a_host_that_knows_no_name_server_is_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(_: object) -> None:
        raise dns.resolver.NoResolverConfiguration

    monkeypatch.setattr(configured, "_resolver", unknown)
    async with following(DnsNames(DnsName(NAME))) as seen:
        await until(lambda: bool(seen.faults))
        assert seen.fault.startswith("vllm.example: no name server is known: ")


ONE = '- endpoint: "10.0.0.1:8000"\n'
TWO = '- {endpoint: "10.0.0.2:8000", draining: true}\n'


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(configured, "LOOK_SECONDS", 0.01)
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
    async with following(WorkerFile(str(file), config)) as one:
        await until(lambda: one.endpoints == ["10.0.0.1:8000"])
        yield one


async def test_a_change_is_seen(file: Path, seen: Seen) -> None:
    write(file, '- {endpoint: "10.0.0.2:8000", model: b, draining: true}')
    await until(lambda: seen.endpoints == ["10.0.0.2:8000"])
    assert (seen.found("10.0.0.2:8000").worker.draining, seen.faults) == (True, [])


async def test_a_file_that_stays_confirms_its_view_and_is_not_read_again(seen: Seen) -> None:
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
            "the endpoint a:1 is given 2 times",
        ),
        (
            "- {endpoint: a, model: c}",
            "[0].endpoint: must be host:port, is 'a' (and 1 more fault)",
        ),
    ],
)
async def test_a_file_that_is_wrong_is_a_fault_and_the_last_view_stays(
    file: Path, seen: Seen, text: str, fault: str
) -> None:
    write(file, text)
    await until(lambda: bool(seen.fault))
    assert seen.fault.startswith(f"{file}: {fault}")
    assert seen.endpoints == ["10.0.0.1:8000"]
    write(file, "[]")
    await until(lambda: seen.endpoints == [])
    assert (len(seen.faults), seen.fault) == (1, "")


async def test_a_file_that_vanishes_changes_nothing(file: Path, seen: Seen) -> None:
    await asyncio.to_thread(file.unlink)
    await until(lambda: seen.fault == f"{file}: cannot be read: No such file or directory")
    assert seen.endpoints == ["10.0.0.1:8000"]
    write(file, '- {endpoint: "10.0.0.3:8000", model: a}')
    await until(lambda: seen.endpoints == ["10.0.0.3:8000"])


async def test_a_file_that_is_too_large_is_a_fault(
    file: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configured, "MAX_FILE_BYTES", 100)
    write(file, "#" * 101)
    await until(lambda: seen.fault == f"{file}: larger than 100 bytes")


async def test_a_link_that_is_turned_is_followed(tmp_path: Path, file: Path, seen: Seen) -> None:
    other = tmp_path / "other.yaml"
    other.write_text('- {endpoint: "10.0.0.4:8000", model: a}')
    link = tmp_path / "link"
    link.symlink_to(other)
    link.replace(file)
    await until(lambda: seen.endpoints == ["10.0.0.4:8000"])
