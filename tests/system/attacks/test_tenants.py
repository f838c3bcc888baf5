"""A tenant that tries to reach another one's cache, through a real Envoy: each request gets its own
salt and no other one, or does not reach the engine.
"""

import asyncio
import contextlib
import gzip
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from extproc.requests.tenant_salt import SaltMaker
from tests.http_server import serving
from tests.system.system import System, running
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET = b"0123456789abcdef"
VICTIMS = SaltMaker(SECRET).salt(b"victim", None)
OWN = SaltMaker(SECRET).salt(b"mallory", None)
CHAT = "/v1/chat/completions"
PROMPT = b'"model":"tiny","messages":[{"role":"user","content":"a"}]'
BODY = b"{%b}" % PROMPT
LARGE = 2 * 1024 * 1024
SALT = b'"%b"' % VICTIMS.encode()

# What it says to the router of itself: other engines read no salt on some paths.
SAYS = {"/v1/models": {"data": [{"owned_by": "vllm"}]}, "/version": {"version": "0.32.0"}}


@dataclass
class Engine:
    """An engine that keeps the requests that Envoy passes on to it."""

    got: list[tuple[str, bytes]] = field(default_factory=list)

    async def serve(self, request: web.Request) -> web.Response:
        content = await request.read()
        if "x-request-id" in request.headers:  # from Envoy; the router itself asks too
            self.got.append((request.path, content))
        return web.json_response(SAYS.get(request.path, {}))


@dataclass
class Target:
    """The router behind Envoy, and its engine."""

    system: System
    engine: Engine

    async def send(self, head: bytes, body: bytes) -> tuple[int, list[tuple[str, bytes]]]:
        """Sends bytes to Envoy; returns the status, and what the engine got meanwhile."""
        self.engine.got.clear()
        host, _, port = self.system.envoy.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(ConnectionError):  # Envoy may refuse before it has all
            writer.write(head + body)
            await writer.drain()
        async with asyncio.timeout(60):
            line = await reader.readline()
        writer.close()
        return int(line.split()[1]), [*self.engine.got]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def target(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Target]:
    secret: Path = tmp_path_factory.mktemp("tenants") / "secret"
    secret.write_bytes(SECRET)
    changes = {
        "isolation": {"header": "x-tenant", "secret_file": str(secret), "fail": "closed"},
        "extproc": {"max_body_bytes": LARGE},
    }
    engine = Engine()
    async with (
        serving(engine.serve, max_bytes=2 * LARGE) as address,
        running(1, changes=changes, proxied=lambda _: address) as one,
    ):

        async def is_known() -> bool:
            (worker,) = await one.status()
            return worker["engine"] is not None

        await until(is_known)
        yield Target(one, engine)


def head_of(*lines: bytes, method: bytes = b"POST", path: str = CHAT) -> bytes:
    """The head of a request. lines: its headers, besides Host."""
    first = b"%b %b HTTP/1.1\r\nHost: a\r\n" % (method, path.encode())
    return first + b"".join(one + b"\r\n" for one in lines) + b"\r\n"


def sized(body: bytes, *lines: bytes, path: str = CHAT) -> bytes:
    """The head of a request of the attacker with such a body."""
    length = b"content-length: %d" % len(body)
    return head_of(b"x-tenant: mallory", length, *lines, path=path)


def chunked(body: bytes, size: int) -> bytes:
    """A body in chunks of this size."""
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in pieces) + b"0\r\n\r\n"


def salts_in(body: bytes) -> list[str]:
    """Every salt at the top of a body, as a parser sees it that keeps all members."""
    pairs: list[tuple[str, Any]] = json.loads(body, object_pairs_hook=lambda found: found)
    return [value for name, value in pairs if name == "cache_salt"]


def escaped(name: str) -> bytes:
    return b"".join(b"\\u%04x" % ord(one) for one in name)


