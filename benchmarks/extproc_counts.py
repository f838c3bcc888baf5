"""Counts the work of one request in the router: the same in every run, whatever the load.

python benchmarks/extproc_counts.py [--workers N] [--calls] [--turns | --tasks] [--part PART]
python benchmarks/extproc_counts.py --check | --record

The router's own server gets the bytes that an Envoy sends, without a socket: for each request its
headers, its body, and the end of its stream. Eight workers, or N, are live, and hold the
conversations of benchmarks/extproc.py, which the requests continue. Valgrind counts instructions.

--check compares the counts at 8 and 128 workers with those of the commit, in extproc_counts.json,
and fails if one is more than 3 % above; --record writes them. Instructions depend on how Python was
built: those of another build than the recorded one are not compared.

--part counts less than whole requests: `stream` opens and ends streams without a message, and
`empty` answers the messages without looking at them, as any handler of this server must at least.

What it saves that a call has no task of its own: --tasks gives every message a task, and lets the
event loop turn until it is done; --turns lets it turn as often, without tasks.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import gc
import json
import logging
import math
import os
import platform
import sys
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from random import Random
from types import FrameType as Frame
from types import MappingProxyType
from typing import Any

import yaml
from copies_counted import instructions_of_copies, wait_for
from extproc_load import MARK, conversations
from extproc_parts import TINY_MODEL
from google.protobuf.message import Message
from measure import NO_REFERENCE, CannotRunError, Figure, Goal, Result, Row, or_reason
from rows import Run, arguments, run

from extproc.admin.observations import Observations
from extproc.config.reader import parse
from extproc.fleet.candidates import Candidates
from extproc.fleet.workers import Workers
from extproc.http2.messages import MessageParts
from extproc.observing.metrics import Metrics
from extproc.pb.kvsteer_ext_proc_pb2 import (
    HeaderMap,
    HeadersResponse,
    HeaderValue,
    HttpBody,
    HttpHeaders,
    ProcessingMode,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from extproc.proof import lookups
from extproc.requests.request import parse as parse_request
from extproc.running import event_loop
from extproc.serving.exchange import Service
from extproc.serving.lean_call import Call, ExtProcCall
from extproc.serving.lean_server import LeanConnection, LeanServer
from extproc.serving.proxy_message import ProxyMessage
from extproc.serving.router import Router
from extproc.tokenizing import encoder_choice
from extproc.tokenizing import tokens as loading
from extproc.tokenizing.encoder_choice import choose
from extproc.tokenizing.tokens import Tokenizer
from kvstate.events import Batch, BlocksStored, EventBatch
from kvstate.feeds.feed_sources import FeedSource
from kvstate.feeds.transport import Connected
from kvstate.fleet import FollowedWorkers
from kvstate.overlap import Tokens
from tests.memory_transport import MemoryTransport
from tests.oracles.http2.frames import PREFACE, Flag, FrameType, frame, settings, window_update
from tests.oracles.http2.header_blocks import encode

WORKERS = 8
# What is checked: its name, the workers, and the part of a request.
CHECKED = (
    ("8 workers", 8, "whole"),
    ("128 workers", 128, "whole"),
    ("an empty handler", 8, "empty"),
    ("a stream without a message", 8, "stream"),
)
PARTS = ("whole", "empty", "stream")
FRAME_HEADER_BYTES = 9
SIZE = 2
BLOCK = 16
WARM = 96
# How many requests are counted, fewer subtracted from more, by part.
FEW = 200
MANY = {"whole": 1_000, "empty": 3_000, "stream": 3_000}
NEVER = 1_000_000_000

COUNTS = Path(__file__).with_suffix(".json")
GOAL = Goal(1.03, "<= 1.03 of the commit's")
RAISE = """
More than 3 % above the counts of the commit. If that has to be so, write the new ones with
`python benchmarks/extproc_counts.py --record`, and say in the commit's message why."""


