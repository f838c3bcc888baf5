from ipaddress import IPv4Address, IPv6Address

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.admin.hosts import AllowedHosts
from tests.extproc.admin.serving import Served

ADDRESSES = st.ip_addresses().map(str)
ANY = "0.0.0.0"
PORTS = st.none() | st.integers(1, 65_535)
NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,8}(\.[a-z]{2,5}){1,2}", fullmatch=True)


def authority(host: str, port: int | None) -> str:
    named = f"[{host}]" if ":" in host else host
    return named if port is None else f"{named}:{port}"


@given(ADDRESSES, PORTS)
def test_hosts_serve_the_address_of_the_connection_with_any_port(
    own: str, port: int | None
) -> None:
    assert AllowedHosts([ANY]).serves(authority(own, port), own)
    assert AllowedHosts(["::"]).serves(authority(own.upper(), port), f"{own}%eth0")


@given(st.ip_addresses(v=4), PORTS)
def test_hosts_serve_an_ipv4_address_on_an_ipv6_socket(own: IPv4Address, port: int | None) -> None:
    assert AllowedHosts(["::"]).serves(authority(str(own), port), f"::ffff:{own}")


@given(NAMES, PORTS, ADDRESSES)
def test_hosts_refuse_a_name_rebound_to_the_address(name: str, port: int | None, own: str) -> None:
    assert not AllowedHosts([ANY]).serves(authority(name, port), own)
    rebound = f"{own.replace(':', '-')}.{name}"
    assert not AllowedHosts([ANY, "10.0.0.5"]).serves(authority(rebound, port), own)
    assert not AllowedHosts([ANY]).serves(f"localhost.{name}", own)
    assert not AllowedHosts([ANY]).serves(f"{own}@{name}", own)
    assert not AllowedHosts([ANY]).serves(f"{name}#@127.0.0.1", own)


@given(NAMES, NAMES, PORTS)
def test_hosts_serve_a_configured_name_in_any_case_only(
    name: str, other: str, port: int | None
) -> None:
    hosts = AllowedHosts([name])
    assert hosts.serves(authority(name.upper(), port), "10.0.0.5")
    assert hosts.serves(f"{name}.", "10.0.0.5")
    assert hosts.serves(authority(other, port), None) == (other == name)


@given(st.ip_addresses(v=4), st.ip_addresses(v=6))
def test_hosts_refuse_another_address(own: IPv4Address, other: IPv6Address) -> None:
    assert AllowedHosts([]).serves(f"[{other}]", str(own)) == (
        other.is_loopback or other.ipv4_mapped == own
    )


@pytest.mark.parametrize("host", ["", "[::1", "a b", "127.0.0.1:x", "localhost:99999", "@"])
def test_hosts_refuse_a_malformed_host(host: str) -> None:
    assert not AllowedHosts([ANY]).serves(host, "10.0.0.5")


async def test_refusal_of_a_host_names_the_key_to_set(
    served: Served, client: aiohttp.ClientSession
) -> None:
    async with client.get(f"{served.url}/workers", headers={"Host": "a.example:1"}) as response:
        assert response.status == 403
        assert "admin.hosts" in (await response.json())["error"]


async def test_origin_must_equal_the_host(served: Served, client: aiohttp.ClientSession) -> None:
    for origin, status in (("http://localhost:7", 200), ("http://localhost:8", 403)):
        headers = {"Host": "localhost:7", "Origin": origin}
        async with client.get(f"{served.url}/workers", headers=headers) as response:
            assert response.status == status