# Bodies with a salt of another tenant, in every way that some parser might read.
HIDDEN = {
    "plain": b'{"cache_salt":%b,%b}' % (SALT, PROMPT),
    "last": b'{%b,"cache_salt":%b}' % (PROMPT, SALT),
    "twice": b'{"cache_salt":%b,%b,"cache_salt":%b}' % (SALT, PROMPT, SALT),
    "escaped letter": b'{%b,"cache_s\\u0061lt":%b}' % (PROMPT, SALT),
    "escaped whole": b'{"%b":%b,%b}' % (escaped("cache_salt"), SALT, PROMPT),
    "escaped and plain": b'{"cache_salt":"x",%b,"cache_\\u0073alt":%b}' % (PROMPT, SALT),
    "capital escapes": b'{%b,"\\u0063ache\\u005Fsalt":%b}' % (PROMPT, SALT),
    "spaces": b'\r\n\t {\t"cache_salt"\n:\r %b , %b }\n\n' % (SALT, PROMPT),
    "as an object": b'{"cache_salt":{"a":[%b]},%b}' % (SALT, PROMPT),
    "null last": b'{"cache_salt":%b,%b,"cache_salt":null}' % (SALT, PROMPT),
    "behind a deep value": b'{"a":%b1%b,"cache_salt":%b,%b}' % (b"[" * 90, b"]" * 90, SALT, PROMPT),
    "behind a quote": b'{"a":"\\\\\\"","cache_salt":%b,%b}' % (SALT, PROMPT),
    "in a text": b'{"a":"\\"cache_salt\\":%b}",%b}' % (VICTIMS.encode(), PROMPT),
    "after an own end": b'{%b,"cache_salt":%b}  ' % (PROMPT, SALT),
}


@pytest.mark.parametrize("hidden", HIDDEN.values(), ids=HIDDEN)
async def test_salt_of_another_tenant_is_replaced_however_it_is_written(
    target: Target, hidden: bytes
) -> None:
    bodies = {
        "whole": (sized(hidden), hidden),
        "chunked": (
            head_of(b"x-tenant: mallory", b"transfer-encoding: chunked"),
            chunked(hidden, 7),
        ),
    }
    for head, body in bodies.values():
        status, got = await target.send(head, body)
        assert status == 200
        ((_, content),) = got
        (salt,) = salts_in(content)
        assert salt != VICTIMS
        assert len(salt) == len(OWN)


async def test_text_that_is_no_utf8_is_salted_at_its_end(target: Target) -> None:
    hidden = b'{"a":"\xff","cache_salt":%b,%b}' % (SALT, PROMPT)
    _, got = await target.send(sized(hidden), hidden)
    ((_, content),) = got  # engines refuse it
    assert VICTIMS.encode() not in content
    assert re.search(rb',"cache_salt":"[0-9a-f]{32}"\}$', content)


OTHER_ENCODINGS = ("utf-8-sig", "utf-16", "utf-16-le", "utf-32")


@pytest.mark.parametrize("encoding", OTHER_ENCODINGS)
async def test_salt_of_another_tenant_is_replaced_in_any_encoding(
    target: Target, encoding: str
) -> None:
    hidden = HIDDEN["twice"].decode().encode(encoding)
    status, got = await target.send(sized(hidden), hidden)
    assert status == 200
    ((_, content),) = got
    (salt,) = salts_in(content)
    assert salt != VICTIMS


UNREAD = {
    "compressed": (gzip.compress(BODY), [b"content-encoding: gzip"], CHAT),
    "many responses": (
        b'{%b"previous_response_id":"resp_1",%b}' % (b'"request_id":"resp_own",' * 65, PROMPT),
        [],
        "/v1/responses",
    ),
    "many salts": (b'{%b"a":1,%b}' % (b'"cache_salt":"x",' * 50_000, PROMPT), [], CHAT),
    "two order marks": (b"\xef\xbb\xbf" * 2 + BODY, [], CHAT),
    "empty id": (BODY, [], "/v1/responses//"),
    "empty id and another": (BODY, [], "/v1/responses//resp_1"),
    "two documents": (BODY + BODY, [], CHAT),
    "a list": (b"[%b]" % BODY, [], CHAT),
    "cut": (BODY[:-1], [], CHAT),
    "comment": (b"{/* */%b}" % PROMPT, [], CHAT),
    "single quotes": (b"{'cache_salt':'x',%b}" % PROMPT, [], CHAT),
    "form": (b"model=tiny&prompt=a", [b"content-type: application/x-www-form-urlencoded"], CHAT),
    "multipart": (
        b"--b\r\n\r\n%b\r\n--b--\r\n" % BODY,
        [b"content-type: multipart/form-data"],
        CHAT,
    ),
    "too long": (b'{"a":"%b",%b}' % (b"x" * LARGE, PROMPT), [], CHAT),
    "other API": (BODY, [], "/generate"),
    "of a newer engine": (BODY, [], "/v2/chat/completions"),
    "other case": (BODY, [], "/v1/Chat/Completions"),
    "parameters": (BODY, [], CHAT + ";a=b"),
}


