"""Several routers as one: sends messages at each tick, receives others', and reports its status.

Each router reports its own requests: their load, what it sent where, where conversations belong
(`reporter`, `messages`). `other_routers` merges what the others report into the same records that
its own requests use, so that a decision counts all of them. Transports carry bytes (`carriers`),
and a new router gets the index of another one as rows (`rows`).

This folder may know loads, claims and homes. It knows no request and no decision.

The rules: no request waits for any of this. If sharing fails, the others are forgotten after a few
ticks, and this router decides by its own requests until their messages arrive again. A message
counts once, only from a router that has proved that it runs now, and can at worst make workers look
busier than they are, or as if they held prompts that they do not.
"""

import asyncio
import contextlib
import functools
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.base.fault import ROUTER, Fault
from extproc.base.secret_file import secret_in
from extproc.config.sections import SharingSettings
from extproc.media.knowledge import MediaKnowledge
from extproc.routing.claims.claim_table import Claim, ClaimTable, Holdings
from extproc.routing.claims.homes import Homes, Turn
from extproc.routing.claims.lines import Lines
from extproc.routing.load.loads import Loads
from extproc.sharing.carriers import (
    CONNECT_SECONDS,
    CONNECTING,
    password_of,
    transport_of,
)
from extproc.sharing.hearing_time import HearingTime
from extproc.sharing.home_reports import known_homes
from extproc.sharing.messages import HomeReport, Keys, MessageError, is_from, keys_of, worker_id
from extproc.sharing.other_routers import OtherRouters, SharedWorker
from extproc.sharing.outages import Outages
from extproc.sharing.reporter import LEAST_UNCACHED_TOKENS, Reporter
from extproc.sharing.row_messages import is_about_rows
from extproc.sharing.rows import RowsExchange

log = logging.getLogger("kvsteer.sharing")

# A router is forgotten after this many ticks, plus this many seconds, without a message. On a busy
# machine a healthy one may say nothing for half a second.
FORGET_TICKS = 10
FORGET_SECONDS = 3.0

# The server at sharing.url is down after as many ticks, plus this many seconds, without a reply.
DOWN_SECONDS = 0.1

# Shortest time between two messages, even if another router waits for an answer.
LEAST_TICK_SECONDS = 0.01

# After this many ticks without news, a router sends a sign of life.
ALIVE_TICKS = 4

# Characters that a host's name may have, but a router's name must not.
_NO_NAME = re.compile(r"[^!-~]")


class SharingFleet(Protocol):
    """The parts of the workers into which other routers' requests are merged."""

    @property
    def loads(self) -> Loads:
        """The loads of their endpoints."""

    def places(self) -> list[tuple[str, str]]:
        """Returns name and ip:port of every worker that has an address now."""

    def holdings(self, name: str) -> Holdings:
        """Returns the record of what was sent to a worker."""

    def next_change(self) -> asyncio.Event:
        """Returns an event, which is another object after every change of the workers."""


class SignallingReporter(Reporter):
    """Also signals that something should not wait for the next tick.

    work_came: set when a request begins that has enough work to be reported. challenge_came: set
    when another router is to be challenged or answered.
    """

    def __init__(self, keys: Keys, origin: str, incarnation: int, silent_seconds: float) -> None:
        super().__init__(keys, origin, incarnation, silent_seconds)
        self.work_came = asyncio.Event()
        self.challenge_came = asyncio.Event()

    def challenge(self, tag: bytes, number: int) -> None:
        """Asks the router with this tag to send a number back, so that its messages count here."""
        super().challenge(tag, number)
        self.challenge_came.set()
        self.work_came.set()

    def answer(self, number: int) -> None:
        """Answers a challenge of another router, to which all figures and open claims are new."""
        super().answer(number)
        self.challenge_came.set()
        self.work_came.set()

    def begin(self, claims: Sequence[Claim], endpoint: str, uncached_tokens: float) -> None:
        """Notes that a request was sent to an endpoint."""
        super().begin(claims, endpoint, uncached_tokens)
        if uncached_tokens >= LEAST_UNCACHED_TOKENS:
            self.work_came.set()

    def note_turn(self, turn: Turn, endpoint: str) -> None:
        """Notes that a conversation's request was sent to an endpoint."""
        super().note_turn(turn, endpoint)
        self.work_came.set()

    def note_home(self, key: int, endpoint: str) -> None:
        """Notes that what has this key belongs to an endpoint."""
        super().note_home(key, endpoint)
        self.work_came.set()


def reporter_of(options: SharingSettings, host_name: str | None = None) -> SignallingReporter:
    """Returns what makes the messages about this router's requests.

    host_name: None for that of this machine.

    Raises:
        StartError: a file with a secret cannot be read.
    """
    if options.secret_file is not None:
        secret = b"file " + secret_in("sharing.secret_file", options.secret_file)
    else:
        secret = b"channel " + options.channel.encode() + b" " + password_of(options).encode()
    host = _NO_NAME.sub("-", host_name or socket.gethostname())[:48]
    name = options.name or f"{host}-{os.getpid()}"
    silent_seconds = ALIVE_TICKS * options.tick_ms / 1000
    return SignallingReporter(keys_of(secret), name, time.time_ns(), silent_seconds)


