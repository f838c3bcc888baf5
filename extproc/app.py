"""The composition root: builds everything that runs in one router, and shuts it down."""

import asyncio
import contextlib
import functools
import logging
import os
import random
import resource
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

from aiohttp.web import RouteDef

from extproc import address, logs
from extproc.admin.application import Sampling, admin_application, listen, metrics_application
from extproc.admin.observed import Observed
from extproc.admin.report import kept, notes_of, report_routes
from extproc.admin.routes import discovery_routes, sharing_routes, steering_routes
from extproc.config.fleet_rules import missing_extras
from extproc.config.reader import changed_keys, load
from extproc.config.rules import doubts
from extproc.config.schema import Config
from extproc.config.schema import RemoteTokenizer as RemoteTokenizerOptions
from extproc.discovery.configured import sources_of
from extproc.discovery.discovery import Discovery, DiscoveryCollector
from extproc.discovery.view import listed
from extproc.errors import ConfigError, ExtraError, importing_extra
from extproc.event_loop import Sweeper
from extproc.observing.fleet_families import ServerCollector
from extproc.observing.metrics import Metrics
from extproc.picking.steering import Steering
from extproc.processes import Member
from extproc.recorder import Recorder, RecorderCollector, drawn_secret
from extproc.request_path import CHOICE
from extproc.router import Observers, Router
from extproc.serving.certificates import Certificates
from extproc.serving.exchange import Service
from extproc.serving.lean_server import LeanServer
from extproc.serving.listening import raise_file_limit
from extproc.sharing.sharing import SharingCollector, note_of, shared, telling_of
from extproc.tokenizing.remote_tokenizer import Endpoints, RemoteTokenizer, left_alone
from extproc.tokenizing.tokens import Tokenizer
from extproc.tracing.telemetry import telemetry
from extproc.workers.verifying import VerifiedCollector
from extproc.workers.workers import Workers
from kvstate.feeds.feed_sources import DrainSource, FeedSource, GrpcSource
from kvstate.feeds.transport import Transport
from kvstate.feeds.zmq_transport import ZmqTransport
from kvstate.fleet import Fleet
from kvstate.index import default_core_name, plain_core_warning

STARTING = "starting: the ext_proc server does not listen yet"
STOPPING = "stopping: open streams may finish, new ones are not accepted"


class Readiness:
    """Ready once ext_proc listens and all workers' caches are known, or after a deadline.

    Never ready while stopping.

    is_listening: set once the ext_proc server listens. is_stopping: set when the router is about to
    stop. awaited: returns what is still missing, in words; "" if nothing is.
    deadline_seconds: counted from now. monotonic: a clock in seconds.
    """

    def __init__(
        self,
        awaited: Callable[[], str],
        deadline_seconds: float,
        monotonic: Callable[[], float],
    ) -> None:
        self.is_listening = False
        self.is_stopping = False
        self._awaited = awaited
        self._monotonic = monotonic
        self._deadline = monotonic() + deadline_seconds

    def __call__(self) -> bool:
        """Whether it is ready now."""
        return not self.hindrance()

    def hindrance(self) -> str:
        """Why it is not ready now, in words; "" if it is."""
        if self.is_stopping:
            return STOPPING
        if not self.is_listening:
            return STARTING
        return "" if self._monotonic() >= self._deadline else self._awaited()


class Server(Protocol):
    """A server of ext_proc and gRPC health on `extproc.listen`."""

    async def start(self) -> None:
        """Listens.

        Raises:
            StartError: the address cannot be bound.
        """

    async def stop(self) -> None:
        """Accepts no new streams, and gives open ones `extproc.drain_ms` to finish."""


def server_for(
    service: Service, is_ready: Callable[[], bool], certificates: Certificates | None = None
) -> Server:
    """Returns the configured kind of server.

    certificates: for TLS; None for plain text.

    Raises:
        ExtraError: grpcio is configured, but not installed.
    """
    if service.config.extproc.server == "lean":
        return LeanServer(service, is_ready, certificates=certificates)
    with importing_extra("extproc.server: grpcio", "grpc"):
        from extproc.serving.grpc_server import GrpcServer  # noqa: PLC0415 - an extra
    return GrpcServer(service, is_ready, certificates)


