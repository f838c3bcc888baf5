"""Each cell of the table of forms in docs/internals/attacks.md, through a real Envoy.

The engine reads the bytes that reach it as FastAPI does, with Python's json: whatever form a client
chose, it finds nothing there that only the router may say.
"""

import contextlib
import gzip
import io
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from aiohttp import web

from extproc.config.schema import Config
from extproc.envoy.envoy_config import FILTER, render
from tests.http_server import serving
from tests.system.system import System, running
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGE = Path(__file__).parents[3] / "docs" / "internals" / "attacks.md"
# A header by which a test chooses how Envoy sends a body to the router.
MODE = "x-body-mode"
PER_ROUTE = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
MAX_BYTES = 6 * 1024 * 1024

# What a client says of itself, and must not.
CLAIMS = {
    "priority": -1000,
    "cache_salt": "of-the-victim",
    "kv_transfer_params": {"remote_host": "192.0.2.1"},
}
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], **CLAIMS}
TEXT = json.dumps(BODY)
PRIORITIES = {
    "header": "x-class",
    "default": "people",
    "of": [{"name": "people"}, {"name": "batch", "priority": 10}],
}

# The columns: what is on, which claims it keeps from the engine, and the engine's release.
OLD, NEW = "0.20.0", "0.32.0"
FEATURES: dict[str, tuple[Callable[[Path], dict[str, Any]], tuple[str, ...], str]] = {
    "transfers": (
        lambda _: {"disaggregation": {"connector": "offloading", "min_pulled_tokens": 64}},
        ("kv_transfer_params",),
        OLD,
    ),
    "classes": (lambda _: {"policy": {"classes": PRIORITIES}}, ("priority",), OLD),
    "classes, told by header": (lambda _: {"policy": {"classes": PRIORITIES}}, (), NEW),
    "tenants": (
        lambda secret: {"isolation": {"header": "x-tenant", "secret_file": str(secret)}},
        ("cache_salt", "kv_transfer_params"),
        OLD,
    ),
    "none": (lambda _: {}, (), OLD),
}


def many() -> str:
    members = "".join(f'"{name}":{json.dumps(claim)},' for name, claim in CLAIMS.items())
    return "{" + members * 65 + TEXT[1:]


def escaped() -> str:
    """The claims twice, the first time with an escaped letter in each name."""
    spelled = {name: f"{name[:-1]}\\u{ord(name[-1]):04x}" for name in CLAIMS}
    again = "".join(f'"{spelled[name]}":{json.dumps(claim)},' for name, claim in CLAIMS.items())
    return "{" + again + TEXT[1:]


def longer(length: int) -> str:
    return TEXT + " " * (length - len(TEXT))


# The rows, by their first cells: path, bodies, and headers.
Sent = tuple[str, list[bytes], dict[str, str]]
WIDE = ("utf-16", "utf-16-le", "utf-32", "utf-32-be")
FORMS: dict[str, Sent] = {
    "JSON in UTF-8": (CHAT, [TEXT.encode(), f" \n{TEXT} ".encode()], {}),
    "members twice, or with escaped letters": (CHAT, [escaped().encode()], {}),
    "with a byte order mark": (CHAT, [TEXT.encode("utf-8-sig")], {}),
    "in UTF-16 or UTF-32": (CHAT, [TEXT.encode(one) for one in WIDE], {}),
    "in UTF-16 or UTF-32, above 4 MiB": (
        CHAT,
        [longer(5 * 512 * 1024).encode("utf-16")],
        {},
    ),
    "more than 64 members that are looked at": (CHAT, [many().encode()], {}),
    "longer than `extproc.max_body_bytes`": (CHAT, [longer(MAX_BYTES + 1).encode()], {}),
    "compressed (gzip, Zstandard)": (
        CHAT,
        [gzip.compress(TEXT.encode())],
        {"content-encoding": "gzip"},
    ),
    "a list": (CHAT, [b"[1]", b'["priority", "cache_salt"]'], {}),
    "a list with such a name in it": (CHAT, [f"[{TEXT}]".encode()], {}),
    "bytes behind the object": (CHAT, [f"{TEXT}x".encode(), f"{TEXT}{TEXT}".encode()], {}),
    "POST to an unknown path": ("/v1/of/a/newer/engine", [TEXT.encode()], {}),
    "a path with `//`, or with a `/` behind `/v1/responses/`": (
        f"{RESPONSES}//",
        [TEXT.encode()],
        {},
    ),
    "a form, to `/v1/audio/`": (
        "/v1/audio/transcriptions",
        [b"--b\r\n\r\n%b\r\n--b--\r\n" % TEXT.encode()],
        {"content-type": "multipart/form-data; boundary=b"},
    ),
    "not sent by the proxy (body mode `NONE`)": (CHAT, [TEXT.encode()], {MODE: "NONE"}),
    "sent in pieces (body mode `STREAMED`)": (CHAT, [TEXT.encode()], {MODE: "STREAMED"}),
}


