"""The admin and metrics servers: access checks, errors as JSON, and sampling of the fleet.

This folder is what an operator sees: the page, its JSON (`routes`), the last decisions and prompts
(`observations`, `prefixes`, `history`), and the report of what steering gained (`report`,
`report_page`). It may read all of a running router, and change three things: which workers drain,
how many requests are steered, and whether events are used.

The rule: it shows what the router knows, and computes nothing a second time; `/explain` asks the
same `decide` as a request does. Whoever asks cannot make requests wait: readers, answers and what
is kept for them are bounded. Prompts are compared here, and never shown.
"""

import asyncio
import json
import logging
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from http import HTTPStatus
from typing import cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from extproc.admin.history import STEP_SECONDS
from extproc.admin.hosts import AllowedHosts, host_in
from extproc.admin.observations import Observations
from extproc.admin.routes import (
    USUAL,
    StreamLimits,
    decision_routes,
    fleet_routes,
    map_routes,
    miss_routes,
    page_routes,
)
from extproc.base.address import Address
from extproc.base.fault import NOTE
from extproc.fleet.workers import Workers
from extproc.observing.faults import Faults
from extproc.observing.metrics import Metrics
from extproc.serving.listening import cannot_listen, http_connections
from extproc.serving.router import Router
from kvstate.seldom import is_logged

log = logging.getLogger("kvsteer.admin")


def admin_application(
    router: Router,
    workers: Workers,
    observations: Observations,
    max_body_bytes: int,
    hosts: Iterable[str],
    policy_header: str | None = None,
    session_headers: Sequence[str] = (),
    streams: StreamLimits = USUAL,
) -> web.Application:
    """Returns the admin server with the routes of the page, fleet, decisions, prefixes and history.

    hosts: requests may name them besides loopback and the address that they came in on.
    policy_header, session_headers: headers that are read from requests to explain; the latter in
    lower case.
    """
    # /explain wraps the body in an envelope, which may escape every character of it
    application = web.Application(
        client_max_size=2 * max_body_bytes,
        middlewares=[errors_as_json(), same_host_only(AllowedHosts(hosts))],
    )
    application.add_routes(page_routes(workers))
    policy = policy_header and policy_header.lower()
    application.add_routes(fleet_routes(router, workers, policy, session_headers))
    application.add_routes(miss_routes(router))
    application.add_routes(decision_routes(observations, workers, streams))
    application.add_routes(map_routes(observations, workers))
    return application


