"""The composition root: everything that runs in one router, put together and taken down."""

import asyncio
import contextlib
import os
import random
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from extproc import address
from extproc.admin.application import admin_application
from extproc.admin.discovery_routes import discovery_routes
from extproc.admin.listening import listen
from extproc.admin.metrics_application import metrics_application
from extproc.admin.observed import Observed
from extproc.admin.sampling import Sampling
from extproc.config import Config
from extproc.discovery.configured import sources_of
from extproc.discovery.discovery import Discovery
from extproc.discovery.discovery_families import DiscoveryCollector
from extproc.discovery.view import listed
from extproc.metrics import Metrics
from extproc.model_tokenizers import load_tokenizers, remote_tokenizers
from extproc.observing.server_families import ServerCollector
from extproc.picking.placing import Placing
from extproc.picking.probe import Doubts, HealthProbe
from extproc.picking.scrape import LoadReports
from extproc.readiness import Readiness
from extproc.router import Router
from extproc.serving.certificates import Certificates
from extproc.serving.exchange import Service
from extproc.serving.lean_server import LeanServer
from extproc.serving.server import server_for
from extproc.tokenizing.prompt_tokens import AnyTokenizer
from extproc.tracing.telemetry import telemetry
from extproc.workers.workers import Workers
from kvstate.feeds.feed_sources import DrainSource, FeedSource, GrpcSource
from kvstate.feeds.grpc_transport import grpc_transports
from kvstate.feeds.transport import Transport
from kvstate.feeds.trtllm_transport import drain_transports
from kvstate.feeds.zmq_transport import ZmqTransport
from kvstate.fleet import Fleet


@dataclass(frozen=True, slots=True)
class Parts:
    """What is told something while the router runs.

    certificates: None where it speaks plain text.
    """

    workers: Workers
    readiness: Readiness
    certificates: Certificates | None


@contextlib.asynccontextmanager
async def running(config: Config) -> AsyncIterator[Parts]:
    """Runs a router in this event loop.

    Raises:
        StartError: a port is taken, or a file cannot be read.
    """
    tokenizers = load_tokenizers(config)
    async with contextlib.AsyncExitStack() as stack:
        certificates = await stack.enter_async_context(_certificates(config))
        metrics = Metrics()
        metrics.expect_models(model.name for model in config.models)
        fleet = Fleet(secrets.randbits(64), time.time, random.random)
        workers = Workers(
            config,
            fleet,
            _open,
        )
        remote = remote_tokenizers(config, workers, metrics)
        for tokenizer in remote.values():
            stack.push_async_callback(tokenizer.close)
        known: dict[str, AnyTokenizer] = {**tokenizers, **remote}
        traces = await stack.enter_async_context(telemetry(os.environ, metrics))
        rng = random.Random()  # noqa: S311 - ties
        router = Router(config, workers, known, metrics, rng, traces=traces)
        stack.callback(router.close)
        _join(fleet, workers, router.placing)
        discovery = Discovery(listed(config.workers), sources_of(config), workers.replace)
        workers.show_faults(discovery.fault)
        workers.show_down(router.down, router.astray)
        metrics.registry.register(DiscoveryCollector(discovery.status))
        is_ready = Readiness(
            lambda: _awaited(discovery, workers),
            config.events.ready_deadline_ms / 1000,
            time.monotonic,
        )
        metrics.add_readiness(is_ready)
        _show(workers, router, metrics)
        if certificates is not None:
            metrics.add_certificates(certificates)

        observed = Observed()
        router.observers.append(
            lambda decision, prompts: observed.decided(decision, prompts, time.time())
        )
        router.answer_observers.append(observed.recent.served)
        admin_at = address.parse(config.admin.listen)
        limit = config.extproc.max_body_bytes
        admin = admin_application(
            router, workers, observed, limit, admin_at.host, config.policy.header
        )
        admin.add_routes(discovery_routes(workers, discovery))
        stack.push_async_callback((await listen(admin, admin_at, "admin")).cleanup)
        metrics_at = address.parse(config.metrics.listen)
        scraped = metrics_application(metrics, is_ready.hindrance)
        stack.push_async_callback((await listen(scraped, metrics_at, "metrics")).cleanup)

        stack.push_async_callback(workers.close)
        await workers.start()
        await stack.enter_async_context(_discovering(config, workers, discovery))
        sampling = Sampling(observed, lambda: workers.fills(router.in_flight), time.time)
        sampling.start()
        stack.push_async_callback(sampling.close)
        await stack.enter_async_context(_asking(config, router.placing, workers))
        server = server_for(Service(config, router, metrics), is_ready, certificates)
        if isinstance(server, LeanServer):
            metrics.registry.register(ServerCollector(server.figures))
        await server.start()
        stack.push_async_callback(server.stop)
        yield Parts(workers, is_ready, certificates)


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
            from extproc.discovery.envoy_follows import envoy_follows  # noqa: PLC0415 - large

            files = await envoy_follows(config, config.envoy.eds_directory, workers, discovery)
            stack.push_async_callback(files.close)
        stack.push_async_callback(discovery.close)
        await discovery.start()
        yield


@contextlib.asynccontextmanager
async def _asking(config: Config, placing: Placing, workers: Workers) -> AsyncIterator[None]:
    """Asks the workers for their load and their health, where that is configured."""
    options = config.policy
    async with contextlib.AsyncExitStack() as stack:
        reports = LoadReports(
            placing,
            workers.places,
            workers.loads,
            options.scrape_interval_ms / 1000,
            random.random,
            time.monotonic,
        )
        stack.push_async_callback(reports.close)
        await reports.start()
        doubts = Doubts(placing, workers.places, workers.sign_of_life, time.monotonic)
        probe = HealthProbe(
            placing,
            workers.places,
            (options.probe_interval_ms or 0) / 1000,
            random.random,
            time.monotonic,
        )
        asking = doubts if options.probe_interval_ms is None else probe
        stack.push_async_callback(asking.close)
        await asking.start()
        yield


def _show(workers: Workers, router: Router, metrics: Metrics) -> None:
    """Has the workers seen in the metrics, and what came of predictions with the workers."""
    metrics.add_workers(
        lambda: workers.statuses(router.in_flight), workers.index_bytes, router.load, workers.names
    )
    metrics.drifts.circumstances = workers.circumstances
    workers.show_predictions(metrics.drifts.of)


def _open(source: FeedSource) -> Sequence[Transport]:
    """A feed's transports, one a rank."""
    match source:
        case GrpcSource():
            return grpc_transports(source, random.random)
        case DrainSource():
            return drain_transports(source, random.random)
        case _:
            return [ZmqTransport(one, random.random) for one in source]


def _join(fleet: Fleet, workers: Workers, placing: Placing) -> None:
    """What feeds and workers tell that picks rest on."""

    def drain() -> None:
        placing.draining = workers.draining()

    workers.changed.append(drain)
    workers.gone.append(lambda name, endpoint: placing.remove(name, endpoint, time.monotonic()))
    fleet.emptied = lambda worker: placing.sent.forget(worker, time.monotonic())
    placing.name_ranks(fleet.ranks, lambda: fleet.names_ranks)
