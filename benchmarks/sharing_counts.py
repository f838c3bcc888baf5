"""Counts the work of a tick of sharing: the same in every run, whatever the load.

python benchmarks/sharing_counts.py [--quick | --smoke] [--json FILE]

Four routers as in benchmarks/sharing.py make 1,000 decisions a second in all. The messages of
three of them, and the moments in which they arrive, are recorded; the fourth hears them, and tells
its own, through a socket at whose other end nothing works. Valgrind counts its instructions, part
by part: each part is what a tick takes more than with only the parts above it. The connection alone
("wait", "publish" and "read") is the least that sharing over a server takes; what the kernel does
for it is not counted, nor that the event loop wakes up. A busy router sends 80 messages a second,
each in a tick.
"""

import argparse
import asyncio
import gc
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence

import uvloop
from copies_counted import instructions_of_copies, wait_for
from measure import NO_REFERENCE, Figure, Row, or_reason
from rows import arguments, run
from sharing import RATE, ROUTERS, Fleet, Traffic, records

from extproc.config.sections import SharingSettings as Options
from extproc.routing.claims.claim_table import ClaimTable
from extproc.routing.claims.homes import Homes
from extproc.routing.claims.lines import Lines
from extproc.routing.load.loads import Loads
from extproc.sharing.carriers import ValkeyConnection, _Line
from extproc.sharing.messages import MAX_BYTES, decoded, is_from
from extproc.sharing.sharing import Sharing, reporter_of

TICKS_PER_SECOND = 80
DECISIONS_PER_SECOND = 1_000 / ROUTERS
# Until as many requests end as begin.
WARM = 60
# How many ticks are counted, fewer subtracted from more: a second, with one report of all workers.
FEW = 10
MANY = FEW + TICKS_PER_SECOND
SMOKE = 4
NEVER = 1_000_000_000

# The parts of a tick, each with those above it.
PARTS = {
    "decisions": "the decisions themselves, without sharing",
    "note": "note them for the next message",
    "wait": "wait for the tick",
    "encode": "put the message together",
    "publish": "publish it",
    "read": "read its reply, and four messages",
    "decode": "open and parse three of them",
    "apply": "count what they say",
}
CONNECTION = ("wait", "publish", "read")

SUBSCRIBED = b">3\r\n$9\r\nsubscribe\r\n$7\r\nkvsteer\r\n:1\r\n"
REPLY = b":4\r\n"


class Clock:
    """The routers' time. seconds: of it."""

    def __init__(self) -> None:
        self.seconds = 1_000.0

    def __call__(self) -> float:
        """Returns the time."""
        return self.seconds

    def time_ns(self) -> int:
        """Returns the time in nanoseconds, as a clock on a wall."""
        return int(self.seconds * 1e9)


class _Kept:
    """A carrier that keeps the messages."""

    fault = ""

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    async def run(self) -> None:
        """Does nothing."""

    def send(self, messages: Sequence[bytes]) -> bool:
        """Keeps messages."""
        self.messages.extend(messages)
        return True


class Router:
    """One of the routers."""

    def __init__(self, number: int, clock: Clock) -> None:
        options = Options("redis://127.0.0.1:1", name=f"router-{number}", tick_ms=1)
        self._clock = clock
        self._ticks = 0
        reporter = reporter_of(options)
        fleet = Fleet(Loads(records(), RATE, reporter.touched))
        sent = ClaimTable(reporter.secret)
        homes, lines = Homes(reporter.secret), Lines(reporter.secret, 120.0, 512)
        self.sharing = Sharing(options, reporter, fleet, sent, homes, lines, clock)
        self.sharing.hearing.most_seconds = math.inf  # valgrind is slow
        self.traffic = Traffic(number, fleet, sent, reporter)
        carrier = self.sharing.transport
        assert isinstance(carrier, ValkeyConnection)
        self.carrier = carrier
        self.carrier._answer_seconds = math.inf  # noqa: SLF001 - it has no such setting
        self.carrier.fault = ""

    def decide(self) -> None:
        """Makes the decisions of a tick."""
        before, self._ticks = self._ticks, self._ticks + 1
        each = DECISIONS_PER_SECOND / TICKS_PER_SECOND
        for _ in range(int(self._ticks * each) - int(before * each)):
            self.traffic.decide(self._clock.seconds)
        self.traffic.end(self._clock.seconds)
        if before % 2 == 0:
            self.traffic.probe(self._clock.seconds)

    def send(self) -> list[bytes]:
        """Returns the messages of a tick."""
        kept = _Kept()
        self.sharing.transport = kept
        self.sharing._report(self._clock.seconds)  # noqa: SLF001 - as its task does
        self.sharing.transport = self.carrier
        return kept.messages


