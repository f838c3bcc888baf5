"""Counts the work of one request in the router: the same in every run, whatever the load.

python benchmarks/extproc_counts.py [--calls]

The router's own server gets the bytes that an Envoy sends, without a socket: for each request its
headers, its body, and the end of its stream. Eight workers are live, and hold the conversations of
benchmarks/extproc.py, which the requests continue. Valgrind counts instructions.
"""

import argparse
import asyncio
import gc
import json
import logging
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from random import Random
from types import FrameType as Call
from typing import Any

import measure  # noqa: F401 - before the packages that it measures
import yaml
from extproc_load import MARK, conversations
from extproc_parts import TINY_MODEL
from google.protobuf.message import Message

from extproc.admin.observed import Observed
from extproc.checking import self_check
from extproc.config.reader import parse
from extproc.http2.frames import PREFACE, Flag, FrameType, frame, settings, window_update
from extproc.http2.header_blocks import encode
from extproc.observing.metrics import Metrics
from extproc.pb.kvsteer_ext_proc_pb2 import (
    HeaderMap,
    HeaderValue,
    HttpBody,
    HttpHeaders,
    ProcessingMode,
    ProcessingRequest,
    ProtocolConfiguration,
)
from extproc.requests.request import parse as parse_request
from extproc.router import Router
from extproc.serving.exchange import Service
from extproc.serving.lean_server import LeanConnection, LeanServer
from extproc.tokenizing import encoder_choice, prompt_tokens
from extproc.tokenizing.tokens import Tokenizer
from extproc.workers.workers import Workers
from kvstate.events import Batch, BlocksStored, EventBatch
from kvstate.feeds.feed_sources import FeedSource
from kvstate.feeds.transport import Connected, MemoryTransport
from kvstate.fleet import Fleet
from kvstate.overlap import Tokens

WORKERS = 8
SIZE = 2
BLOCK = 16
WARM = 96
FEW, MANY = 200, 1_000

