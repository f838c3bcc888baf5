"""Asks workers in doubt whether they are alive."""

import errno
import logging
from collections.abc import Awaitable, Callable

import aiohttp

from extproc.fleet.asking.polling import Client, PeriodicCheck, Polling
from extproc.fleet.asking.time_limits import answered_within
from extproc.fleet.records.table import Table
from extproc.fleet.records.worker import Worker
from extproc.routing.health.evidence import Judge
from extproc.routing.health.probe_schedule import SignsOfLife
from extproc.routing.health.statuses import FIRST_SERVER_ERROR
from extproc.routing.health.upstreams import Upstream

log = logging.getLogger("kvsteer.workers")

# How long a worker in doubt may take to answer: without any other sign of life, a longer silence is
# no mere pause.
ANSWER_SECONDS = 1.0

# By then the question is over, however long the router itself was held up meanwhile.
_MOST_SECONDS = 60.0

# Nobody listens there, or there is no route. Any other connection error may be the router's own.
_NOBODY = frozenset({errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN})

DEAD = "does not answer"
REFUSED = "it cannot be connected to"
SILENT = f"not a byte within {ANSWER_SECONDS:g} s"


class Doubts:
    """Asks workers in doubt whether they are alive, and ejects the dead.

    sign_of_life: returns, by a worker's name, whether its feed has no connection, and how many
    batches have arrived so far. monotonic: the clock of the loads. look_closer: asks a worker in
    doubt that is alive whether it sleeps.
    """

    def __init__(
        self,
        table: Table,
        polling: Polling,
        sign_of_life: Callable[[str], tuple[bool, int]],
        monotonic: Callable[[], float],
        look_closer: Callable[[Client, Worker], Awaitable[None]] | None = None,
    ) -> None:
        self._table = table
        self._polling = polling
        self._look_closer = look_closer
        self._sign_of_life = sign_of_life
        self._monotonic = monotonic
        self.check = PeriodicCheck(self._check, "workers in doubt could not be asked")

    def _check(self) -> None:
        now, polling = self._monotonic(), self._polling
        for worker in self._table:
            upstream = worker.upstream
            if upstream is None:
                continue
            if upstream.probes.is_due(self._signs(worker, upstream, now), now):
                polling.run(self._ask(polling.client, worker, upstream))

    def _signs(self, worker: Worker, upstream: Upstream, now: float) -> SignsOfLife:
        is_cut, batches = self._sign_of_life(worker.name)
        in_flight = len(upstream.load.tickets)
        is_dead = upstream.is_ejected_by(Judge.DOUBTS, now)
        is_doubted = is_dead or upstream.is_suspect or bool(worker.asleep)
        return SignsOfLife(is_cut, batches, in_flight, is_doubted)

    async def _ask(self, client: Client, worker: Worker, upstream: Upstream) -> None:
        batches = self._sign_of_life(worker.name)[1]
        try:
            fault = await _fault(client, upstream.endpoint)
        finally:
            upstream.probes.end(self._monotonic())
        if worker.upstream is not upstream:
            return  # it has gone, or moved
        now = self._monotonic()
        if fault and not (fault == SILENT and self._sign_of_life(worker.name)[1] != batches):
            self._note_failure(worker, upstream, fault, now)
            return
        upstreams = self._table.upstreams
        upstreams.doubt(upstream.endpoint, is_doubted=False)
        upstream.probes.note_life(now)
        if upstreams.restore(upstream, Judge.DOUBTS):
            log.info("worker %s is healthy again", worker.name)
        if self._look_closer is not None:
            await self._look_closer(client, worker)

    def _note_failure(self, worker: Worker, upstream: Upstream, fault: str, now: float) -> None:
        reason, is_certain = f"{DEAD}: {fault}", fault in (REFUSED, SILENT)
        upstreams = self._table.upstreams
        if not upstreams.note_failure(upstream, Judge.DOUBTS, reason, now, is_certain=is_certain):
            return
        if fault == REFUSED:
            worker.holdings.lose(now)
        log.warning("worker %s %s; ejected while others answer", worker.name, reason)


async def _fault(client: Client, endpoint: str) -> str:
    """Returns what is wrong with a worker in doubt, "" if it is alive.

    It is alive if it answers anything but a server error, even if that is not HTTP.
    """
    try:
        status, _ = await answered_within(
            client.get(endpoint, "/health", _MOST_SECONDS), ANSWER_SECONDS
        )
    except TimeoutError:
        return SILENT
    except aiohttp.ClientConnectorError as error:
        return REFUSED if error.os_error.errno in _NOBODY else ""
    except (aiohttp.ClientError, OSError):
        return ""
    return f"GET /health has status {status}" if status >= FIRST_SERVER_ERROR else ""