def cells() -> list[tuple[str, str, str]]:
    """The cells of the page: form, feature, and what becomes of such a request."""
    table = PAGE.read_text().partition("| form of the body |")[2].partition("\n\n")[0]
    head, _, *lines = table.splitlines()
    features = [cell.strip() for cell in head.split("|")[:-1]]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    found = [
        (form, feature, outcome)
        for form, *outcomes in rows
        for feature, outcome in zip(features, outcomes, strict=True)
    ]
    return found + [(form, "none", "passes") for form, *_ in rows]


class Engine:
    """An engine that keeps the bodies that reach it. version: of the vLLM that it says it is."""

    def __init__(self, version: str) -> None:
        self.got: list[bytes] = []
        self._says = {
            "/v1/models": {"data": [{"owned_by": "vllm"}]},
            "/version": {"version": version},
        }

    async def serve(self, request: web.Request) -> web.Response:
        content = await request.read()
        if "x-request-id" in request.headers:  # from Envoy; the router itself asks too
            self.got.append(content)
        return web.json_response(self._says.get(request.path, {}))


def with_modes(config: Config) -> str:
    """Envoy's configuration, in which a header chooses the body mode of a request."""
    tree = yaml.safe_load(render(config))
    (listener,) = tree["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    (host,) = manager["route_config"]["virtual_hosts"]
    found = host["routes"][0]
    host["routes"][:0] = [
        {**found, "match": matched(found, mode), "typed_per_filter_config": by_mode(mode)}
        for mode in ("NONE", "STREAMED")
    ]
    return yaml.safe_dump(tree)


def matched(route: dict[str, Any], mode: str) -> dict[str, Any]:
    return {**route["match"], "headers": [{"name": MODE, "string_match": {"exact": mode}}]}


def by_mode(mode: str) -> dict[str, Any]:
    overrides = {"processing_mode": {"request_body_mode": mode, "response_header_mode": "SKIP"}}
    return {FILTER: {"@type": PER_ROUTE, "overrides": overrides}}


@contextlib.asynccontextmanager
async def target_of(feature: str, folder: Path) -> AsyncIterator[tuple[System, Engine]]:
    secret = folder / "secret"
    secret.write_bytes(b"0123456789abcdef")
    changes, _, version = FEATURES[feature]
    engine = Engine(version)
    sections = {"extproc": {"max_body_bytes": MAX_BYTES}, **changes(secret)}
    async with (
        serving(engine.serve, max_bytes=2 * MAX_BYTES, decompresses=False) as address,
        running(1, changes=sections, proxied=lambda _: address, envoy_config=with_modes) as system,
    ):

        async def is_known() -> bool:
            (worker,) = await system.status()
            return worker["engine"] is not None

        await until(is_known, "the engine is known")
        yield system, engine


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=FEATURES)
async def target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[str, System, Engine]]:
    folder = tmp_path_factory.mktemp("edited")
    async with target_of(request.param, folder) as (system, engine):
        yield request.param, system, engine


async def sent(system: System, path: str, body: bytes, headers: dict[str, str]) -> int:
    """Sends a body; returns the status."""
    named = {"x-tenant": "mallory", "x-class": "batch", "content-type": "application/json"}
    url = f"{system.envoy}{path}"
    data = io.BytesIO(body)
    async with system.session.post(url, data=data, headers={**named, **headers}) as answer:
        await answer.read()
        return answer.status


def read(content: bytes) -> dict[str, Any]:
    """The object that an engine finds in a body, an empty one if it finds none."""
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


async def test_page_has_a_row_for_each_form_and_a_column_for_each_feature() -> None:
    found = cells()
    assert {form for form, _, _ in found} == set(FORMS)
    assert {feature for _, feature, _ in found} == set(FEATURES)


@pytest.mark.parametrize("form", FORMS)
async def test_engine_finds_nothing_that_the_client_must_not_say(
    target: tuple[str, System, Engine], form: str
) -> None:
    feature, system, engine = target
    (outcome,) = [what for one, other, what in cells() if (one, other) == (form, feature)]
    path, bodies, headers = FORMS[form]
    for body in bodies:
        engine.got.clear()
        status = await sent(system, path, body, headers)
        if re.fullmatch(r"\d+", outcome):
            assert (status, engine.got) == (int(outcome), [])
            continue
        assert status == 200
        (content,) = engine.got
        found = read(content)
        if outcome == "passes":  # the priority of the class may be behind what is no object
            assert content.startswith(body[:-1])
            assert found == read(body)
            continue
        for name in FEATURES[feature][1]:
            assert found.get(name) != CLAIMS[name], name
