"""Asks workers about their health and load, and reads the load that their feeds report."""

import contextlib
import errno
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import aiohttp

from extproc.fleet.engine_metrics import MAX_METRICS_BYTES, report_of_feeds, report_of_metrics
from extproc.fleet.hearing import heard
from extproc.fleet.polling import Client, Look, Polling, Question
from extproc.fleet.record import Table, Worker
from extproc.routing.load import REPORT_SECONDS, Booking, Loads
from extproc.routing.speed import Speed
from extproc.routing.upstreams import Judge, Pulse, Upstream
from kvstate.events import EngineLoad
from kvstate.overlap import Overlap, Prompt, usable_tokens
from kvstate.seldom import is_logged

log = logging.getLogger("kvsteer.workers")

# A later answer is out of date.
MAX_ANSWER_SECONDS = 2.0


class Pace:
    """When each worker is asked one question: once an interval, spread over it.

    chance: 0 to 1, for jitter. monotonic: seconds.
    """

    def __init__(
        self, interval_seconds: float, chance: Callable[[], float], monotonic: Callable[[], float]
    ) -> None:
        self.answer_seconds = min(MAX_ANSWER_SECONDS, interval_seconds)
        self._interval_seconds = interval_seconds
        self._chance = chance
        self._monotonic = monotonic

    def question(self, name: str) -> Question:
        """Returns a question that is asked at this pace.

        Every worker has a place of its own, so that those that hang delay no other's answer. The
        fleet is asked over the whole interval, so few answers are awaited unless workers hang.
        """
        return Question(name, contextlib.nullcontext(), self._interval_seconds)

    def first_seconds(self) -> float:
        """Returns the seconds until a worker is asked the first time."""
        return self._interval_seconds * 0.5 * self._chance()

    def next_seconds(self, asked_at: float) -> float:
        """Returns the seconds until a worker that was asked then is asked again."""
        pause = self._interval_seconds * (0.9 + 0.2 * self._chance())
        return pause - (self._monotonic() - asked_at)


# The router itself has no socket left: that says nothing about the worker.
_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})

# Failed probes in a row that eject a worker; one success brings it back.
FAILURES_UNTIL_UNHEALTHY = 2

_UNHEALTHY = "fails its health probe"


class HealthProbe:
    """Probes the health of workers regularly.

    monotonic: the clock of the loads.
    """

    def __init__(self, table: Table, pace: Pace, monotonic: Callable[[], float]) -> None:
        self._upstreams = table.upstreams
        self._monotonic = monotonic
        self.pace = pace
        self.question = pace.question("health")

    async def ask(self, client: Client, worker: Worker) -> float:
        """Asks one worker; returns the seconds until it is asked again.

        vLLM and SGLang answer 200 without a body if they are healthy.
        """
        asked_at, upstream = self._monotonic(), worker.upstream
        if upstream is not None:
            fault = await self._fault(client, upstream)
            if fault is not None:
                self._take(worker, upstream, fault)
        return self.pace.next_seconds(asked_at)

    async def _fault(self, client: Client, upstream: Upstream) -> str | None:
        """Returns what is wrong with a worker, "" if nothing is, None if it could not be asked."""
        try:
            status, _ = await client.get(upstream.endpoint, "/health", self.pace.answer_seconds)
        except aiohttp.ClientOSError as error:
            return None if error.errno in _OURS else type(error).__name__
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return type(error).__name__
        is_well = 200 <= status < 300
        return "" if is_well else f"HTTP status {status}"

    def _take(self, worker: Worker, upstream: Upstream, fault: str) -> None:
        is_told = Judge.SCRAPES in upstream.against  # then the scrapes log it
        if not fault:
            if self._upstreams.restore(upstream, Judge.PROBE) and not is_told:
                log.info("worker %s is healthy again", worker.name)
            return
        if self._upstreams.fail(upstream, Judge.PROBE, FAILURES_UNTIL_UNHEALTHY, _UNHEALTHY):
            worker.holdings.lose(self._monotonic())
            if not is_told:
                log.warning("worker %s %s: %s", worker.name, _UNHEALTHY, fault)


# How long a worker in doubt may take to answer: without any other sign of life, a longer silence is
# no mere pause.
ANSWER_SECONDS = 1.0

# By then the question is over, however long the router itself was held up meanwhile.
_MOST_SECONDS = 60.0

# Nobody listens there, or there is no route. Any other connection error may be the router's own.
_NOBODY = frozenset({errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN})