class Bench:
    """Four routers that know each other, and what three of them say in the next ticks."""

    def __init__(self, ticks: int) -> None:
        self._clock = clock = Clock()
        vars(time)["time_ns"] = clock.time_ns
        routers = [Router(number, clock) for number in range(ROUTERS)]
        for _ in range(WARM):
            self._pass()
            for router in routers:
                router.decide()
            messages = {router: router.send() for router in routers}
            for router in routers:
                for other in routers:
                    for message in messages[other]:
                        router.sharing.hear(message)
        self._router, *others = routers
        assert len(self._router.sharing.others.peers) == len(others)
        began_at = clock.seconds
        self._heard = [self._recorded(others) for _ in range(ticks)]
        clock.seconds = began_at

    def _pass(self) -> None:
        self._clock.seconds += 1 / TICKS_PER_SECOND

    def _recorded(self, others: list[Router]) -> list[bytes]:
        """Returns what the server sends of the others' messages in a tick, read by read."""
        self._pass()
        for other in others:
            other.decide()
        return [b"".join(map(pushed, other.send())) for other in others]

    async def ticks(self, count: int, part: str) -> int:
        """Runs so many ticks with the parts up to this one; returns how many messages came."""
        router, done = self._router, parts_up_to(part)
        carrier = router.carrier
        if "note" not in done:
            router.traffic.reporter = None
        heard = _Heard(router.sharing, done)
        server, carrier._line = await _connected(heard.take, carrier._answered)  # noqa: SLF001
        for reads in self._heard[:count]:
            self._pass()
            router.decide()
            if "wait" in done:
                await router.sharing._pause()  # noqa: SLF001 - as its task does
            messages = router.send() if "encode" in done else []
            if "publish" in done:
                carrier.send(messages)
                server.recv(MAX_BYTES)
            back = [pushed(message) + REPLY for message in messages] or [b""]
            for data in (*reads, *back):
                if "read" in done:
                    server.sendall(data)
                await _turn()
        carrier._line.end(ConnectionError())  # noqa: SLF001 - as its task does
        return heard.count


class _Heard:
    """Takes the messages from the connection. count: of them."""

    def __init__(self, sharing: Sharing, done: Sequence[str]) -> None:
        self._sharing = sharing
        self._reporter = sharing._reporter  # noqa: SLF001
        self.take: Callable[[bytes], float] = self._drop
        if "apply" in done:
            self.take = self._apply
        elif "decode" in done:
            self.take = self._decode
        self.count = 0

    def _drop(self, _: bytes) -> float:
        self.count += 1
        return 0.0

    def _decode(self, message: bytes) -> float:
        self.count += 1
        if not is_from(message, self._reporter.tag):
            decoded(message, self._reporter.keys)
        return 0.0

    def _apply(self, message: bytes) -> float:
        self.count += 1
        return self._sharing.hear(message)


async def _connected(
    hear: Callable[[bytes], float], answered: Callable[[], None]
) -> tuple[socket.socket, _Line]:
    """Returns a server's end of a connection, and the router's, which is subscribed."""
    server, own = socket.socketpair()
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=own)
    line = _Line(transport, hear, answered)
    server.sendall(SUBSCRIBED)
    await line.subscribed
    return server, line


async def _turn() -> None:
    """Lets the event loop look at its sockets."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def pushed(message: bytes) -> bytes:
    """Returns a message as the server sends it to each router."""
    head = b">3\r\n$7\r\nmessage\r\n$7\r\nkvsteer\r\n$%d\r\n" % len(message)
    return head + message + b"\r\n"


def parts_up_to(part: str) -> list[str]:
    """Returns a part and those above it."""
    names = list(PARTS)
    return names[: names.index(part) + 1]


def _serve() -> None:
    """Runs a few ticks, and many, with each part, in copies of one process that has warmed up."""
    bench = Bench(MANY)
    gc.collect()
    gc.freeze()  # as in the router, where old objects are collected only while it is idle
    gc.set_threshold(*gc.get_threshold()[:2], NEVER)
    for part in PARTS:
        for count in (FEW, MANY):
            child = os.fork()
            if not child:
                uvloop.run(bench.ticks(count, part))
                os._exit(0)
            wait_for(child)
    os._exit(0)


def instructions() -> dict[str, float]:
    """Returns the instructions of a tick with the parts up to each one.

    Raises:
        CannotRunError: valgrind is missing.
    """
    refs = instructions_of_copies([__file__, "--serve"])
    each = [(many - few) / (MANY - FEW) for few, many in zip(refs[::2], refs[1::2], strict=True)]
    return dict(zip(PARTS, each, strict=True))


def rows_of(counted: dict[str, float]) -> Iterator[Row]:
    """Yields the rows of a tick's instructions: each part, all, and the connection alone."""
    before = dict(zip(list(PARTS)[1:], counted.values(), strict=False))
    each = {part: count - before.get(part, 0.0) for part, count in counted.items()}
    for part, count in each.items():
        yield Row(f"{part}: {PARTS[part]}", Figure([round(count)]), NO_REFERENCE)
    whole = counted["apply"] - counted["decisions"]
    connection = Figure([round(sum(each[part] for part in CONNECTION))])
    yield Row("a tick of sharing, beside its connection alone", Figure([round(whole)]), connection)


def main() -> None:
    """Counts, and prints the counts."""
    parser = arguments(__doc__, "the same")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    gc.freeze()
    if parser.parse_args().serve:
        _serve()
        return
    with run(parser) as one:
        count = uvloop.run(Bench(SMOKE).ticks(SMOKE, "apply"))
        one.add([Row("messages a tick", Figure([count / SMOKE]), NO_REFERENCE)])
        if one.options.smoke:  # valgrind takes a minute
            return
        counted = or_reason(instructions)
        if isinstance(counted, str):
            one.add([Row("a tick of sharing", counted, NO_REFERENCE)])
        else:
            one.add(rows_of(counted))


if __name__ == "__main__":
    main()