def configuration(workers: int) -> dict[str, Any]:
    """Returns the router's configuration."""
    return {
        "models": [{"name": "tiny", "tokenizer": str(TINY_MODEL)}],
        "policy": {"scrape_interval_ms": 0, "probe_interval_ms": 0},
        "workers": [
            {"endpoint": f"127.0.0.1:{port}", "events": {"zmq": f"tcp://127.0.0.1:{port + 1000}"}}
            for port in range(1, workers + 1)
        ],
    }


# The headers that Envoy 1.40 sends for a request of wrk.
CALL = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/envoy.service.ext_proc.v3.ExternalProcessor/Process"),
    (b":authority", b"kvsteer"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
    (b"x-envoy-internal", b"true"),
    (b"x-forwarded-for", b"127.0.0.1"),
]
REQUEST = {
    ":authority": "127.0.0.1:8080",
    ":path": "/v1/chat/completions",
    ":method": "POST",
    ":scheme": "http",
    "content-type": "application/json",
    "content-length": "2048",
    "x-forwarded-proto": "http",
    "x-request-id": "6f0f9a5b-6b0a-4f0e-9c0b-0d1c8d7a3c55",
}


class Sink(asyncio.Transport):
    """Discards written bytes, and counts the writes."""

    writes = 0

    def write(self, _: object) -> None:
        """Discards bytes."""
        self.writes += 1

    def get_extra_info(self, _: str, default: object = None) -> object:
        """Returns the default: there is no socket."""
        return default


def reads(number: int, text: str) -> list[bytes]:
    """Returns the bytes that arrive on the socket for one request, read by read."""
    stream = 2 * number + 1
    block = encode(CALL)
    if not number:
        block = b"\x20" + block  # Envoy declares that it uses no table
    told = HeaderMap(
        headers=[HeaderValue(key=key, raw_value=value.encode()) for key, value in REQUEST.items()]
    )
    config = ProtocolConfiguration(request_body_mode=ProcessingMode.BUFFERED)
    head = ProcessingRequest(request_headers=HttpHeaders(headers=told), protocol_config=config)
    whole = text.replace(MARK, str(100_000_000 + number)).encode()
    body = ProcessingRequest(request_body=HttpBody(body=whole, end_of_stream=True))
    opening = frame(FrameType.HEADERS, Flag.END_HEADERS, stream, block)
    return [
        opening + _data(stream, head),
        _data(stream, body),
        frame(FrameType.DATA, Flag.END_STREAM, stream),
    ]


def opened_and_ended(request: Sequence[bytes]) -> list[bytes]:
    """Returns the reads of a stream without a message."""
    opening, *_, end = request
    length = int.from_bytes(opening[:3], "big")
    return [opening[: FRAME_HEADER_BYTES + length], end]


def _data(stream: int, message: Message) -> bytes:
    sent = message.SerializeToString()
    return frame(FrameType.DATA, 0, stream, b"\0" + len(sent).to_bytes(4, "big") + sent)


def stored(tokens: Tokens, first: int) -> Batch:
    """Returns the batch of a worker that computed a prompt."""
    count = len(tokens) // BLOCK
    hashes: list[int | bytes] = [*range(first, first + count)]
    event = BlocksStored(hashes, None, tokens[: count * BLOCK], BLOCK)
    return Batch(first, EventBatch(float(first), [event]))


class TaskCall(ExtProcCall):
    """A call that makes a task for every message."""

    def take(self, message: bytes | MessageParts | ProxyMessage) -> None:
        """Has a task pass the message to the exchange."""
        assert not isinstance(message, MessageParts), "the benchmark's messages are short"
        if not isinstance(message, ProxyMessage):
            message = self._service.decoder.decode(message)
        answering = self._opened().receive(message)
        self._awaited = asyncio.get_running_loop().create_task(answering)
        self._awaited.add_done_callback(self._answered)


