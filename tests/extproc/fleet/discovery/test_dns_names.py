import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dns.asyncresolver
import dns.rcode
import dns.resolver
import pytest
from dns.asyncresolver import Resolver

from extproc.config.schema import DnsName, FoundWorker
from extproc.fleet.discovery.dns_names import LEFT_OUT, DnsNames, LookupLimits
from tests.extproc.fleet.discovery.dns_server import DnsServer, dns_server
from tests.extproc.fleet.discovery.following import following
from tests.waiting import until

NAME = "vllm.example"
HASTY = LookupLimits(least_seconds=0.02, lookup_seconds=1.0)


@pytest.fixture
async def server() -> AsyncIterator[DnsServer]:
    async with dns_server() as one:
        one.ttl = 0
        yield one


def source(server: DnsServer, *, srv: bool = False, name: str = NAME, **limits: Any) -> DnsNames:
    """A source that looks again at once; limits: those in which it differs from `HASTY`."""
    worker = FoundWorker(port=8000, events="auto")
    return DnsNames(
        DnsName(name, srv=srv, nameserver=server.address, worker=worker), replace(HASTY, **limits)
    )


async def test_dns_names_follow_every_address(server: DnsServer) -> None:
    server.records = {(NAME, "A"): ["10.0.0.2", "10.0.0.1"], (NAME, "AAAA"): ["fd00::1"]}
    async with following(source(server)) as seen:
        await until(lambda: seen.endpoints == ["10.0.0.1:8000", "10.0.0.2:8000"])
        assert seen.found("10.0.0.1:8000").worker.events == "auto"
        server.records[NAME, "A"] = ["10.0.0.3"]
        await until(lambda: seen.endpoints == ["10.0.0.3:8000"])


async def test_dns_names_fall_back_to_ipv6(server: DnsServer) -> None:
    server.records = {(NAME, "AAAA"): ["fd00::1"]}
    async with following(source(server)) as seen:
        await until(lambda: seen.endpoints == ["[fd00::1]:8000"])


async def test_dns_names_read_hosts_and_ports_of_service_records(server: DnsServer) -> None:
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


@pytest.mark.parametrize("srv", [False, True])
async def test_dns_names_take_too_many_addresses_for_a_fault_and_keep_the_last(
    server: DnsServer, *, srv: bool
) -> None:
    hosts = [f"h{number}.example" for number in range(2)]
    addresses = [f"10.0.0.{number}" for number in range(2)]
    server.records = {(host, "A"): addresses[:1] for host in hosts}
    server.records[NAME, "A"] = addresses[:1]
    server.records[NAME, "SRV"] = [f"0 0 8000 {host}." for host in hosts]
    async with following(source(server, srv=srv, max_places=3)) as seen:
        await until(lambda: seen.endpoints == ["10.0.0.0:8000"])
        for name in (*hosts, NAME):
            server.records[name, "A"] = [f"10.0.1.{number}" for number in range(2 if srv else 4)]
        await until(lambda: seen.fault == f"{NAME} has more than 3 addresses")
        assert seen.endpoints == ["10.0.0.0:8000"]


@pytest.mark.slow
async def test_alias_is_followed_and_a_cycle_of_aliases_is_a_fault(server: DnsServer) -> None:
    server.records = {
        (NAME, "CNAME"): ["one.example."],
        ("one.example", "A"): ["10.0.0.1"],
    }
    async with following(source(server)) as seen:
        await until(lambda: seen.endpoints == ["10.0.0.1:8000"])
        server.records = {
            (NAME, "CNAME"): ["one.example."],
            ("one.example", "CNAME"): [f"{NAME}."],
        }
        await until(lambda: bool(seen.fault))
        assert seen.endpoints == ["10.0.0.1:8000"]
        server.records = {
            (f"n{number}.example", "CNAME"): [f"n{number + 1}.example."] for number in range(40)
        }
        server.records |= {(NAME, "CNAME"): ["n0.example."], ("n40.example", "A"): ["10.0.0.2"]}
        faults = len(seen.faults)
        await until(lambda: len(seen.faults) > faults + 1)
        assert seen.endpoints == ["10.0.0.1:8000"]


async def test_answers_without_a_lifetime_are_asked_for_no_sooner_than_the_least_pause(
    server: DnsServer,
) -> None:
    server.records = {(NAME, "A"): ["10.0.0.1"]}
    began = time.monotonic()
    async with following(source(server, least_seconds=0.2)) as seen:
        await until(lambda: seen.views > 0)
        server.records = {(NAME, "A"): ["10.0.0.2"]}
        await until(lambda: seen.endpoints == ["10.0.0.2:8000"])
        assert server.asked <= 1 + (time.monotonic() - began) / 0.2


NO_WORKERS = {
    "A": ["169.254.169.254", "0.0.0.0", "224.0.0.1", "255.255.255.255", "240.0.0.1"],
    "AAAA": ["fe80::1", "::", "ff02::1", "::ffff:169.254.169.254"],
}


@pytest.mark.parametrize("kind", NO_WORKERS)
async def test_addresses_that_no_worker_has_are_left_out(server: DnsServer, kind: str) -> None:
    good = {"A": "10.0.0.1", "AAAA": "fd00::1"}[kind]
    server.records = {(NAME, kind): [*NO_WORKERS[kind], good]}
    async with following(source(server)) as seen:
        await until(lambda: seen.view is not None)
        assert seen.endpoints == [f"{good}:8000" if kind == "A" else f"[{good}]:8000"]
        assert seen.note == f"{NAME}: {LEFT_OUT}"
        server.records = {(NAME, kind): NO_WORKERS[kind]}
        await until(lambda: seen.fault == f"{NAME} has no address now")
        assert len(seen.endpoints or ()) == 1


@pytest.mark.slow
async def test_dns_names_keep_the_last_addresses_of_a_vanished_name(server: DnsServer) -> None:
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
async def test_dns_server_error_is_a_fault(server: DnsServer, rcode: dns.rcode.Rcode) -> None:
    server.records = {(NAME, "A"): ["10.0.0.1"]}
    async with following(source(server)) as seen:
        await until(lambda: seen.views > 0)
        server.rcode = rcode
        await until(lambda: seen.fault.startswith(f"{NAME}: lookup failed: "))
        assert seen.endpoints == ["10.0.0.1:8000"]
        server.rcode = None
        await until(lambda: seen.fault == "")


async def test_dns_names_take_a_silent_server_for_a_fault(server: DnsServer) -> None:
    server.is_silent = True
    async with following(source(server)) as seen:
        await until(lambda: "lookup failed" in seen.fault)


async def test_dns_names_take_a_host_without_a_name_server_for_a_fault(tmp_path: Path) -> None:
    empty = tmp_path / "resolv.conf"
    empty.touch()
    unknown = DnsNames(DnsName(NAME), make_resolver=lambda _: Resolver(str(empty)))
    async with following(unknown) as seen:
        await until(lambda: bool(seen.faults))
        assert seen.fault.startswith("vllm.example: no name server is known: ")
