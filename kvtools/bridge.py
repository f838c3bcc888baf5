"""`kvsteer bridge`: reads one engine's feed and serves it as SubscribeKvEvents."""

import argparse
import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence

from extproc.base import address, logs
from extproc.base.errors import ConfigError, StartError, importing_extra
from extproc.config.feed_kinds import configured
from extproc.config.schema import WorkerEvents
from extproc.fleet.feeds.feed_openers import open_feed
from kvstate.bridge.rank import BridgeLimits
from kvstate.feeds.transport import FeedTransport

DEFAULT_LISTEN = "127.0.0.1:50051"

# Of a number in an option: more would make no sense, and numbers of thousands are not even read.
MAX_DIGITS = 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    parser.set_defaults(run=run)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--zmq",
        metavar="tcp://HOST:PORT",
        help="the engine's PUB endpoint (vLLM, SGLang, TensorRT-LLM)",
    )
    source.add_argument(
        "--trtllm", metavar="URL", help="a TensorRT-LLM server whose /kv_cache_events is drained"
    )
    parser.add_argument("--replay", metavar="tcp://HOST:PORT", help="the engine's replay endpoint")
    parser.add_argument("--topic", default="", metavar="T", help="topic prefix to subscribe to")
    parser.add_argument(
        "--ranks",
        type=_positive,
        default=1,
        metavar="N",
        help="number of ranks: rank r uses both ports + r",
    )
    parser.add_argument(
        "--listen", default=DEFAULT_LISTEN, metavar="HOST:PORT", help="address to serve"
    )
    limits = BridgeLimits()
    parser.add_argument(
        "--history-batches",
        type=_positive,
        default=limits.history_batches,
        metavar="N",
        help="batches kept for each rank, for subscribers that reconnect",
    )
    parser.add_argument(
        "--history-bytes",
        type=_positive,
        default=limits.history_bytes,
        metavar="N",
        help="memory for these batches in bytes, all ranks together",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the bridge until SIGTERM or SIGINT; returns the exit status.

    Raises:
        ConfigError: an option cannot be used.
        StartError: it cannot listen, or grpcio is not installed.
    """
    faults = list(_faults(arguments))
    if faults:
        raise ConfigError([f"kvsteer: bridge: {fault}" for fault in faults])
    logs.configure("info", "text")
    return asyncio.run(_serve(arguments))


async def _serve(arguments: argparse.Namespace) -> int:
    with importing_extra("bridge", "grpc"):
        from kvstate.bridge.bridge import Bridge, BridgeServer
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    limits = BridgeLimits(
        history_batches=arguments.history_batches,
        history_bytes=arguments.history_bytes // arguments.ranks,
    )
    async with contextlib.AsyncExitStack() as stack:
        transports = _transports(arguments)
        bridge = Bridge(transports, time.time, random.random, limits)
        following = asyncio.create_task(bridge.run())
        stack.push_async_callback(_ended, following)
        place = address.parse(arguments.listen)
        server = BridgeServer(bridge, str(place))
        try:
            await server.start()
        except OSError as error:
            raise StartError(f"--listen: {error}") from None
        stack.push_async_callback(server.stop)
        at = place._replace(port=server.port)
        print(f"kvsteer bridge: serving SubscribeKvEvents on {at}", flush=True)
        waiting = asyncio.create_task(stopped.wait())
        await asyncio.wait([following, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
    return 0 if stopped.is_set() else 1


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _transports(arguments: argparse.Namespace) -> Sequence[FeedTransport]:
    if arguments.trtllm is not None:
        events = WorkerEvents(drain=arguments.trtllm, ranks=arguments.ranks)
    else:
        events = WorkerEvents(
            zmq=arguments.zmq, replay=arguments.replay, topic=arguments.topic, ranks=arguments.ranks
        )
    return open_feed(configured(events))


def _faults(arguments: argparse.Namespace) -> Iterator[str]:
    """Yields the faults of the options."""
    given = (
        ("--zmq", arguments.zmq, address.parse_tcp),
        ("--replay", arguments.replay, address.parse_tcp),
        ("--trtllm", arguments.trtllm, address.parse_http),
        ("--listen", arguments.listen, address.parse),
    )
    faults = [
        f"{name}: {fault}"
        for name, text, parse in given
        if text is not None and (fault := _fault_of(text, parse))
    ]
    yield from faults
    if arguments.zmq is None and arguments.replay is not None:
        yield "--replay: needs --zmq"
    elif not faults and arguments.zmq is not None:
        yield from _port_faults(arguments)


def _fault_of(text: str, parse: Callable[[str], address.Address]) -> str:
    try:
        parse(text)
    except ValueError as error:
        return str(error)
    return ""


def _port_faults(arguments: argparse.Namespace) -> Iterator[str]:
    """Yields the faults of ports that are too large or overlap; rank r uses both ports + r."""
    texts = [text for text in (arguments.zmq, arguments.replay) if text is not None]
    places = [address.parse_tcp(text) for text in texts]
    ranks = arguments.ranks
    if any(place.port + ranks - 1 > address.MAX_PORT for place in places):
        yield f"--ranks: with {ranks} ranks a port is above {address.MAX_PORT}"
    hosts = {place.host for place in places}
    ports = {place.port for place in places}
    if len(places) > 1 and len(hosts) == 1 and max(ports) - min(ports) < ranks:
        overlap = f"with {ranks} ranks the ports of --zmq and --replay overlap"
        yield f"--ranks: {overlap}" if ranks > 1 else "--replay: has the port of --zmq"


def _positive(text: str) -> int:
    """Reads a whole number above 0."""
    number = int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, is {text!r}")
    return number
