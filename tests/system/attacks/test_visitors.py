"""Pages of other sites, and requests for other hosts, reach nothing on the admin port."""

import asyncio

import pytest

from tests.system.attacks.victim import Victim

# Lines of a request's head. {own}: the address that is served.
REFUSED = {
    "another host": "Host: evil.example",
    "another host with our port": "Host: evil.example:{port}",
    "two hosts": "Host: evil.example\r\nHost: {own}",
    "two hosts, ours first": "Host: {own}\r\nHost: evil.example",
    "a user before the host": "Host: {own}@evil.example",
    "our address as a user": "Host: evil.example@{own}",
    "our address as a name's beginning": "Host: 127.0.0.1.evil.example:{port}",
    "our address as a path": "Host: evil.example/{own}",
    "our address behind a comma": "Host: evil.example, {own}",
    "no host": "X: y",
    "an empty host": "Host:",
    "another origin": "Host: {own}\r\nOrigin: http://evil.example",
    "no origin": "Host: {own}\r\nOrigin: null",
    "another port's origin": "Host: {own}\r\nOrigin: http://127.0.0.1:1",
    "two origins": "Host: {own}\r\nOrigin: http://evil.example\r\nOrigin: http://{own}",
    "a page of another site": "Host: {own}\r\nSec-Fetch-Site: cross-site",
    "a page of the same site": "Host: {own}\r\nSec-Fetch-Site: same-site",
}


async def status(victim: Victim, target: str, head: str, method: str = "GET") -> int:
    """The status of the answer to a request; 0 if the connection ends without one."""
    port = victim.http_ports[0]
    own = f"127.0.0.1:{port}"
    lines = head.format(own=own, port=port)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    length = "Content-Length: 14\r\nContent-Type: text/plain\r\n" if method == "POST" else ""
    content = '{"percent": 0}' if method == "POST" else ""
    sent = f"{method} {target.format(own=own)} HTTP/1.1\r\n{lines}\r\n{length}"
    writer.write(f"{sent}Connection: close\r\n\r\n{content}".encode())
    answer = await reader.read()
    writer.close()
    return int(answer.split()[1]) if answer else 0


@pytest.mark.parametrize("head", REFUSED.values(), ids=REFUSED)
async def test_visitors_of_other_sites_are_refused(victim: Victim, head: str) -> None:
    assert 400 <= await status(victim, "/workers", head) < 500
    assert 400 <= await status(victim, "/steering", head, "POST") < 500


async def test_target_of_another_host_is_refused(victim: Victim) -> None:
    assert 400 <= await status(victim, "http://evil.example/workers", "Host: {own}") < 500


async def test_own_page_is_served(victim: Victim) -> None:
    own = "Host: {own}\r\nOrigin: http://{own}\r\nSec-Fetch-Site: same-origin"
    assert await status(victim, "/workers", own) == 200
    assert await status(victim, "/workers", "Host: {own}") == 200