def _require_extras(config: Config) -> None:
    """Refuses to start without a required extra: without its feeds, a fleet would only seem slow.

    Raises:
        ExtraError: keys need extras that are not installed; the error names one key for each.
    """
    missing = {one.name: one.key for one in missing_extras(config, find_spec)}
    if missing:
        raise ExtraError(", ".join(missing.values()), *missing)


def load_tokenizers(config: Config) -> dict[str, Tokenizer]:
    """Returns the tokenizer of every model that has local tokenizer files.

    Raises:
        StartError: a tokenizer cannot be loaded.
    """
    local = [model for model in config.models if isinstance(model.tokenizer, str)]
    loaded = {model.name: Tokenizer.load(model) for model in local}
    return {name: tokenizer for name, tokenizer in loaded.items() if tokenizer is not None}


def remote_tokenizers(
    config: Config, workers: Workers, metrics: Metrics
) -> dict[str, RemoteTokenizer]:
    """Returns a tokenizer for every model whose workers tokenize; the caller closes them."""
    made: dict[str, RemoteTokenizer] = {}
    for model in config.models:
        options = model.tokenizer
        if isinstance(options, RemoteTokenizerOptions) and options.remote:
            endpoints = functools.partial(workers.tokenizers, model.name)
            count = functools.partial(metrics.count_question, model.name)
            made[model.name] = RemoteTokenizer(model, options, endpoints, count)
            metrics.show_tokenizers_away(model.name, functools.partial(_left_alone, endpoints))
    return made


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a running router that signals act on.

    certificates: None if it speaks plain text. steering: the percentage of requests that are
    steered. steer: changes it, here and in all other processes.
    """

    workers: Workers
    readiness: Readiness
    certificates: Certificates | None
    steering: Steering
    steer: Callable[[float], None]


@contextlib.asynccontextmanager
async def running(config: Config, member: Member | None = None) -> AsyncIterator[Parts]:
    """Runs a router in this event loop.

    member: its place among several processes; it is ready once each of them has been ready.

    Raises:
        StartError: a port is taken, or a file cannot be read.
    """
    tokenizers = load_tokenizers(config)
    async with contextlib.AsyncExitStack() as stack:
        certificates = await stack.enter_async_context(_certificates(config))
        fleet = Fleet(
            *(secrets.randbits(64), time.time, random.random),
            emptied=lambda worker: workers.emptied(worker),  # noqa: PLW0108 - made below
            cut=lambda worker: workers.cut(worker),  # noqa: PLW0108
        )
        discovery = Discovery(listed(config.workers), sources_of(config))
        telling = None if config.sharing is None else telling_of(config.sharing)
        workers = Workers(
            config, fleet, _open, discovery.fault, telling=telling, tokenizers=tokenizers
        )
        metrics = Metrics(workers)
        metrics.expect_models(model.name for model in config.models)
        remote = remote_tokenizers(config, workers, metrics)
        for tokenizer in remote.values():
            stack.push_async_callback(tokenizer.close)
        traces = await stack.enter_async_context(telemetry(os.environ, metrics))
        observed = Observed(time.time)
        recorder = await stack.enter_async_context(_recording(config, metrics))
        seen = observed if recorder is None else Observers(observed, recorder)
        ties = random.Random()  # noqa: S311
        router = Router(
            config, workers, {**tokenizers, **remote}, metrics, ties, traces=traces, observer=seen
        )
        stack.callback(router.close)
        sharing = await stack.enter_async_context(
            shared(config.sharing, telling, workers, router.placing.sent)
        )
        await stack.enter_async_context(kept(config.report.file, metrics.report))
        for collector in (
            SharingCollector(sharing),
            DiscoveryCollector(discovery.status),
            VerifiedCollector(workers.verifying.of_models),
        ):
            metrics.registry.register(collector)
        ready_seconds = config.events.ready_deadline_ms / 1000
        own = Readiness(lambda: _awaited(discovery, workers), ready_seconds, time.monotonic)
        is_ready = own if member is None else _with_others(own, member, ready_seconds)
        metrics.show_readiness(is_ready)
        _show_certificate(metrics, certificates)
        admin_at = address.parse(config.admin.listen)
        admin = admin_application(
            *(router, workers, observed, config.extproc.max_body_bytes),
            *(admin_at.host, config.policy.header, config.policy.session_header),
        )
        steer = functools.partial(_steer, router.steering, member)
        steers_all = config.disaggregation.steers_all
        admin.add_routes(
            [
                *discovery_routes(workers, discovery),
                *sharing_routes(sharing),
                *_report_routes(config, metrics, member),
                *steering_routes(router, steer, steers_all=steers_all),
            ]
        )
        stack.push_async_callback((await listen(admin, admin_at, "admin")).cleanup)
        metrics_at = address.parse(config.metrics.listen)
        scraped = metrics_application(
            metrics,
            is_ready.hindrance,
            (note_of(sharing), workers.verifying.note, router.undelivered),
        )
        stack.push_async_callback((await listen(scraped, metrics_at, "metrics")).cleanup)

        stack.push_async_callback(workers.close)
        await workers.start()
        await stack.enter_async_context(_discovering(config, workers, discovery))
        stack.push_async_callback(_sampling(observed, workers).close)
        server = server_for(
            Service(config, router, metrics, recorder=recorder), is_ready, certificates
        )
        if isinstance(server, LeanServer):
            metrics.registry.register(ServerCollector(server.figures))
        await server.start()
        stack.push_async_callback(server.stop)
        own.is_listening = is_ready.is_listening = True
        if member is not None:
            steer_here = functools.partial(_steer, router.steering, None)
            for task in (member.announce(own), member.follow(steer_here)):
                stack.callback(asyncio.create_task(task).cancel)
        yield Parts(workers, is_ready, certificates, router.steering, steer)


def _sampling(observed: Observed, workers: Workers) -> Sampling:
    """Samples the fleet from now on."""
    sampling = Sampling(observed, workers.fills, time.time)
    sampling.start()
    return sampling


def _with_others(own: Readiness, member: Member, seconds: float) -> Readiness:
    """Returns a readiness that waits for all other processes too, for at most so many seconds."""
    return Readiness(lambda: own.hindrance() or member.hindrance(), seconds, time.monotonic)


def _show_certificate(metrics: Metrics, certificates: Certificates | None) -> None:
    """Adds metrics about the certificate of the gRPC server, if it has one."""
    if certificates is not None:
        metrics.show_certificate(
            lambda: certificates.current.expires_at, lambda: certificates.fault is not None
        )


def _steer(steering: Steering, member: Member | None, percent: float) -> None:
    """Steers this percentage of requests from now on, here and in all other processes."""
    if percent != steering.percent:
        log.info("steering %g %% of requests from now on", percent)
        steering.change(percent)
    if member is not None:
        try:
            member.hand_on(percent)
        except OSError as error:
            log.error("the other processes could not be informed: %s", error.strerror)


def _report_routes(config: Config, metrics: Metrics, member: Member | None) -> list[RouteDef]:
    peers = member.others(config.admin.listen) if member is not None else {}
    return report_routes(metrics.report, notes_of(config), peers)


@contextlib.asynccontextmanager
async def _recording(config: Config, metrics: Metrics) -> AsyncIterator[Recorder | None]:
    """Runs the recorder if requests are recorded; yields None otherwise."""
    if config.recorder.file is None:
        yield None
        return
    recorder = Recorder(config.recorder, config.recorder.file, drawn_secret(os.environ))
    metrics.registry.register(RecorderCollector(recorder))
    recorder.start()
    try:
        yield recorder
    finally:
        await asyncio.to_thread(recorder.close)


def _awaited(discovery: Discovery, workers: Workers) -> str:
    """Returns what is still missing before all workers' caches are known, "" if nothing is."""
    if not discovery.is_complete:
        return "sources of workers have not answered yet"
    return "" if workers.replays_done() else "replays are still running"