def metrics_application(
    metrics: Metrics, hindrance: Callable[[], str], faults: Faults, notes: Sequence[str] = ()
) -> web.Application:
    """Returns GET /metrics, /healthz and /readyz.

    hindrance: returns why the router is not ready, "" if it is. faults: what is wrong though it is
    ready; /readyz shows each in a line. notes: what it cannot see, the last lines of /readyz.
    """

    async def get_metrics(request: web.Request) -> web.Response:
        body, content_type = await metrics.exposed(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def get_healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def get_readyz(_: web.Request) -> web.Response:
        reason = hindrance()
        lines = [reason or "ready", *(str(one) for one in faults.present())]
        lines += [f"{NOTE}{one}" for one in notes]
        text = "".join(f"{line}\n" for line in lines)
        return web.Response(text=text, status=503 if reason else 200)

    application = web.Application()
    application.add_routes(
        [
            web.get("/metrics", get_metrics),
            web.get("/healthz", get_healthz),
            web.get("/readyz", get_readyz),
        ]
    )
    return application


# How many connections are accepted at once, before any of them is counted.
_BACKLOG = 16


async def listen(
    application: web.Application,
    address: Address,
    what: str,
    inherited: Sequence[socket.socket] = (),
    *,
    inflates: bool = True,
) -> web.AppRunner:
    """Serves an application until its runner is cleaned up.

    what: the server's name in the configuration and the log. inherited: sockets that listen
    already, instead of the address. inflates: whether compressed bodies are read inflated.

    Raises:
        StartError: the address cannot be bound.
    """
    runner = web.AppRunner(
        application,
        access_log=None,
        logger=ServerLog(what),
        shutdown_timeout=1.0,
        auto_decompress=inflates,
    )
    await runner.setup()
    try:
        if not inherited:
            await _Site(runner, address.host, address.port).start()
        for one in inherited:
            await _Site(runner, address.host, address.port, one).start()
    except OSError as error:
        await runner.cleanup()
        raise cannot_listen(f"{what}.listen", str(address), error) from None
    return runner


def listening_in(runner: web.AppRunner) -> Iterator[int]:
    """Yields the numbers of the sockets on which an application is served."""
    for site in runner.sites:
        yield from cast("_Site", site).listening()


def stop_listening(runner: web.AppRunner) -> None:
    """Accepts no more connections; those that are open go on."""
    for site in runner.sites:
        cast("_Site", site).close()


class _Site(web.TCPSite):
    """A site with a limit of connections: a new one beyond it closes the oldest.

    inherited: a socket that listens already; None to listen on the host and port.
    """

    def __init__(
        self,
        runner: web.AppRunner,
        host: str,
        port: int,
        inherited: socket.socket | None = None,
    ) -> None:
        super().__init__(runner, host, port)
        self._inherited = inherited

    def listening(self) -> list[int]:
        """Returns the numbers of the sockets that listen."""
        return [one.fileno() for one in cast("asyncio.Server", self._server).sockets]

    def close(self) -> None:
        """Accepts no more connections."""
        cast("asyncio.Server", self._server).close()

    async def start(self) -> None:
        """Starts listening."""
        await web.BaseSite.start(self)
        server = cast("web.Server", self._runner.server)  # set up before

        def accepted() -> asyncio.Protocol:
            connections = server.connections
            if len(connections) >= http_connections():
                connections[0].force_close()
            return server()

        loop = asyncio.get_running_loop()
        if self._inherited is not None:
            self._server = await loop.create_server(
                accepted, sock=self._inherited, backlog=_BACKLOG
            )
            return
        self._server = await loop.create_server(accepted, self._host, self._port, backlog=_BACKLOG)


_OWN_SITES = ("same-origin", "none")


def same_host_only(hosts: AllowedHosts) -> Middleware:
    """Returns a middleware that refuses requests for other hosts, and from other sites."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not hosts.serves(request.host, _own_address(request)):
            named = host_in(request.host)
            raise web.HTTPForbidden(
                text=f"Host {named!r} is not served here: to allow it, add it to admin.hosts\n"
            )
        origin = request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != request.host:
            raise web.HTTPForbidden(text="requests from other origins are refused\n")
        # browsers send this header even without an Origin; "none" is an address that the user typed
        # or chose
        if request.headers.get("Sec-Fetch-Site", "none") not in _OWN_SITES:
            raise web.HTTPForbidden(text="requests from pages of other sites are refused\n")
        return await handler(request)

    return check


def _own_address(request: web.Request) -> str | None:
    """Returns the address on which the request's connection came in."""
    name = request.transport and request.transport.get_extra_info("sockname")
    return name[0] if isinstance(name, tuple) else None


_JSON = "application/json"


def errors_as_json() -> Middleware:
    """Returns a middleware that turns errors into `{"error": ...}`, unless already JSON."""

    @web.middleware
    async def tell(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPError as error:
            if error.content_type != _JSON:
                error.text, error.content_type = json.dumps({"error": _reason(error)}), _JSON
            raise

    return tell


def _reason(error: web.HTTPError) -> str:
    match error:
        case web.HTTPNotFound():
            return "unknown path"
        case web.HTTPMethodNotAllowed():
            methods = ", ".join(sorted(error.allowed_methods))
            return f"{error.method} is not allowed here, only {methods}"
    said = (error.text or "").strip()
    return said or HTTPStatus(error.status).phrase


# Errors of the client, before or while a handler reads the request.
_THEIRS = (HttpProcessingError, web.RequestPayloadError)


class ServerLog:
    """The part of `logging.Logger` that aiohttp uses for a server.

    Malformed requests are logged in one line, and seldom, since any client could fill the log;
    without the error's text, which quotes the client. Errors of the server's own handlers are
    logged with a traceback.

    name: the server's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._malformed = 0

    def debug(self, message: str, *args: object, exc_info: object = None) -> None:
        """Logs nothing, unless aiohttp reports a malformed request here."""
        if isinstance(exc_info, _THEIRS):
            self.exception(message, *args, exc_info=exc_info)

    def exception(self, message: str, *args: object, exc_info: BaseException | None = None) -> None:
        """Logs a request that failed."""
        if not isinstance(exc_info, _THEIRS):
            log.error("%s: %s", self._name, message % args, exc_info=exc_info or True)
            return
        self._malformed += 1
        if is_logged(self._malformed):
            log.warning(
                "%s: a client sent an invalid HTTP request: %s (%d so far)",
                self._name,
                type(exc_info).__name__,
                self._malformed,
            )


# A worker's name, its requests in flight and its blocks.
Fill = tuple[str, int, int]

# Workers that are sampled without a pause, on the event loop that picks.
AT_ONCE = 32


class FleetSampler:
    """Samples the fleet until it is closed.

    fills: yields the workers one by one. clock: returns seconds since the epoch.
    """

    def __init__(
        self,
        observations: Observations,
        fills: Callable[[], Iterator[Fill]],
        clock: Callable[[], float],
        step_seconds: float = STEP_SECONDS,
    ) -> None:
        self._observations = observations
        self._fills = fills
        self._clock = clock
        self._step_seconds = step_seconds
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts, and takes the first sample."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stops sampling, and ends the streams of readers."""
        self._observations.is_closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self._sample()
            except Exception:  # the next step must still be recorded
                log.exception("the fleet could not be sampled")
            await asyncio.sleep(self._step_seconds)

    async def _sample(self) -> None:
        found: dict[str, tuple[int, int]] = {}
        for name, in_flight, blocks in self._fills():
            found[name] = in_flight, blocks
            if len(found) % AT_ONCE == 0:
                await asyncio.sleep(0)
        self._observations.sample(self._clock(), found)