_SERVER_ERROR = 500

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
        self.look = Look(self._look, "workers in doubt could not be asked")

    def _look(self) -> None:
        now, polling = self._monotonic(), self._polling
        for worker in self._table:
            upstream = worker.upstream
            if upstream is not None and upstream.vital.is_due(self._pulse(worker, upstream), now):
                polling.run(self._ask(polling.client, worker, upstream))

    def _pulse(self, worker: Worker, upstream: Upstream) -> Pulse:
        is_cut, batches = self._sign_of_life(worker.name)
        in_flight = len(upstream.load.bookings)
        is_suspect = self._table.upstreams.is_suspect(upstream.endpoint)
        is_doubted = is_suspect or bool(worker.asleep)
        return Pulse(is_cut, batches, in_flight, is_doubted)

    async def _ask(self, client: Client, worker: Worker, upstream: Upstream) -> None:
        batches = self._sign_of_life(worker.name)[1]
        try:
            fault = await _fault(client, upstream.endpoint)
        finally:
            upstream.vital.end(self._monotonic())
        if worker.upstream is not upstream:
            return  # it has gone, or moved
        now = self._monotonic()
        if fault and not (fault == SILENT and self._sign_of_life(worker.name)[1] != batches):
            self._note_failure(worker, upstream, fault, now)
            return
        upstreams = self._table.upstreams
        upstreams.doubt(upstream.endpoint, is_doubted=False)
        if upstream.vital.note_life(now):
            upstreams.restore(upstream, Judge.DOUBTS)
            log.info("worker %s is healthy again", worker.name)
        if self._look_closer is not None:
            await self._look_closer(client, worker)

    def _note_failure(self, worker: Worker, upstream: Upstream, fault: str, now: float) -> None:
        if not upstream.vital.note_failure(now, is_certain=fault in (REFUSED, SILENT)):
            return
        self._table.upstreams.eject(upstream, Judge.DOUBTS, f"{DEAD}: {fault}")
        if fault == REFUSED:
            worker.holdings.lose(now)
        log.warning("worker %s %s: %s; ejected while others answer", worker.name, DEAD, fault)


async def _fault(client: Client, endpoint: str) -> str:
    """Returns what is wrong with a worker in doubt, "" if it is alive.

    It is alive if it answers anything but a server error, even if that is not HTTP.
    """
    try:
        status, _ = await heard(client.get(endpoint, "/health", _MOST_SECONDS), ANSWER_SECONDS)
    except TimeoutError:
        return SILENT
    except aiohttp.ClientConnectorError as error:
        return REFUSED if error.os_error.errno in _NOBODY else ""
    except (aiohttp.ClientError, OSError):
        return ""
    return f"GET /health has status {status}" if status >= _SERVER_ERROR else ""


# Failed connections in a row that eject a worker.
FAILURES_UNTIL_UNFIT = 3

_UNFIT = "does not answer on its endpoint"

_OK = 200


def _unread(_: Worker, __: bytes) -> None:
    pass


