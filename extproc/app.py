"""The composition root: everything that runs in one router, put together and taken down."""

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
from typing import Protocol

from aiohttp.web import RouteDef

from extproc import address, logs
from extproc.admin.application import Sampling, admin_application, listen, metrics_application
from extproc.admin.observed import Observed
from extproc.admin.report_file import kept
from extproc.admin.report_routes import notes_of, report_routes
from extproc.admin.routes import discovery_routes, sharing_routes, steering_routes
from extproc.config.reader import changed_keys, load
from extproc.config.rules import doubts
from extproc.config.schema import Config
from extproc.config.schema import RemoteTokenizer as RemoteTokenizerOptions
from extproc.discovery.configured import sources_of
from extproc.discovery.discovery import Discovery, DiscoveryCollector
from extproc.discovery.view import listed
from extproc.errors import ConfigError
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
from extproc.tokenizing.prompt_tokens import AnyTokenizer
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

STOPPING = "stopping: streams under way are ended, no new ones are to come"


class Readiness:
    """Ready once the workers have told what they hold, or had their time to; never when stopping.

    is_stopping: set when the router is about to end.
    awaited: what is still to come before the workers have told, in words; "" if nothing.
    deadline_seconds: from now on. monotonic: seconds.
    """

    def __init__(
        self,
        awaited: Callable[[], str],
        deadline_seconds: float,
        monotonic: Callable[[], float],
    ) -> None:
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
        return "" if self._monotonic() >= self._deadline else self._awaited()


class Server(Protocol):
    """A server of ext_proc and gRPC health on `extproc.listen`."""

    async def start(self) -> None:
        """Listens.

        Raises:
            StartError: the address cannot be bound.
        """

    async def stop(self) -> None:
        """Takes no new streams and gives those under way `extproc.drain_ms`."""


def server_for(
    service: Service, is_ready: Callable[[], bool], certificates: Certificates | None = None
) -> Server:
    """The one that the configuration names.

    certificates: to speak TLS with; plain text without them.
    """
    if service.config.extproc.server == "lean":
        return LeanServer(service, is_ready, certificates=certificates)
    from extproc.serving.grpc_server import GrpcServer  # noqa: PLC0415 - grpcio is large

    return GrpcServer(service, is_ready, certificates)


def load_tokenizers(config: Config) -> dict[str, Tokenizer]:
    """The tokenizer of every model that has one in files.

    Raises:
        StartError: one cannot be loaded.
    """
    local = [model for model in config.models if isinstance(model.tokenizer, str)]
    loaded = {model.name: Tokenizer.load(model) for model in local}
    return {name: tokenizer for name, tokenizer in loaded.items() if tokenizer is not None}


def remote_tokenizers(
    config: Config, workers: Workers, metrics: Metrics
) -> dict[str, RemoteTokenizer]:
    """The tokenizer of every model whose workers are asked for tokens; they are to be closed."""
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
    """What is told something while the router runs.

    certificates: None where it speaks plain text. steering: how many requests are steered. steer:
    changes that, here and in all other processes.
    """

    workers: Workers
    readiness: Readiness
    certificates: Certificates | None
    steering: Steering
    steer: Callable[[float], None]


