from collections.abc import AsyncIterator

import dns.rcode
import dns.resolver
import pytest

from extproc.config.schema import DnsName, FoundWorker
from extproc.discovery import dns_names
from extproc.discovery.dns_names import DnsNames
from tests.extproc.discovery.dns_server import DnsServer, dns_server
from tests.extproc.discovery.following import following, until

NAME = "vllm.example"


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DnsServer]:
    monkeypatch.setattr(dns_names, "LEAST_SECONDS", 0.02)
    monkeypatch.setattr(dns_names, "LOOKUP_SECONDS", 1.0)
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

    monkeypatch.setattr(dns_names, "_resolver", unknown)
    async with following(DnsNames(DnsName(NAME))) as seen:
        await until(lambda: bool(seen.faults))
        assert seen.fault.startswith("vllm.example: no name server is known: ")