class LoadReports:
    """Keeps the load of all workers current, from their feeds and their metrics.

    feed_loads: returns the loads that a worker's feeds reported, each with its age in seconds.
    monotonic: the clock of the loads. read: takes the metrics of a worker, for all else.
    """

    def __init__(
        self,
        table: Table,
        loads: Loads,
        feed_loads: Callable[[str], Sequence[tuple[EngineLoad, float]]],
        pace: Pace,
        monotonic: Callable[[], float],
        read: Callable[[Worker, bytes], None] = _unread,
    ) -> None:
        self._table = table
        self._loads = loads
        self._feed_loads = feed_loads
        self._monotonic = monotonic
        self._read_metrics = read
        self.pace = pace
        self.question = pace.question("metrics")
        self.look = Look(self._read, "the load of feeds could not be read")

    def _read(self) -> None:
        for worker in self._table:
            now = self._monotonic()
            report = report_of_feeds(self._feed_loads(worker.name), now)
            if report is not None and worker.upstream is not None:
                self._loads.report(worker.endpoint, report, now)

    async def ask(self, client: Client, worker: Worker) -> float:
        """Scrapes one worker, and ejects one that fails repeatedly, until it answers again.

        A worker whose feeds report its load is not asked, unless scrapes ejected it. Returns the
        seconds until it is asked again.
        """
        asked_at, upstream = self._monotonic(), worker.upstream
        if upstream is not None and (
            Judge.SCRAPES in upstream.against or not self._has_feed_load(worker)
        ):
            await self._scrape(client, worker, upstream, asked_at)
        return self.pace.next_seconds(asked_at)

    def _has_feed_load(self, worker: Worker) -> bool:
        """Returns whether the worker's feeds reported its load lately."""
        ages = [age + load.age_ms / 1000 for load, age in self._feed_loads(worker.name)]
        return bool(ages) and max(ages) < REPORT_SECONDS

    async def _scrape(
        self, client: Client, worker: Worker, upstream: Upstream, asked_at: float
    ) -> None:
        seconds = self.pace.answer_seconds
        try:
            status, text = await client.get(
                upstream.endpoint, "/metrics", seconds, MAX_METRICS_BYTES
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._note_failure(worker, upstream, error)
            return
        was_unfit = self._table.upstreams.restore(upstream, Judge.SCRAPES)
        if was_unfit and Judge.PROBE not in upstream.against:  # else its health probe logs it
            log.info("worker %s answers again", worker.name)
        if status != _OK or worker.upstream is not upstream:
            return
        self._read_metrics(worker, text)
        if self._has_feed_load(worker):
            return
        report = report_of_metrics(text, asked_at)
        if report is not None:
            self._loads.report(upstream.endpoint, report, self._monotonic())

    def _note_failure(self, worker: Worker, upstream: Upstream, error: Exception) -> None:
        upstreams = self._table.upstreams
        if upstreams.fail(upstream, Judge.SCRAPES, FAILURES_UNTIL_UNFIT, _UNFIT):
            worker.holdings.lose(self._monotonic())
            if Judge.PROBE not in upstream.against:
                log.warning("worker %s %s: %s", worker.name, _UNFIT, type(error).__name__)


# How often prompts in flight are looked up in the index: the resolution of the measured times.
LOOK_SECONDS = 0.05

# One look in this many includes workers without waiting prompts: their measurements fade.
LOOKS_WHILE_IDLE = 20

# Looks after a batch has arrived, since it may take some time until it is applied.
LOOKS_A_BATCH = 2

# This many of a worker's oldest prompts are looked up: one whose answer was aborted before it was
# computed must not hide those behind it.
MAX_AHEAD = 3

# A look ends after this many tokens, over all workers: decisions wait meanwhile.
MAX_TOKENS_A_LOOK = 100_000


class Computed:
    """Notes in the load records when a prompt is computed, so that speeds are learned.

    overlaps, batches: the methods of `kvstate.fleet.FollowedWorkers`. block_size: returns the
    tokens in a worker's block, by its name. monotonic: the clock of the loads.
    """

    def __init__(
        self,
        workers: Iterable[Worker],
        loads: Loads,
        overlaps: Callable[[Prompt], Mapping[str, Overlap]],
        batches: Callable[[str], int],
        block_size: Callable[[str], int],
        monotonic: Callable[[], float],
    ) -> None:
        self._workers = workers
        self._loads = loads
        self._overlaps = overlaps
        self._batches = batches
        self._block_size = block_size
        self._monotonic = monotonic
        self._looks = 0
        self._failures = 0
        self._remaining_tokens = 0
        self._resume_after = ""  # the worker at which the previous look ended early
        self.look = Look(self._look, "prompts under way could not be looked up", LOOK_SECONDS)

    def _look(self) -> None:
        """Looks at the workers that are due, up to a limit of tokens."""
        self._looks += 1
        self._remaining_tokens = MAX_TOKENS_A_LOOK
        now, resting = self._monotonic(), self._looks % LOOKS_WHILE_IDLE == 0
        due = [
            (worker, upstream)
            for worker in self._workers
            if (upstream := worker.upstream) and (resting or upstream.load.speed.waiting)
        ]
        names = [worker.name for worker, _ in due]
        first = names.index(self._resume_after) if self._resume_after in names else 0
        self._resume_after = ""
        for worker, upstream in due[first:]:
            if self._remaining_tokens <= 0:
                self._resume_after = worker.name
                return
            try:
                self._look_at(worker, upstream, now)
            except Exception:  # one worker must not end the look at the others
                self._failures += 1
                if is_logged(self._failures):
                    log.exception("prompts under way at %s could not be looked up", worker.name)

    def _look_at(self, worker: Worker, upstream: Upstream, now: float) -> None:
        batches = self._batches(worker.name)
        if batches != worker.batches_seen:
            worker.batches_seen, worker.looks_due = batches, LOOKS_A_BATCH
        if worker.looks_due:
            worker.looks_due -= 1
            self._look_up(worker, upstream.load.speed, now)
        self._loads.look(upstream.endpoint, now)

    def _look_up(self, worker: Worker, speed: Speed[Booking], now: float) -> None:
        for booking in self._ahead(list(speed.waiting)):
            is_first = speed.is_first(booking)
            if (booking.is_sure or is_first) and booking in speed.waiting:
                self._look_up_one(worker, booking, now, is_first=is_first)

    def _ahead(self, waiting: Sequence[Booking]) -> Sequence[Booking]:
        """Returns the oldest prompts and, in turn, one of those behind them.

        So prompts that nothing announces cannot hide the others for long.
        """
        behind = len(waiting) - MAX_AHEAD
        if behind <= 0:
            return waiting
        return [*waiting[:MAX_AHEAD], waiting[MAX_AHEAD + self._looks % behind]]

    def _look_up_one(self, worker: Worker, booking: Booking, now: float, *, is_first: bool) -> None:
        prompt = booking.prompt
        if prompt is None:
            return
        if not usable_tokens(prompt.tokens, self._block_size(worker.name)):
            self._loads.unseen(booking)  # its blocks are larger than was known at the pick
            return
        self._remaining_tokens -= len(prompt.tokens)
        overlap = self._overlaps(prompt).get(worker.name)
        usable = usable_tokens(prompt.tokens, 1 if overlap is None else overlap.block_size)
        if overlap is not None and overlap.held_tokens >= usable:
            self._loads.note_computed(booking, now)
        elif is_first and not booking.is_sure:
            held = 0 if overlap is None else overlap.certain_tokens + overlap.uncertain_tokens
            self._loads.revise(booking, len(prompt.tokens) - held)
