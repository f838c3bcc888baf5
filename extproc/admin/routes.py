"""The routes of the admin server: page, fleet, decisions, map and discovery.

Long lists are encoded with pauses, since the event loop that answers here also picks workers.
"""

import asyncio
import json
import secrets
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import metadata, version
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
from aiohttp import web

from extproc.admin import documents
from extproc.admin.asked import HeaderNames, asked
from extproc.admin.contexts import contexts_of
from extproc.admin.history import FLEET, STEP_SECONDS
from extproc.admin.observations import Observations
from extproc.admin.prefixes import prefixes, spread
from extproc.admin.recent import RecentDecision, summary, with_ids
from extproc.base.errors import RequestError
from extproc.config.sections import ALL_PERCENT, STEERS_ALL
from extproc.features.misses.misses import MOST_VERDICTS, Misses
from extproc.fleet.discovery.discovery import Discovery
from extproc.fleet.workers import Workers
from extproc.observing.faults import Faults
from extproc.requests.costly_json import INLINE_BYTES, MAX_ID_COMMAS, refuse_costly
from extproc.requests.odd_json import decoded, encoded
from extproc.routing.explain import candidates, explanation_with
from extproc.serving.router import Router
from kvstate.undecodable import UNDECODABLE

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}

# The page may use only this server's files and answers: no inline script or style, no frame, and no
# form is submitted.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
INDEX = "index.html"
_PATHS = (
    "/workers",
    "/models",
    "/apis",
    "/media",
    "/contexts",
    "/misses",
    "/explain",
    "/events",
    "/faults",
    "/decisions",
    "/prefixes",
    "/history",
    "/routers",
    "/discovery",
    "/draining",
    "/steering",
    "/report",
)