@pytest.mark.parametrize(("body", "lines", "path"), UNREAD.values(), ids=UNREAD)
async def test_body_that_is_not_salted_does_not_reach_the_engine(
    target: Target, body: bytes, lines: list[bytes], path: str
) -> None:
    status, got = await target.send(sized(body, *lines, path=path), body)
    assert (status >= 400, got) == (True, [])


SPELLED = (
    CHAT + "/",
    "//v1//chat/completions",
    "/v1/chat/%63ompletions",
    "/x/../v1/chat/completions?a=b",
)


@pytest.mark.parametrize("path", SPELLED)
async def test_path_that_is_spelled_otherwise_is_salted_or_refused(
    target: Target, path: str
) -> None:
    status, got = await target.send(sized(BODY, path=path), BODY)
    if status < 400:
        assert [salts_in(content) for _, content in got] == [[OWN]]
    else:
        assert got == []


LENGTH = b"content-length: %d" % len(BODY)
REFUSED = {
    "none": [],
    "two": [b"x-tenant: mallory", b"x-tenant: victim"],
    "two, other case": [b"x-tenant: victim", b"X-TENANT: mallory"],
    "underscore": [b"x_tenant: victim"],
    "empty": [b"x-tenant:"],
    "pseudo": [b":x-tenant: victim"],
    "space before the colon": [b"x-tenant : victim"],
}


@pytest.mark.parametrize("lines", REFUSED.values(), ids=REFUSED)
async def test_request_that_does_not_name_one_tenant_is_refused(
    target: Target, lines: list[bytes]
) -> None:
    status, got = await target.send(head_of(*lines, LENGTH), BODY)
    assert (status >= 400, got) == (True, [])


async def test_tenant_in_a_trailer_does_not_count(target: Target) -> None:
    body = chunked(BODY, 9).removesuffix(b"\r\n") + b"x-tenant: victim\r\n\r\n"
    lines = [b"transfer-encoding: chunked", b"trailer: x-tenant"]
    status, got = await target.send(head_of(*lines), body)
    assert (status, got) == (403, [])
    status, got = await target.send(head_of(b"x-tenant: mallory", *lines), body)
    assert [salts_in(content) for _, content in got] == [[OWN]]


NAMES = {
    "other case of the header": (b"X-Tenant: mallory", OWN),
    "spaces around": (b"x-tenant: \t mallory \t", OWN),
    "both in one": (b"x-tenant: mallory, victim", None),
    "other case of the name": (b"x-tenant: Victim", None),
    "same as digits": (b"x-tenant: 6:victim", None),
    "not ASCII": ("x-tenant: v\u00efctim".encode(), None),
}


@pytest.mark.parametrize(("line", "salt"), NAMES.values(), ids=NAMES)
async def test_name_that_resembles_another_tenants_has_its_own_salt(
    target: Target, line: bytes, salt: str | None
) -> None:
    status, got = await target.send(head_of(line, LENGTH), BODY)
    assert status == 200
    ((_, content),) = got
    (found,) = salts_in(content)
    assert found != VICTIMS
    assert salt in (None, found)


async def response_of(target: Target, tenant: bytes) -> str:
    """The id of a response that a tenant makes the engine keep."""
    length = b"content-length: %d" % len(BODY)
    head = head_of(b"x-tenant: " + tenant, length, path=RESPONSES)
    status, got = await target.send(head, BODY)
    assert status == 200
    ((_, content),) = got
    return str(json.loads(content)["request_id"])


RESPONSES = "/v1/responses"
STOLEN = {
    "plain": b'{"previous_response_id":"%b",%b}',
    "escaped": b'{"previous_\\u0072esponse_id":"%b",%b}',
    "in a list": b'{"previous_response_id":["%b"],%b}',
    "null last": b'{"previous_response_id":"%b","previous_response_id":null,%b}',
}