@contextlib.asynccontextmanager
async def _certificates(config: Config) -> AsyncIterator[Certificates | None]:
    """Loads the certificates to serve with, and reloads them when their files change."""
    if config.extproc.tls is None:
        yield None
        return
    found = Certificates(config.extproc.tls)
    following = asyncio.create_task(found.follow())
    try:
        yield found
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


@contextlib.asynccontextmanager
async def _discovering(
    config: Config, workers: Workers, discovery: Discovery
) -> AsyncIterator[None]:
    """Follows the sources of workers; has Envoy follow the workers if that is configured."""
    async with contextlib.AsyncExitStack() as stack:
        if config.envoy.eds_directory is not None:
            from extproc.eds import envoy_follows  # noqa: PLC0415 - few have it

            files = await envoy_follows(config, config.envoy.eds_directory, workers, discovery)
            stack.push_async_callback(files.close)
        stack.push_async_callback(discovery.close)
        await discovery.start(workers.replace)
        yield


def _left_alone(endpoints: Callable[[], Endpoints]) -> int:
    return left_alone(endpoints())


def _open(source: FeedSource) -> Sequence[Transport]:
    """Returns a feed's transports, one for each rank.

    Raises:
        ExtraError: it is a gRPC feed, and grpcio is not installed.
    """
    match source:
        case GrpcSource():
            with importing_extra("a feed over gRPC", "grpc"):
                from kvstate.feeds.grpc_transport import grpc_transports  # noqa: PLC0415 - an extra

            return grpc_transports(source, random.random)
        case DrainSource():
            from kvstate.feeds.trtllm_transport import drain_transports  # noqa: PLC0415

            return drain_transports(source, random.random)
        case _:
            return [ZmqTransport(one, random.random) for one in source]