CONFIGURATION = {
    "models": [{"name": "tiny", "tokenizer": str(TINY_MODEL)}],
    "policy": {"scrape_interval_ms": 0, "probe_interval_ms": 0},
    "workers": [
        {"endpoint": f"127.0.0.1:{port}", "events": {"zmq": f"tcp://127.0.0.1:{port + 1000}"}}
        for port in range(1, WORKERS + 1)
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


def _data(stream: int, message: Message) -> bytes:
    sent = message.SerializeToString()
    return frame(FrameType.DATA, 0, stream, b"\0" + len(sent).to_bytes(4, "big") + sent)


def stored(tokens: Tokens, first: int) -> Batch:
    """Returns the batch of a worker that computed a prompt."""
    count = len(tokens) // BLOCK
    hashes: list[int | bytes] = [*range(first, first + count)]
    event = BlocksStored(hashes, None, tokens[: count * BLOCK], BLOCK)
    return Batch(first, EventBatch(float(first), [event]))


class Bench:
    """A router and a connection to it."""

    def __init__(self) -> None:
        self.texts = [json.dumps(request) for request in conversations(SIZE)]
        self.sink = Sink()
        self.served = 0
        self.connection: LeanConnection
        self.close: Callable[[], Any]

    async def start(self) -> None:
        """Starts the router, and waits until its workers are live."""
        config = parse(yaml.safe_dump(CONFIGURATION), "benchmark")
        tokenizer = Tokenizer.load(config.models[0])
        assert tokenizer is not None
        held = [
            tokenizer.encode(parse_request("/v1/chat/completions", text.encode()).prompts[0])
            for text in self.texts
        ]
        opened = iter(range(WORKERS))

        def open_transports(_: FeedSource) -> list[MemoryTransport]:
            transport = MemoryTransport()
            transport.put(Connected())
            first, number = 0, next(opened)
            for at, tokens in enumerate(held):
                if at % WORKERS in (number, (number + 1) % WORKERS):
                    transport.put(stored(array("I", tokens), first))
                    first += 1
            return [transport]

        fleet = Fleet(1, lambda: 0.0)
        workers = Workers(config, fleet, open_transports)
        await workers.start()
        while {workers.state(name) for name in workers.names()} != {"live"}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        observed = Observed(lambda: 0.0, kept_at_once=1)
        router = Router(
            config,
            workers,
            {"tiny": tokenizer},
            Metrics(workers),
            Random(1),  # noqa: S311 - ties
            observer=observed,
        )
        service = Service(config, router, Metrics(workers))
        server = LeanServer(service, lambda: True)
        self.connection = LeanConnection(server._host)  # noqa: SLF001 - no socket
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
        return [reads(at, texts[at % len(texts)]) for at in range(first, first + count)]

    def serve(self, requests: Sequence[Sequence[bytes]]) -> None:
        """Answers requests, one after the other."""
        take = self.connection.data_received
        for request in requests:
            for data in request:
                take(data)
        assert self.connection.is_idle, "an answer was not given at once"


def counted(bench: Bench, requests: int) -> tuple[Counter[str], list[str]]:
    """Counts calls of Python and C functions in this many requests; names the former."""
    found: Counter[str] = Counter()
    names: list[str] = []

    def note(call: Call, event: str, _: object) -> None:
        found[event] += 1
        if event == "call":
            code, depth, above = call.f_code, 0, call.f_back
            while above is not None:
                depth, above = depth + 1, above.f_back
            file = "/".join(code.co_filename.split("/")[-2:])
            names.append(f"{' ' * depth}{file}: {code.co_qualname}")

    packed = bench.packed(requests)
    sys.setprofile(note)
    bench.serve(packed)
    sys.setprofile(None)
    return found, names


def bytecodes(bench: Bench, requests: int) -> float:
    """Returns the interpreter steps per request."""
    steps = 0

    def note(call: Call, event: str, _: object) -> Any:  # noqa: ANN401 - as sys.settrace has it
        nonlocal steps
        call.f_trace_opcodes, call.f_trace_lines = True, False
        steps += event == "opcode"
        return note

    packed = bench.packed(requests)
    sys.settrace(note)
    bench.serve(packed)
    sys.settrace(None)
    return steps / requests


def times(bench: Bench) -> Iterator[float]:
    """Yields the microseconds of CPU per request, by round."""
    for _ in range(40):
        packed = bench.packed(100)
        gc.collect()
        gc.disable()
        began = time.thread_time()
        bench.serve(packed)
        yield (time.thread_time() - began) * 1e4
        gc.enable()


async def _table(*, with_calls: bool) -> None:
    bench = Bench()
    await bench.start()
    bench.serve(bench.packed(WARM))
    writes = bench.sink.writes
    found, names = counted(bench, 16)
    print("writes", (bench.sink.writes - writes) / 16)
    print("calls of Python", found["call"] / 16, "of C", found["c_call"] / 16)
    if with_calls:
        print("\n".join(names[len(names) * 15 // 16 :]))
    print("steps of the interpreter", round(bytecodes(bench, 16)))
    spent = list(times(bench))
    print(f"us of CPU: least {min(spent):.1f}, median {statistics.median(spent):.1f}")
    await bench.close()


async def _serve(count: int) -> None:
    bench = Bench()
    await bench.start()
    requests = bench.packed(WARM + MANY)  # all at once, so that creating them is not counted
    bench.serve(requests[: WARM + count])
    await bench.close()


def instructions() -> int:
    """Returns the instructions of one request."""
    few, many = (_instructions(count) for count in (FEW, MANY))
    return (many - few) // (MANY - FEW)


def _instructions(count: int) -> int:
    command = ["valgrind", "--tool=cachegrind", "--cache-sim=no"]
    command += ["--cachegrind-out-file=/dev/null", sys.executable, __file__, "--serve", str(count)]
    ran = subprocess.run(  # noqa: S603 - ourselves
        command, check=True, capture_output=True, text=True,
        env={**os.environ, "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    found = re.search(r"I +refs: +([\d,]+)", ran.stderr)
    assert found is not None, ran.stderr
    return int(found[1].replace(",", ""))


def main() -> None:
    """Prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", action="store_true", help="print the calls of a request")
    parser.add_argument("--serve", type=int, help="serve so many requests, and say nothing")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    # turn off what depends on time: under valgrind, a template and the check of an encoder would
    # exceed their limits; self-checks are limited by rate
    prompt_tokens.INLINE_SECONDS = 1_000.0
    encoder_choice.PLAIN = ()
    encoder_choice.PROOF_SECONDS = 1_000.0
    self_check.MAX_PENDING = 0
    gc.freeze()
    if options.serve is not None:
        asyncio.run(_serve(options.serve))
        return
    asyncio.run(_table(with_calls=options.calls))
    if shutil.which("valgrind") is None:
        print("instructions: not counted, valgrind is missing")
    else:
        print(f"instructions: {instructions():,}")


if __name__ == "__main__":
    main()