class EmptyCall(Call):
    """A call that answers each message with the same bytes."""

    answers = (ProcessingResponse(request_headers=HeadersResponse()).SerializeToString(),)

    def take(self, _: bytes | MessageParts | ProxyMessage) -> None:
        """Answers a message without looking at it."""
        self.answer(self.answers[0])

    def end(self) -> None:
        """Ends the call."""
        self.finish()

    def close(self) -> None:
        """Does nothing: it holds nothing."""


# How often the loop turns after a read: for a task, for what is called when it is done, and for
# what that calls.
TURNS = 3


class Bench:
    """A router and a connection to it.

    turns: how often the event loop turns after each read. part: of a request that is done.
    has_tasks: whether every message has a task; it then needs turns. more: further sections of the
    router's configuration.
    """

    def __init__(
        self,
        workers: int,
        turns: int = 0,
        part: str = "whole",
        *,
        has_tasks: bool = False,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.more = more
        self.workers = workers
        self.turns = turns
        self.part = part
        self.has_tasks = has_tasks
        self.texts = [json.dumps(request) for request in conversations(SIZE)]
        self.sink = Sink()
        self.served = 0
        self.connection: LeanConnection
        self.router: Router
        self.candidates: Candidates
        self.tokenizer: Tokenizer
        self.transports: list[MemoryTransport] = []
        self.numbers: list[int] = []  # of the next batch of each transport
        self.close: Callable[[], Any]

    async def start(self) -> None:
        """Starts the router, and waits until its workers are live."""
        config = parse(yaml.safe_dump(configuration(self.workers) | {**self.more}), "benchmark")
        tokenizer = Tokenizer.load(config.models[0])
        assert tokenizer is not None
        held = [
            tokenizer.encode(parse_request("/v1/chat/completions", text.encode()).prompts[0])
            for text in self.texts
        ]
        opened = iter(range(self.workers))

        def open_transports(_: FeedSource) -> list[MemoryTransport]:
            transport = MemoryTransport()
            self.transports.append(transport)
            transport.put(Connected())
            first, number = 0, next(opened)
            for at, tokens in enumerate(held):
                if at % self.workers in (number, (number + 1) % self.workers):
                    transport.put(stored(array("I", tokens), first))
                    first += 1
            self.numbers.append(first)
            return [transport]

        fleet = FollowedWorkers(1, lambda: 0.0)
        workers = Workers(config, fleet, open_transports)
        self.candidates, self.tokenizer = workers.candidates, tokenizer
        await workers.start()
        while {workers.candidates.state(name) for name in workers.records} != {"live"}:
            await asyncio.sleep(0.01)
        observations = Observations(lambda: 0.0, kept_at_once=1)
        self.router = router = Router(
            config,
            workers,
            {"tiny": tokenizer},
            Metrics(workers.states),
            Random(1),
            features=[observations],
        )
        router.tokens._inline_seconds = math.inf  # noqa: SLF001 - the router has no such setting
        service = Service(config, router, Metrics(workers.states))
        server = LeanServer(service, lambda: True)
        host = server._host  # noqa: SLF001 - no socket

        def route(wire: LeanConnection, stream_id: int, *_: bytes) -> TaskCall:
            return TaskCall(wire, stream_id, service, "")

        def route_to_nothing(wire: LeanConnection, stream_id: int, *_: bytes) -> EmptyCall:
            return EmptyCall(wire, stream_id)

        if self.has_tasks or self.part == "empty":
            host = dataclasses.replace(host, route=route if self.has_tasks else route_to_nothing)
        self.connection = LeanConnection(host)
        self.connection.connection_made(self.sink)
        ack = frame(FrameType.SETTINGS, Flag.ACK, 0)
        self.connection.data_received(PREFACE + settings({}) + ack + window_update(0, 2**30))

        async def close() -> None:
            router.close()
            await workers.close()

        self.close = close

    def packed(self, count: int) -> list[list[bytes]]:
        """Returns the bytes of the next requests."""
        first = self.served
        self.served += count
        texts = self.texts
        whole = [reads(at, texts[at % len(texts)]) for at in range(first, first + count)]
        return [opened_and_ended(one) for one in whole] if self.part == "stream" else whole

    async def serve(self, requests: Sequence[Sequence[bytes]]) -> None:
        """Answers requests, one after the other."""
        take = self.connection.data_received
        for request in requests:
            for data in request:
                take(data)
                for _ in range(self.turns):
                    await asyncio.sleep(0)
        assert self.connection.is_idle, "an answer was not given at once"


async def counted(bench: Bench, requests: int) -> tuple[Counter[str], list[str]]:
    """Counts calls of Python and C functions in this many requests; names the former."""
    found: Counter[str] = Counter()
    names: list[str] = []

    def note(call: Frame, event: str, _: object) -> None:
        found[event] += 1
        if event == "call":
            code, depth, above = call.f_code, 0, call.f_back
            while above is not None:
                depth, above = depth + 1, above.f_back
            file = "/".join(code.co_filename.split("/")[-2:])
            names.append(f"{' ' * depth}{file}: {code.co_qualname}")

    packed = bench.packed(requests)
    sys.setprofile(note)
    await bench.serve(packed)
    sys.setprofile(None)
    return found, names


async def bytecodes(bench: Bench, requests: int) -> float:
    """Returns the interpreter steps per request."""
    steps = 0

    def note(call: Frame, event: str, _: object) -> Any:
        nonlocal steps
        call.f_trace_opcodes, call.f_trace_lines = True, False
        steps += event == "opcode"
        return note

    packed = bench.packed(requests)
    sys.settrace(note)
    await bench.serve(packed)
    sys.settrace(None)
    return steps / requests


async def times(bench: Bench, rounds: int) -> AsyncIterator[float]:
    """Yields the microseconds of CPU per request, by round."""
    for _ in range(rounds):
        packed = bench.packed(100)
        gc.collect()
        gc.disable()
        began = time.thread_time()
        await bench.serve(packed)
        yield (time.thread_time() - began) * 1e4
        gc.enable()


def _run(options: argparse.Namespace, work: Coroutine[Any, Any, None]) -> None:
    # the router's own loop where its turns count; else the standard one, as ever
    (event_loop.run if options.turns or options.tasks else asyncio.run)(work)


def _bench(options: argparse.Namespace) -> Bench:
    turns = TURNS if options.turns or options.tasks else 0
    return Bench(options.workers, turns, options.part, has_tasks=options.tasks)


async def _rows(one: Run) -> None:
    bench = _bench(one.options)
    await bench.start()
    await bench.serve(bench.packed(WARM))
    writes = bench.sink.writes
    found, names = await counted(bench, 16)
    one.add(
        [
            Row("writes", Figure([(bench.sink.writes - writes) / 16]), NO_REFERENCE),
            Row("calls of Python", Figure([found["call"] / 16]), NO_REFERENCE),
            Row("calls of C", Figure([found["c_call"] / 16]), NO_REFERENCE),
        ]
    )
    if one.options.calls:
        print("\n".join(names[len(names) * 15 // 16 :]))
    one.add(
        [Row("steps of the interpreter", Figure([round(await bytecodes(bench, 16))]), NO_REFERENCE)]
    )
    spent = [each async for each in times(bench, one.amount(1, 10, 40))]
    one.add([Row("CPU (us)", Figure(spent), NO_REFERENCE)])
    await bench.close()


async def _serve(options: argparse.Namespace) -> None:
    bench = _bench(options)
    await bench.start()
    # all at once, so that creating them is not counted
    requests = bench.packed(WARM + MANY[options.part])
    gc.collect()
    gc.freeze()  # as in the router, where old objects are collected only while it is idle
    gc.set_threshold(*gc.get_threshold()[:2], NEVER)
    await bench.serve(requests[:WARM])
    for count in (FEW, MANY[options.part]):
        child = os.fork()
        if not child:
            await bench.serve(requests[WARM : WARM + count])
            os._exit(0)
        wait_for(child)
    os._exit(0)


def instructions(options: argparse.Namespace) -> Figure:
    """Returns the instructions of one request.

    Raises:
        CannotRunError: valgrind is missing.
    """
    command = [__file__, "--serve"]
    command += [f"--{name}" for name in ("turns", "tasks") if getattr(options, name)]
    command += [f"--workers={options.workers}", f"--part={options.part}"]
    few, many = instructions_of_copies(command)
    return Figure([(many - few) // (MANY[options.part] - FEW)])


def counts_of(options: argparse.Namespace) -> dict[str, int]:
    """Returns what is checked, by name; without instructions if valgrind is missing."""
    counts: dict[str, int] = {}

    async def count() -> None:
        bench = _bench(options)
        await bench.start()
        await bench.serve(bench.packed(WARM))
        found, _ = await counted(bench, 16)
        counts["calls of Python"] = found["call"] // 16
        counts["calls of C"] = found["c_call"] // 16
        counts["steps of the interpreter"] = round(await bytecodes(bench, 16))
        await bench.close()

    _run(options, count())
    with contextlib.suppress(CannotRunError):
        counts["instructions"] = round(instructions(options).median)
    return counts


def record(options: argparse.Namespace) -> None:
    """Writes the counts of the commit."""
    counts: dict[str, Any] = {"python": platform.python_version(), "build": sys.version}
    for name, workers, part in CHECKED:
        options.workers, options.part = workers, part
        counts[name] = counts_of(options)
    COUNTS.write_text(json.dumps(counts, indent=1) + "\n")


def check(one: Run) -> None:
    """Compares the counts with those of the commit."""
    committed = json.loads(COUNTS.read_text())
    if committed["python"].rpartition(".")[0] != platform.python_version().rpartition(".")[0]:
        print(f"not compared: the counts are of Python {committed['python']}")
        return
    for name, workers, part in CHECKED:
        one.options.workers, one.options.part = workers, part
        for what, count in counts_of(one.options).items():
            known = committed[name].get(what)
            is_compared = known and (what != "instructions" or committed["build"] == sys.version)
            reference: Result = Figure([known]) if is_compared else NO_REFERENCE
            goal = GOAL if is_compared else None
            one.add([Row(f"{what}, {name}", Figure([count]), reference, goal)])
    if any(row.met is False for row in one.rows):
        print(RAISE)


def turn_off_what_depends_on_time() -> None:
    """Has the router of this process do the same in every run, however slow valgrind makes it."""
    # a template and the check of an encoder would exceed their limits
    encoder_choice.PLAIN = ()
    vars(loading)["choose"] = functools.partial(choose, proof_seconds=math.inf)
    loading.MAX_LOAD_SECONDS = math.inf
    # lookups of prompts are limited by rate
    lookups.MAX_WAITING, lookups.PAUSE_SECONDS = 0, math.inf


def main() -> None:
    """Counts, and prints the counts."""
    parser = arguments(__doc__, "fewer rounds of CPU time")
    parser.add_argument("--workers", type=int, default=WORKERS, help="how many there are")
    parser.add_argument("--check", action="store_true", help="compare with the commit's counts")
    parser.add_argument("--record", action="store_true", help="write the commit's counts")
    parser.add_argument("--calls", action="store_true", help="print the calls of a request")
    parser.add_argument("--turns", action="store_true", help="let the loop turn after each read")
    parser.add_argument("--tasks", action="store_true", help="give every message a task")
    parser.add_argument("--part", choices=PARTS, default="whole", help="what to do of a request")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    logging.disable(logging.CRITICAL)
    turn_off_what_depends_on_time()
    gc.freeze()
    options = parser.parse_args()
    if options.serve:
        _run(options, _serve(options))
        return
    if options.record:
        record(options)
        return
    with run(parser) as one:
        if one.options.check:
            check(one)
            return
        _run(one.options, _rows(one))
        if not one.options.smoke:  # valgrind takes minutes
            one.add(
                [Row("instructions", or_reason(lambda: instructions(one.options)), NO_REFERENCE)]
            )


if __name__ == "__main__":
    main()