log = logging.getLogger("kvsteer")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

# The keys that SIGHUP reloads.
_RELOADED = frozenset(("events.enabled", "steering.percent"))

# A thread that parses or renders yields to the event loop after this time: Python's default of 5 ms
# is a large part of a decision's deadline.
SWITCH_SECONDS = 0.001

# With fewer open files, connections to a thousand workers may fail.
FEW_FILES = 4096

# Time to stop, besides `extproc.leave_ms` and `extproc.drain_ms`; then the process ends by force.
STOP_SECONDS = 10.0


async def serve(
    path: str, config: Config, member: Member | None = None, notes: Sequence[str] = ()
) -> None:
    """Runs a router until SIGTERM or SIGINT.

    path: the file that `config` was read from. member: its place among several processes with this
    configuration; it then also stops when their parent ends. notes: notes on its keys, to log.

    To stop, it reports that it is not ready, accepts no new streams after `extproc.leave_ms`, gives
    open streams time to finish, and ends; a second signal ends it at once. SIGHUP reloads the kill
    switch, the percentage of steered requests and the TLS files.

    Raises:
        StartError: it cannot start.
    """
    read_again = functools.partial(_read, path, config.extproc.processes, member)
    if member is not None:
        config = member.part_of(config)
    logs.configure(config.log.level, config.log.format, member and member.number)
    _require_extras(config)
    _raise_file_limit()
    for note in (*notes, *doubts(config, os.path.exists)):
        log.warning("%s", note)
    stopped, leave_ms = asyncio.Event(), config.extproc.leave_ms
    loop = asyncio.get_running_loop()

    def stop() -> None:
        stopped.set()
        _end_by_force(loop, (leave_ms + config.extproc.drain_ms) / 1000 + STOP_SECONDS)

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop)
    is_orphan = asyncio.Event()
    if member is not None:
        _end_with_parent(loop, is_orphan, stop)
    # nothing to reload yet: the configuration was just read; unhandled, SIGHUP ends the process
    loop.add_signal_handler(signal.SIGHUP, lambda: None)
    async with running(config, member) as parts:
        reloads: set[asyncio.Task[None]] = set()

        def reload() -> None:
            task = loop.create_task(_reload(read_again, config, parts))
            reloads.add(task)
            task.add_done_callback(reloads.discard)

        loop.add_signal_handler(signal.SIGHUP, reload)
        sweeper = Sweeper()
        sweeper.start()
        sys.setswitchinterval(SWITCH_SECONDS)
        if warning := plain_core_warning():
            log.warning("%s", warning)
        log.info("index core: %s", default_core_name())
        log.info("request path: %s", CHOICE)
        log.info(
            "serving ext_proc on %s, admin on http://%s, metrics on http://%s",
            config.extproc.listen,
            config.admin.listen,
            config.metrics.listen,
        )
        log.info(
            "started with %.2f s of CPU time; %d MiB resident", time.process_time(), _resident_mib()
        )
        await stopped.wait()
        sweeper.close()
        parts.readiness.is_stopping = True
        if leave_ms:
            log.info(
                "stopping: reporting not ready, accepting new streams for %d ms",
                leave_ms,
            )
            await asyncio.sleep(leave_ms / 1000)
        log.info("stopping: open streams have %d ms to finish", config.extproc.drain_ms)
    if member is not None and is_orphan.is_set():
        member.leave()