@contextlib.asynccontextmanager
async def running(config: Config, member: Member | None = None) -> AsyncIterator[Parts]:
    """Runs a router in this event loop.

    member: its part among several processes; it is ready once each of them was.

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
        known: dict[str, AnyTokenizer] = {**tokenizers, **remote}
        traces = await stack.enter_async_context(telemetry(os.environ, metrics))
        rng = random.Random()  # noqa: S311 - ties
        observed = Observed(time.time)
        recorder = await stack.enter_async_context(_recording(config, metrics))
        seen = observed if recorder is None else Observers(observed, recorder)
        router = Router(config, workers, known, metrics, rng, traces=traces, observer=seen)
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
    """A process is ready with all others. seconds: until it is ready all the same."""
    return Readiness(lambda: own.hindrance() or member.hindrance(), seconds, time.monotonic)


def _show_certificate(metrics: Metrics, certificates: Certificates | None) -> None:
    """Shows the certificate of the gRPC server, if it has one."""
    if certificates is not None:
        metrics.show_certificate(
            lambda: certificates.current.expires_at, lambda: certificates.fault is not None
        )


def _steer(steering: Steering, member: Member | None, percent: float) -> None:
    """Steers so many of a hundred requests from now on, here and in all other processes."""
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
    """The recorder, if requests are to be recorded."""
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
    """What is to come before all workers have told what they hold, "" if they have."""
    if not discovery.is_complete:
        return "sources of workers have not told yet"
    return "" if workers.replays_done() else "replays under way"


@contextlib.asynccontextmanager
async def _certificates(config: Config) -> AsyncIterator[Certificates | None]:
    """Those to serve with, followed as their files change."""
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
    """A feed's transports, one a rank."""
    match source:
        case GrpcSource():
            from kvstate.feeds.grpc_transport import grpc_transports  # noqa: PLC0415 - large

            return grpc_transports(source, random.random)
        case DrainSource():
            from kvstate.feeds.trtllm_transport import drain_transports  # noqa: PLC0415

            return drain_transports(source, random.random)
        case _:
            return [ZmqTransport(one, random.random) for one in source]


log = logging.getLogger("kvsteer")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

# What SIGHUP changes.
_RELOADED = frozenset(("events.enabled", "steering.percent"))

# A thread that parses or renders gives the event loop its turn after so long: Python's own 5 ms are
# a good part of what a decision may take.
SWITCH_SECONDS = 0.001

# Below this a fleet of a thousand workers may find no room.
FEW_FILES = 4096

# Besides `extproc.leave_ms` and `extproc.drain_ms`: what hangs after that is not waited for.
STOP_SECONDS = 10.0


async def serve(path: str, config: Config, member: Member | None = None) -> None:
    """Runs a router until SIGTERM or SIGINT.

    path: of the configuration that was read. member: its part, where several processes have this
    configuration; it then also ends when their parent does.

    It then says that it is not ready, takes no new streams after `extproc.leave_ms`, gives those
    under way their time, and ends; a second signal ends it at once. SIGHUP reads the kill switch,
    the share of steered requests and the TLS files anew.

    Raises:
        StartError: it cannot start.
    """
    read_again = functools.partial(_read, path, config.extproc.processes, member)
    if member is not None:
        config = member.part_of(config)
    logs.configure(config.log.level, config.log.format, member and member.number)
    _raise_file_limit()
    for doubt in doubts(config, os.path.exists):
        log.warning("%s", doubt)
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
    # what it would reload has just been read; unhandled, it would end the process
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
            "only %d files may be open, connections among them: raise the limit (ulimit -Hn,"
            " LimitNOFILE) for fleets of hundreds of workers",
            files,
        )


def _resident_mib() -> int:
    """Returns the most memory that this process has held; at its start that is what it holds."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit // 2**20


def _end_by_force(loop: asyncio.AbstractEventLoop, seconds: float) -> None:
    """Has the next signal end the process, and the clock, if nothing else has by then."""
    for number in STOP_SIGNALS:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _end_with_parent(
    loop: asyncio.AbstractEventLoop, is_orphan: asyncio.Event, stop: Callable[[], None]
) -> None:
    """Stops when the other end of standard input is closed: the parent holds it, and is gone.

    is_orphan: is set then.
    """
    lifeline = sys.stdin.fileno()

    def ended() -> None:
        loop.remove_reader(lifeline)
        log.warning("the parent process is gone")
        is_orphan.set()
        stop()

    loop.add_reader(lifeline, ended)


def _read(path: str, processes: int, member: Member | None) -> Config:
    """Reads the configuration anew, for the same part of it.

    Raises:
        ConfigError: it has faults.
    """
    config = load(path, processes)
    return config if member is None else member.part_of(config)


async def _reload(read_again: Callable[[], Config], before: Config, parts: Parts) -> None:
    if parts.certificates is not None:
        await parts.certificates.look(anyway=True)
    try:
        read = await asyncio.to_thread(read_again)  # thousands of workers take a second
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