class Sharing:
    """One router's part in sharing.

    reporter: makes the messages about its own requests. sent, homes, lines: the claims, the homes
    of conversations, and who waits for room, of all routers. monotonic: the clock of the workers'
    loads, in seconds. media: what is known of media items, None if that is not shared. transport:
    carries the messages. hearing: the time that the messages of others take. outages: of the
    transport. rows: exchanges rows of the index, None if that is not possible.
    """

    def __init__(
        self,
        options: SharingSettings,
        reporter: SignallingReporter,
        fleet: SharingFleet,
        sent: ClaimTable,
        homes: Homes,
        lines: Lines,
        monotonic: Callable[[], float],
        media: MediaKnowledge | None = None,
    ) -> None:
        self._options = options
        self._reporter = reporter
        self._fleet = fleet
        self._homes = homes
        self._monotonic = monotonic
        self._seconds = options.tick_ms / 1000
        self._forget_seconds = FORGET_TICKS * self._seconds + FORGET_SECONDS
        self.others = OtherRouters(
            reporter,
            fleet.loads,
            sent,
            homes,
            self._places,
            self._forget_seconds,
            _random_number,
            None if media is None else media.identities,
            lines=lines,
        )
        self._lines = reporter.lines = lines
        if media is not None:
            media.learning.report = reporter.items.note
            reporter.items.known = media.identities.items
        down_seconds = FORGET_TICKS * self._seconds + DOWN_SECONDS
        self.transport = transport_of(options, self.hear, reporter.hello, down_seconds)
        self.rows: RowsExchange | None = None
        self._known_change: asyncio.Event | None = None
        self._workers_by_id: dict[int, SharedWorker] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._did_send = False
        self._ticked_at = 0.0
        self.hearing = HearingTime()
        self.outages = Outages()
        self._patient_until = monotonic() + 2 * CONNECT_SECONDS
        self.sent = self.sent_bytes = self.not_sent = self.received_bytes = 0

    def send(self, message: bytes) -> bool:
        """Sends one message in reply to another; returns whether it was sent."""
        self.hearing.note_sent(len(message))
        self.sent_bytes += len(message)
        return self.transport.send([message])

    def start(self) -> None:
        """Starts sending and receiving."""
        self._tasks = [
            asyncio.create_task(self.transport.run()),
            asyncio.create_task(self._tick()),
        ]

    async def close(self) -> None:
        """Stops; the others forget this router after some silence."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def hindrance(self) -> str:
        """Returns why this router decides alone, "" while it shares."""
        fault = self.transport.fault
        return f"{self._options.url}: {fault}" if fault else ""

    def faults(self) -> Iterator[Fault]:
        """Yields a fault while this router decides alone."""
        hindrance = self.hindrance()
        if hindrance:
            says = f"not sharing with other routers: {hindrance}"
            yield Fault("sharing-alone", ROUTER, says)

    def status(self) -> dict[str, Any]:
        """Returns the answer of GET /routers."""
        now = self._monotonic()
        return {
            "name": self._reporter.origin,
            "url": self._options.url,
            "tick_ms": self._options.tick_ms,
            "alone": self.hindrance(),
            "routers": [
                {
                    "name": other.origin,
                    "age_ms": round(1000 * (now - other.heard_at), 1),
                    "delay_ms": round(1000 * other.delay_seconds, 3),
                    "known_seconds": round(now - other.since, 1),
                    "messages": other.sequence,
                    "lost": other.lost,
                    "in_flight": self._fleet.loads.in_flight_of(other.key),
                    "claims": len(other.claims),
                }
                for other in self.others.peers.values()
            ],
        }

    async def _tick(self) -> None:
        while True:
            await self._pause()
            try:
                self._report(self._monotonic())
            except Exception:  # what fails once must not end it
                log.exception("a tick of sharing failed")
                await asyncio.sleep(DOWN_SECONDS)

    async def _pause(self) -> None:
        """Waits for a tick; if the last one sent no message, `work_came` ends the wait early.

        `challenge_came` does so in any case: a newcomer does not wait for a slow tick.
        """
        work_came, challenge_came = self._reporter.work_came, self._reporter.challenge_came
        if self._did_send:
            least = min(self._seconds, LEAST_TICK_SECONDS)
            await asyncio.sleep(least)
            await _set_within(challenge_came, self._seconds - least)
        else:
            await _set_within(work_came, self._seconds)
        work_came.clear()
        challenge_came.clear()

    def _report(self, now: float) -> None:
        was_here, self._ticked_at = now - self._ticked_at < self._forget_seconds / 2, now
        # if this process itself paused, the others' messages have yet to be read
        for other in self.others.forget(now) if was_here else ():
            if not self.outages.is_going_on:
                log.info("router %s is silent and no longer counted", other.origin)
        if self.others.asks(now):
            self._reporter.hello()
        wall_us = time.time_ns() // 1000
        messages = self._reporter.compose(self._fleet.loads, now, wall_us, self._known_homes)
        self._did_send = bool(messages)
        if messages:
            if self.transport.send(messages):
                self.sent += len(messages)
                self.sent_bytes += sum(map(len, messages))
            else:
                self.not_sent += len(messages)
                self._reporter.hello()
        self._say(self._monotonic())

    def _say(self, now: float) -> None:
        """Logs that this router decides alone, and that it shares again, but seldom."""
        fault = self.transport.fault
        self._lines.is_current = not fault
        if fault == CONNECTING and now < self._patient_until:
            return
        outage = self.outages.look(fault, now)
        if outage is None:
            return
        url, times = self._options.url, f" (outage {outage.number})" if outage.number > 1 else ""
        if outage.fault:
            log.warning("not sharing with other routers: %s: %s%s", url, outage.fault, times)
        else:
            log.info("sharing with other routers over %s", url)

    def hear(self, message: bytes) -> float:
        """Handles a message; returns how many seconds to pause before the next."""
        now = self._monotonic()
        return self.hearing.spend(now, functools.partial(self._receive, message, now))

    def _receive(self, message: bytes, now: float) -> None:
        """Merges a message unless it is rejected, or is this router's own."""
        if is_from(message, self._reporter.tag):
            return
        self.received_bytes += len(message)
        if is_about_rows(message):
            self._receive_rows(message)
            return
        routers = len(self.others.peers)
        report = self.others.hear(message, now, time.time_ns() // 1000)
        if report is not None and len(self.others.peers) > routers and not self.outages.is_going_on:
            log.info("router %s joined", report.origin)

    def _receive_rows(self, message: bytes) -> None:
        if self.rows is None:
            return
        try:
            self.rows.hear(message)
        except MessageError as error:
            self.others.counts[error.reason] += 1

    def _known_homes(self, now: float) -> list[HomeReport]:
        ids = {place.holdings.worker: number for number, place in self._places().items()}
        return known_homes(self._homes, ids, now)

    def _places(self) -> dict[int, SharedWorker]:
        change = self._fleet.next_change()
        if change is not self._known_change:
            self._known_change, keys = change, self._reporter.keys
            self._workers_by_id = {
                worker_id(keys, endpoint): SharedWorker(endpoint, self._fleet.holdings(name))
                for name, endpoint in self._fleet.places()
            }
        return self._workers_by_id


def _random_number() -> int:
    return secrets.randbits(63)


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    """Waits until an event is set, at most so many seconds."""
    if seconds > 0.0:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()


class SharingCollector(Collector):
    """Shows the status of sharing at every scrape."""

    def __init__(self, sharing: Sharing | None) -> None:
        self._sharing = sharing

    def collect(self) -> Iterator[Metric]:
        """Yields the metric families of sharing."""
        sharing = self._sharing
        alone = GaugeMetricFamily(
            "kvsteer_sharing_alone",
            "1 while this router decides alone although it should share with others",
        )
        routers = GaugeMetricFamily(
            "kvsteer_sharing_routers", "Peer routers whose requests are counted now"
        )
        age = GaugeMetricFamily(
            "kvsteer_sharing_age_seconds",
            "Time since the last message from another router",
            labels=["router"],
        )
        messages = CounterMetricFamily(
            "kvsteer_sharing_messages",
            "Messages between routers: sent, not_sent, accepted, or why one was rejected",
            labels=["outcome"],
        )
        sizes = CounterMetricFamily(
            "kvsteer_sharing_bytes",
            "Bytes of messages between routers, by direction",
            labels=["direction"],
        )
        lost = CounterMetricFamily(
            "kvsteer_sharing_unknown_workers",
            "Load figures, claims and homes of other routers for workers that are not known here",
        )
        excess = CounterMetricFamily(
            "kvsteer_sharing_excess_claims",
            "Claims and homes of other routers that were ignored, since they sent too many",
        )
        if sharing is not None:
            _fill(sharing, (alone, routers, age), (messages, sizes, lost, excess))
        yield from (alone, routers, age, messages, sizes, lost, excess)


def _fill(
    sharing: Sharing,
    gauges: Sequence[GaugeMetricFamily],
    counters: Sequence[CounterMetricFamily],
) -> None:
    (alone, routers, age), (messages, sizes, lost, excess) = gauges, counters
    status, others = sharing.status(), sharing.others
    alone.add_metric([], int(bool(status["alone"])))
    routers.add_metric([], len(status["routers"]))
    ages = {router["name"]: router["age_ms"] / 1000 for router in status["routers"]}
    for name, seconds in ages.items():  # two runs of a router may have one name
        age.add_metric([name], seconds)
    outcomes = {"sent": sharing.sent, "not_sent": sharing.not_sent, **others.counts}
    for outcome, count in outcomes.items():
        messages.add_metric([outcome], count)
    sizes.add_metric(["sent"], sharing.sent_bytes)
    sizes.add_metric(["received"], sharing.received_bytes)
    lost.add_metric([], others.unknown_workers)
    excess.add_metric([], others.excess_claims)