def page_routes(workers: Workers) -> list[web.RouteDef]:
    """Returns GET /, a page for browsers and JSON for other clients, and GET /page/FILE.

    The page consists of static files of this package, under a policy that allows no other script.
    GET /docs/FILE shows the documentation, where its files are beside the package.
    """
    found, pages = _page_files(), _documents()
    published = documentation_in(metadata("kvsteer").get_all("Project-URL") or ())
    documentation = documents.PATH if pages else published

    async def get_root(request: web.Request) -> web.Response:
        if "text/html" in request.headers.get("Accept", ""):
            return _page(INDEX, found[INDEX])
        answer = {
            "version": version("kvsteer"),
            "documentation": documentation,
            "index_bytes": workers.states.index_bytes(),
            "paths": _PATHS,
        }
        return web.json_response(answer, headers={"Vary": "Accept"})

    async def get_file(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in found:
            raise web.HTTPNotFound
        return _page(name, found[name])

    async def get_document(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in pages:
            raise web.HTTPNotFound
        text = await asyncio.to_thread(pages[name].read_text, "utf-8")
        content = documents.as_page(text, name, pages)
        return _page(INDEX, content.encode())

    return [
        web.get("/", get_root),
        web.get("/page/{name}", get_file),
        web.get(f"{documents.PATH}/{{name:.+}}", get_document),
    ]


def _documents() -> dict[str, Path]:
    """Returns the pages of the documentation by name; none where only the package is installed."""
    folder = Path(__file__).parents[2] / "docs"
    if not (folder / "index.md").is_file():
        return {}
    return {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.md")}


def documentation_in(links: Iterable[str]) -> str | None:
    """Returns the package's link to its documentation, None if it has none.

    links: from the package's metadata, "name, URL" each.
    """
    found = dict(link.split(", ", 1) for link in links if ", https://" in link)
    return found.get("Documentation")


def _page_files() -> dict[str, bytes]:
    folder = files("extproc.admin") / "page"
    return {
        one.name: one.read_bytes()
        for one in folder.iterdir()
        if one.name.rpartition(".")[2] in _KINDS
    }


def _page(name: str, content: bytes) -> web.Response:
    return web.Response(
        body=content,
        content_type=_KINDS[name.rpartition(".")[2]],
        charset="utf-8",
        headers={**_HEADERS, "Vary": "Accept"},
    )


class _Envelope(msgspec.Struct):
    """A request to explain; its body stays as it was sent."""

    path: str = "/v1/chat/completions"
    headers: dict[str, str] = {}
    body: msgspec.Raw = msgspec.Raw(b"null")


_ENVELOPE = msgspec.json.Decoder(_Envelope)


def fleet_routes(
    router: Router,
    workers: Workers,
    policy_header: str | None = None,
    session_headers: Sequence[str] = (),
) -> list[web.RouteDef]:
    """Returns GET /workers, /models, /apis, /media and /contexts, POST /explain, and /events.

    policy_header: the request header that may name a policy, None if none may. session_headers:
    those that may name a session. All are in lower case.
    """

    names = header_names(router, policy_header, session_headers)

    async def get_workers(_: web.Request) -> web.Response:
        return answered(await listed(workers.states.statuses()))

    async def get_models(_: web.Request) -> web.Response:
        shown = workers.engines.verifying.models_as_json()
        return web.json_response([{**one, "hung": router.is_hung(one["model"])} for one in shown])

    async def get_apis(_: web.Request) -> web.Response:
        return answered(router.keyed_by_api())

    async def get_media(_: web.Request) -> web.Response:
        return answered(router.keyed_by_kind())

    async def get_contexts(_: web.Request) -> web.Response:
        return answered(list(contexts_of(router, workers)))

    async def post_explain(request: web.Request) -> web.Response:
        envelope = await _envelope_of(await request.read())
        fields = [*envelope.headers.items()]
        head, named = asked(envelope.path, fields, names)
        return answered(await router.explain(head, bytes(envelope.body), named))

    async def get_events(_: web.Request) -> web.Response:
        return web.json_response({"enabled": workers.events_enabled})

    async def post_events(request: web.Request) -> web.Response:
        raw = await json_of(request)
        enabled = raw.get("enabled") if isinstance(raw, dict) else None
        if not isinstance(enabled, bool):
            raise bad_request('want {"enabled": true} or {"enabled": false}')
        await workers.enable_events(enabled=enabled)
        return web.json_response({"enabled": workers.events_enabled})

    return [
        web.get("/workers", get_workers),
        web.get("/models", get_models),
        web.get("/apis", get_apis),
        web.get("/media", get_media),
        web.get("/contexts", get_contexts),
        web.post("/explain", post_explain),
        web.get("/events", get_events),
        web.post("/events", post_events),
    ]


def miss_routes(router: Router) -> list[web.RouteDef]:
    """Returns GET /misses: why prompts were computed again."""

    async def get_misses(request: web.Request) -> web.Response:
        found = router.feature(Misses)
        if found is None:
            return answered({"enabled": False})
        conversation = number_of(request.query.get("conversation", "0"), "the conversation")
        most = number_of(request.query.get("turns", str(MOST_VERDICTS)), "turns")
        one = request.query.get("request_id", "")
        turns = await listed(found.turns_as_json(one, conversation, most))
        return answered({**found.as_json(), "turns": turns})

    return [web.get("/misses", get_misses)]


async def _envelope_of(raw: bytes) -> _Envelope:
    try:
        refuse_costly(raw, MAX_ID_COMMAS)
        if len(raw) <= INLINE_BYTES:
            return _ENVELOPE.decode(raw)
        return await asyncio.to_thread(_ENVELOPE.decode, raw)
    except RequestError:
        raise bad_request("the body has too many objects, lists or texts") from None
    except UNDECODABLE:
        return await asyncio.to_thread(_odd_envelope, raw)


def _odd_envelope(raw: bytes) -> _Envelope:
    """Returns an envelope with a body that only some engines read."""
    try:
        members = decoded(raw)
        body = msgspec.Raw(encoded(members.pop("body", None)))
        return msgspec.structs.replace(msgspec.convert(members, _Envelope), body=body)
    except msgspec.ValidationError as error:
        raise bad_request(
            f'want {{"path": ..., "headers": {{...}}, "body": {{...}}}}: {error}'
        ) from None
    except RequestError:
        raise bad_request("the body is not JSON") from None


def header_names(
    router: Router, policy_header: str | None, session_headers: Sequence[str]
) -> HeaderNames:
    """Returns the headers that count in requests to a router. All are in lower case."""
    steered, trusted = router.steering.headers, router.preparation.headers
    return HeaderNames(policy_header, session_headers, steered, trusted)


def fault_routes(faults: Faults) -> list[web.RouteDef]:
    """Returns GET /faults: what the router itself finds wrong now."""

    async def get_faults(_: web.Request) -> web.Response:
        return answered(faults.as_json())

    return [web.get("/faults", get_faults)]


class StreamLimits(NamedTuple):
    """Of streams of decisions.

    readers: at once. write_seconds: a reader that does not read for this long is dropped.
    look_seconds: between looks for new decisions, so that readers do not slow decisions down. news:
    the most decisions at once; of more, the oldest are left out. alive_seconds: after this much
    silence a comment is sent, since proxies in between end silent connections.
    """

    readers: int = 16
    write_seconds: float = 10.0
    look_seconds: float = 0.25
    news: int = 50
    alive_seconds: float = 15.0


USUAL = StreamLimits()

# Decisions that are encoded without a pause, on the event loop that picks.
DECISIONS_AT_ONCE = 64


def decision_routes(
    observations: Observations, workers: Workers, limits: StreamLimits = USUAL
) -> list[web.RouteDef]:
    """Returns GET /decisions and GET /decisions/ID."""
    readers = _Readers(observations, limits)

    async def get_decisions(request: web.Request) -> web.StreamResponse:
        since = request.headers.get("Last-Event-ID") or request.query.get("since", "0")
        number = number_of(since, "since")
        if "text/event-stream" in request.headers.get("Accept", ""):
            return await readers.serve(request, number)
        ids = [request.query.get(name, "") for name in ("request_id", "trace_id")]
        found = with_ids(observations.recent.newest_after(number), *ids)
        return answered(await _listed(observations, found))

    async def get_decision(request: web.Request) -> web.Response:
        kept = observations.recent.find(number_of(request.match_info["number"], "the decision"))
        if kept is None:
            raise web.HTTPNotFound(
                text=json.dumps({"error": "this decision is no longer kept"}),
                content_type="application/json",
            )
        shown = await listed(candidates(kept.decision, workers.candidates.state))
        return answered({**summary(kept), **explanation_with(kept.decision, shown)})

    return [
        web.get("/decisions", get_decisions),
        web.get("/decisions/{number}", get_decision),
    ]


class _Readers:
    """The readers of the stream of decisions (Server-Sent Events, HTML Living Standard 9.2)."""

    def __init__(self, observations: Observations, limits: StreamLimits) -> None:
        self._observations = observations
        self._limits = limits
        self._count = 0

    async def serve(self, request: web.Request, since: int) -> web.StreamResponse:
        """Sends decisions as they are made, until the reader leaves or falls behind."""
        most = self._limits.readers
        if self._count >= most:
            raise web.HTTPServiceUnavailable(text=f"{most} streams are open already\n")
        self._count += 1
        try:
            response = web.StreamResponse(
                headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
            )
            await response.prepare(request)
            await self._send(request, response, since)
        except (TimeoutError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._count -= 1
        return response

    async def _send(self, request: web.Request, response: web.StreamResponse, last: int) -> None:
        recent, loop = self._observations.recent, asyncio.get_running_loop()
        sent_at = loop.time()
        await self._write(response, "retry: 2000\n\n")
        while not self._observations.is_closed and request.transport is not None:
            if recent.last != last:
                news = recent.newest_after(last, self._limits.news)
                last, sent_at = recent.last, loop.time()
                encoded = msgspec.json.encode(await _listed(self._observations, news)).decode()
                await self._write(response, f"id: {last}\ndata: {encoded}\n\n")
            elif loop.time() - sent_at > self._limits.alive_seconds:
                sent_at = loop.time()
                await self._write(response, ": nothing new\n\n")
            await asyncio.sleep(self._limits.look_seconds)

    async def _write(self, response: web.StreamResponse, text: str) -> None:
        async with asyncio.timeout(self._limits.write_seconds):
            await response.write(text.encode())


async def _listed(observations: Observations, found: list[RecentDecision]) -> dict[str, Any]:
    last, listed = observations.recent.last, []
    for kept in found:
        listed.append(summary(kept))
        if len(listed) % DECISIONS_AT_ONCE == 0:
            await asyncio.sleep(0)
    return {"last": last, "decisions": listed}


MAX_PREFIXES = 24
MAX_HOLDERS = 32
MAX_HISTORIES = 100


def map_routes(observations: Observations, workers: Workers) -> list[web.RouteDef]:
    """Returns GET /prefixes and GET /history."""
    secret = secrets.randbits(64)

    async def get_prefixes(_: web.Request) -> web.Response:
        prompts = observations.prompts.all()
        found = await asyncio.to_thread(prefixes, prompts, secret, MAX_PREFIXES)
        shown = []
        for prefix in found:
            shown.append(spread(prefix, workers.candidates.overlaps(prefix.prompt), MAX_HOLDERS))
            await asyncio.sleep(0)  # each reads the index, on the event loop that picks
        return answered({"prompts": len(prompts), "prefixes": shown})

    async def get_history(request: web.Request) -> web.Response:
        history = observations.history
        asked, kept = request.query.getall("worker", []), history.names()
        # one of several workers may have been removed since they were listed
        if asked and not {*workers.records, *kept}.intersection(asked):
            raise no_such_worker()
        names = asked or kept
        shown = {}
        for name in names[:MAX_HISTORIES]:
            shown[name] = msgspec.Raw(msgspec.json.encode(history.series(name)))
            await asyncio.sleep(0)  # as above: a hundred of them take milliseconds
        fleet, at = history.series(FLEET), history.times()
        return answered({"step_seconds": STEP_SECONDS, "at": at, "fleet": fleet, "workers": shown})

    return [web.get("/prefixes", get_prefixes), web.get("/history", get_history)]


_WANTED = 'want {"endpoint": "ip:port", "draining": true} or the same with false'


def discovery_routes(workers: Workers, discovery: Discovery) -> list[web.RouteDef]:
    """Returns GET /discovery, and GET and POST /draining."""

    async def get_discovery(_: web.Request) -> web.Response:
        return web.json_response(discovery.status())

    async def get_draining(_: web.Request) -> web.Response:
        return web.json_response({"draining": sorted(workers.candidates.draining())})

    async def post_draining(request: web.Request) -> web.Response:
        raw = await json_of(request)
        asked = raw if isinstance(raw, dict) else {}
        endpoint, draining = asked.get("endpoint"), asked.get("draining")
        if not isinstance(endpoint, str) or not isinstance(draining, bool):
            raise bad_request(_WANTED)
        if not workers.drain(endpoint, draining=draining):
            raise no_such_worker()
        return web.json_response({"draining": sorted(workers.candidates.draining())})

    return [
        web.get("/discovery", get_discovery),
        web.get("/draining", get_draining),
        web.post("/draining", post_draining),
    ]


def steering_routes(
    router: Router, steer: Callable[[float], None], *, steers_all: bool = False
) -> list[web.RouteDef]:
    """Returns GET and POST /steering.

    steer: changes the percentage of steered requests. steers_all: whether all must be steered.
    """

    async def get_steering(_: web.Request) -> web.Response:
        return answered(router.steering_status())

    async def post_steering(request: web.Request) -> web.Response:
        raw = await json_of(request)
        percent = raw.get("percent") if isinstance(raw, dict) else None
        is_number = isinstance(percent, int | float) and not isinstance(percent, bool)
        if percent is None or not is_number or not 0 <= percent <= ALL_PERCENT:
            raise bad_request('want {"percent": n}, with n from 0 to 100')
        if steers_all and percent < ALL_PERCENT:
            raise bad_request(f"percent: {STEERS_ALL}")
        steer(float(percent))
        return answered(router.steering_status())

    return [web.get("/steering", get_steering), web.post("/steering", post_steering)]


class SharingStatus(Protocol):
    """The sharing with other routers."""

    def status(self) -> dict[str, Any]:
        """Returns its status, as GET /routers shows it."""


def sharing_routes(sharing: SharingStatus | None) -> list[web.RouteDef]:
    """Returns GET /routers, which is null if nothing is shared."""

    async def get_routers(_: web.Request) -> web.Response:
        return answered(None if sharing is None else sharing.status())

    return [web.get("/routers", get_routers)]


# Numbers with more digits cannot be valid here, and are slow to parse.
MAX_DIGITS = 15

# The longest body of a small request.
MAX_SMALL_BYTES = 4096

# Entries of a list that are made without a pause, on the event loop that picks: under a ms.
AT_ONCE = 32


async def json_of(request: web.Request) -> object:
    """Returns a small request's body, decoded.

    Raises:
        HTTPBadRequest: it is not JSON.
        HTTPRequestEntityTooLarge: it is longer than MAX_SMALL_BYTES.
    """
    raw = b""
    async for chunk in request.content.iter_any():
        raw += chunk
        if len(raw) > MAX_SMALL_BYTES:
            raise web.HTTPRequestEntityTooLarge(MAX_SMALL_BYTES, len(raw))
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise bad_request("the body is not JSON") from None


def answered(value: object) -> web.Response:
    """Returns 200 with a JSON body; uses the fastest encoder, as picks wait meanwhile."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


async def listed(entries: Iterable[object]) -> msgspec.Raw:
    """Returns all entries as a JSON list; pauses between entries, so that picks do not wait.

    entries: read one by one, so they must tolerate changes to their source meanwhile.
    """
    parts: list[bytes] = []
    for entry in entries:
        parts.append(msgspec.json.encode(entry))
        if len(parts) % AT_ONCE == 0:
            await asyncio.sleep(0)
    return msgspec.Raw(b"[%b]" % b",".join(parts))


def number_of(text: str, what: str) -> int:
    """Returns a number in a path or a query.

    Raises:
        HTTPBadRequest: it is not a number.
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS):
        raise bad_request(f"{what} must be a number")
    return int(text)


def bad_request(message: str) -> web.HTTPBadRequest:
    """Returns 400, with the reason as JSON."""
    return web.HTTPBadRequest(text=json.dumps({"error": message}), content_type="application/json")


def no_such_worker() -> web.HTTPNotFound:
    """Returns 404, with the reason as JSON."""
    return web.HTTPNotFound(text='{"error": "unknown worker"}', content_type="application/json")