def _raise_file_limit() -> None:
    before, files = raise_file_limit()
    log.info("limit of open files: %d (was %d)", files, before)
    if files < FEW_FILES:
        log.warning(
            "only %d files and connections may be open: raise the limit (ulimit -Hn,"
            " LimitNOFILE) for fleets of hundreds of workers",
            files,
        )


def _resident_mib() -> int:
    """Returns this process's peak memory in MiB, which right after the start is the current one."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit // 2**20


def _end_by_force(loop: asyncio.AbstractEventLoop, seconds: float) -> None:
    """Lets the next signal, or a timer after so many seconds, end the process at once."""
    for number in STOP_SIGNALS:
        loop.remove_signal_handler(number)
    for number in (*STOP_SIGNALS, signal.SIGALRM):
        # the kernel drops signals for which the first process of a container has no handler
        signal.signal(number, _end_at_once if os.getpid() == 1 else signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _end_at_once(number: int, _: object) -> None:
    """Ends the process with the exit status that a shell uses for a process ended by a signal."""
    os._exit(128 + number)


def _end_with_parent(
    loop: asyncio.AbstractEventLoop, is_orphan: asyncio.Event, stop: Callable[[], None]
) -> None:
    """Stops when standard input is closed: the parent holds the other end, so it has ended.

    is_orphan: set in that case.
    """
    lifeline = sys.stdin.fileno()

    def ended() -> None:
        loop.remove_reader(lifeline)
        log.warning("the parent process is gone")
        is_orphan.set()
        stop()

    loop.add_reader(lifeline, ended)


def _read(path: str, processes: int, member: Member | None) -> Config:
    """Reads the configuration again, for the same process.

    Raises:
        ConfigError: it has faults.
    """
    config = load(path, processes)
    return config if member is None else member.part_of(config)


async def _reload(read_again: Callable[[], Config], before: Config, parts: Parts) -> None:
    if parts.certificates is not None:
        await parts.certificates.look(anyway=True)
    try:
        read = await asyncio.to_thread(read_again)  # with thousands of workers this takes a second
    except ConfigError as error:
        for fault in error.faults:
            log.error("not reloaded: %s", fault)
        return
    is_switched = read.events.enabled != parts.workers.events_enabled
    await parts.workers.enable_events(enabled=read.events.enabled)
    is_other = read.steering.percent != parts.steering.percent
    if is_other:
        parts.steer(read.steering.percent)
    changed = [key for key in changed_keys(before, read) if key not in _RELOADED]
    if changed:
        log.warning("configuration read again: these need a restart: %s", ", ".join(changed))
    elif not (is_switched or is_other):
        log.info("configuration read again: nothing changed")