@pytest.mark.parametrize("stolen", STOLEN.values(), ids=STOLEN)
async def test_response_of_another_tenant_is_not_continued(target: Target, stolen: bytes) -> None:
    for name in (await response_of(target, b"victim"), "resp_" + "0" * 64, "resp_of_the_engine"):
        body = stolen % (name.encode(), PROMPT)
        status, got = await target.send(sized(body, path=RESPONSES), body)
        assert (status, got) == (404, [])
    own = b'{"previous_response_id":"%b",%b}'
    body = own % ((await response_of(target, b"mallory")).encode(), PROMPT)
    status, got = await target.send(sized(body, path=RESPONSES), body)
    assert (status, len(got)) == (200, 1)


@pytest.mark.parametrize("method", [b"GET", b"DELETE", b"POST"])
@pytest.mark.parametrize("end", ["", "/", "/cancel", "/input_items?a=b", "%2Fcancel"])
async def test_response_of_another_tenant_is_not_read_nor_cancelled(
    target: Target, method: bytes, end: str
) -> None:
    lines = [b"x-tenant: mallory", b"content-length: 0"]
    path = f"{RESPONSES}/{await response_of(target, b'victim')}{end}"
    for spelled in (path, path.replace("resp_", "resp%5F"), path.replace("/v1/", "/v1/x/../")):
        status, got = await target.send(head_of(*lines, method=method, path=spelled), b"")
        assert (status, got) == (404, [])
    path = f"{RESPONSES}/{await response_of(target, b'mallory')}{end}"
    status, got = await target.send(head_of(*lines, method=method, path=path), b"")
    assert (status, len(got)) == (200, 1)
    status, got = await target.send(head_of(lines[1], method=method, path=path), b"")
    assert (status, got) == (403, [])


async def test_client_does_not_name_its_response_as_another_tenants(target: Target) -> None:
    name = (await response_of(target, b"victim")).encode()
    for written in (b'"request_id":"%b"', b'"request_\\u0069d":"%b","request_id":"%b"'):
        body = b"{%b,%b}" % (written.replace(b"%b", name), PROMPT)
        _, got = await target.send(sized(body, path=RESPONSES), body)
        ((_, content),) = got
        assert name not in content


PART = b'{"model":"tiny","messages":[{"role":"user","content":[%b]}]}'
MEDIA = {
    "only a uuid": (CHAT, PART % b'{"type":"image_url","image_url":null,"uuid":"u"}'),
    "escaped": (CHAT, PART % b'{"type":"image_url","image_url":null,"\\u0075uid":"u"}'),
    "twice": (CHAT, PART % b'{"uuid":null,"uuid":"u"}'),
    "with an image": (CHAT, PART % b'{"type":"image_url","image_url":{"url":"data:,"},"uuid":"u"}'),
    "of a tool": ("/v1/messages", PART % b'{"type":"tool_result","content":[{"uuid":"u"}]}'),
    "of a response": (RESPONSES, b'{"input":[{"content":[{"type":"input_image","uuid":"u"}]}]}'),
    "of a batch": (CHAT + "/batch", b'{"messages":[[{"content":[{"uuid":"u"}]}]]}'),
    "in a deep list": (CHAT, PART % (b"[" * 20 + b'{"uuid":"u"}' + b"]" * 20)),
    "by hash": ("/inference/v1/generate", b'{"token_ids":[1],"features":{"mm_hashes":{}}}'),
}


@pytest.mark.parametrize(("path", "body"), MEDIA.values(), ids=MEDIA)
async def test_media_of_another_tenant_are_not_named(
    target: Target, path: str, body: bytes
) -> None:
    status, got = await target.send(sized(body, path=path), body)
    assert (status, got) == (400, [])


NO_MEDIA = (
    PART % b'{"type":"text","text":"uuid \\u0075uid"}',
    PART % b'{"type":"tool_use","input":{"uuid":"u"}}',
    b'{"tools":[{"function":{"parameters":{"properties":{"uuid":{}}}}}],%b}' % PROMPT,
    b'{"uuid":"u",%b}' % PROMPT,
)


@pytest.mark.parametrize("body", NO_MEDIA)
async def test_uuid_that_names_no_media_passes(target: Target, body: bytes) -> None:
    status, got = await target.send(sized(body), body)
    assert (status, len(got)) == (200, 1)
