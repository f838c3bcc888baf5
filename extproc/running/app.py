"""The composition root: builds everything that runs in one router, and shuts it down.

This folder has processes, signals, files and the event loop. Here the rooms meet: each object gets
what it needs when it is made, and none looks for another one. `lifetime` runs one process,
`processes` several, of which one follows the feeds for all (`feed_role`); `handover` passes sockets
and state to a successor, and `state_file` keeps the state for a restart.

It may import every room below `extproc.commands`, and only commands import it.

The rule: what a router consists of is a list of parts (`parts_of`), which start one after the other
and stop in the reverse order. What a part uses comes before it, so that it also outlives it. A part
that fails to start ends those before it, and one that fails to stop ends the others all the same.
"""

import asyncio
import contextlib
import functools
import logging
import os
import random
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from aiohttp.web import Application, AppRunner

from extproc.admin.application import (
    FleetSampler,
    admin_application,
    listen,
    listening_in,
    metrics_application,
    stop_listening,
)
from extproc.admin.observations import Observations
from extproc.admin.probe import ProbeLimits, probe_application, token_in
from extproc.admin.report import ReportFile, classes_of, missing_in, notes_of, report_routes
from extproc.admin.routes import (
    discovery_routes,
    fault_routes,
    header_names,
    sharing_routes,
    steering_routes,
)
from extproc.base import address
from extproc.base.fault import ROUTER, Fault, FaultSource
from extproc.base.installed import installed_version
from extproc.config.feature_doubts import routers_apart
from extproc.config.rules import unseen_causes
from extproc.config.schema import Config, RemoteTokenizerSettings
from extproc.config.sections import session_headers
from extproc.features.feature import Feature
from extproc.features.fetching.stores import store_rules
from extproc.features.misses.misses import Misses
from extproc.features.recording.recorder import Recorder, drawn_secret
from extproc.features.recording.recording import Recording
from extproc.fleet.discovery.discovery import Discovery, DiscoveryCollector
from extproc.fleet.discovery.sources import sources_of
from extproc.fleet.discovery.view import listed
from extproc.fleet.feeds.feed_openers import open_feed
from extproc.fleet.identity.remembered import RememberedWorkers
from extproc.fleet.proof.proof_memory import ProofMemory
from extproc.fleet.proof.verifying import VerifiedCollector
from extproc.fleet.worker_faults import discovery_faults
from extproc.fleet.workers import Workers
from extproc.media.knowledge import MediaKnowledge
from extproc.media.memory import MediaMemory
from extproc.observing.faults import FaultCollector, Faults
from extproc.observing.fleet_families import ServerCollector
from extproc.observing.metrics import Metrics
from extproc.observing.probe_figures import ProbeFigures
from extproc.observing.telemetry import telemetry
from extproc.observing.unasked import UnaskedRouter
from extproc.requests.request import MAX_BYTES, Models
from extproc.routing.steering import Steering
from extproc.running.common_secret import common_secret
from extproc.running.failure_mode_watch import FailureModeWatch, is_promised
from extproc.running.feed_role import FeedRole, FeedRoleCollector
from extproc.running.handover import Handover, Predecessor, place_of
from extproc.running.parts import Part, nothing, started, task_part
from extproc.running.processes import ProcessMember
from extproc.running.readiness import Readiness, with_others
from extproc.running.restored_workers import (
    PROVING_SECONDS,
    RELIEVING_SECONDS,
    Keeper,
    RestoredWorkers,
)
from extproc.running.state_file import StateCollector, StateFile, read
from extproc.serving.asking_exchange import service_of
from extproc.serving.certificates import Certificates
from extproc.serving.lean_server import LeanServer
from extproc.serving.probing import Probing
from extproc.serving.router import Router
from extproc.sharing.rows import RowsExchange
from extproc.sharing.sharing import Sharing, SharingCollector, SignallingReporter, reporter_of
from extproc.tokenizing.file_digest import digest_of
from extproc.tokenizing.remote_tokenizer import Endpoints, RemoteTokenizer, count_avoided
from kvstate.errors import DamagedError
from kvstate.events import Loss
from kvstate.feeds.feed_sources import ZmqSource
from kvstate.fleet import FollowedWorkers
from kvstate.index.index import saved_layout
from kvstate.rows.format import StateHeader
from kvstate.rows.reader import SavedState, state_in
from kvstate.rows.writer import StateWriter

if TYPE_CHECKING:
    from extproc.tokenizing.tokens import Tokenizer

log = logging.getLogger("kvsteer")


def load_tokenizers(config: Config) -> "dict[str, Tokenizer]":
    """Returns the tokenizer of every model that has local tokenizer files.

    Raises:
        StartError: a tokenizer cannot be loaded.
    """
    local = [model for model in config.models if isinstance(model.tokenizer, str)]
    if not local:
        return {}
    from extproc.tokenizing.tokens import Tokenizer

    loaded: dict[str, Tokenizer | None] = {}
    for model in local:  # some take seconds
        log.info("model %s: loading its tokenizer from %s", model.name, model.tokenizer)
        loaded[model.name] = Tokenizer.load(model)
    return {name: tokenizer for name, tokenizer in loaded.items() if tokenizer is not None}


def remote_tokenizers(
    config: Config, workers: Workers, metrics: Metrics
) -> dict[str, RemoteTokenizer]:
    """Returns a tokenizer for every model whose workers tokenize; the caller closes them."""
    made: dict[str, RemoteTokenizer] = {}
    for model in config.models:
        options = model.tokenizer
        if isinstance(options, RemoteTokenizerSettings) and options.remote:
            endpoints = functools.partial(workers.candidates.tokenizers, model.name)
            count = functools.partial(metrics.count_question, model.name)
            made[model.name] = RemoteTokenizer(model, options, endpoints, count)
            metrics.show_tokenizers_away(model.name, functools.partial(_count_avoided, endpoints))
    return made


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """What a router is made of, and what signals and commands act on."""

    # The configuration, as it was read at the start.
    config: Config
    # This process among several, None for a single one.
    member: ProcessMember | None
    # Those of its TLS, None if it speaks plain text.
    certificates: Certificates | None
    # Finds the workers.
    discovery: Discovery
    # What the workers hold.
    fleet: FollowedWorkers
    # All that is known of the workers.
    workers: Workers
    # The metrics of this process.
    metrics: Metrics
    # The tokenizers that ask workers, by model.
    remote: Mapping[str, RemoteTokenizer]
    # The last decisions, for the operator's page.
    observations: Observations
    # None if requests are not recorded.
    recorder: Recorder | None
    # Decides where requests go.
    router: Router
    # None if it shares with no other routers.
    reporter: SignallingReporter | None
    # None if it shares with no other routers.
    sharing: Sharing | None
    # What a restarted router knows of workers that are not proven yet.
    restored: RestoredWorkers
    # None without a state file.
    state: StateFile | None
    # Whether this process is ready.
    own_readiness: Readiness
    # Whether all processes are ready.
    readiness: Readiness
    # Changes the percentage of requests that are steered, here and in all other processes.
    steer: Callable[[float], None]
    # Listening sockets of the router that it replaces, by section.
    inherited: Mapping[str, Sequence[socket.socket]]
    # Which process follows the feeds; None for a single process.
    feed_role: FeedRole | None
    # Watches whether Envoy keeps what `isolation.fail` promises.
    failure_mode: FailureModeWatch
    # What is wrong now.
    faults: Faults = field(default_factory=Faults)
    # By section: returns the numbers of the listening sockets that it has now.
    listening: dict[str, Callable[[], Sequence[int]]] = field(default_factory=dict)
    # Each stops an HTTP server from accepting connections.
    unlisten: list[Callable[[], None]] = field(default_factory=list)
    # Is set once a successor serves.
    replaced: asyncio.Event = field(default_factory=asyncio.Event)


@contextlib.asynccontextmanager
async def running(
    config: Config, member: ProcessMember | None = None, before: Predecessor | None = None
) -> AsyncIterator[RunningRouter]:
    """Runs a router in this event loop.

    member: its place among several processes; it is ready once each of them has been ready. before:
    the router that it replaces, whose sockets it takes; None if it listens itself.

    Raises:
        StartError: a port is taken, or a file cannot be read.
    """
    tokenizers = load_tokenizers(config)
    certificates = None if config.extproc.tls is None else Certificates(config.extproc.tls)
    discovery = Discovery(listed(config.workers), sources_of(config))
    reporter = None if config.sharing is None else reporter_of(config.sharing)
    shared = _shared_secret(config, reporter)
    saved = await _saved_state(config, shared)
    digests = await asyncio.to_thread(_file_digests, config)
    secret = saved.about.secret if saved else secrets.randbits(64) if shared is None else shared
    if member is not None:
        secret = await common_secret(member.directory, member.number, secret)
    if saved is not None and saved.about.secret != secret:
        log.warning("state.file: %s is not used: other processes have another", config.state.file)
        saved = None
    fleet, workers = _workers(config, discovery, reporter, tokenizers, secret)
    metrics = Metrics(workers.states)
    async with telemetry(os.environ, metrics) as traces:
        remote = remote_tokenizers(config, workers, metrics)
        observations, recorder = Observations(time.time), _recorder(config)
        router = Router(
            config,
            workers,
            {**tokenizers, **remote},
            metrics,
            random.Random(),
            traces=traces,
            features=[observations, *_recording(config, recorder)],
        )
        restored, file = _state(
            config,
            fleet,
            workers,
            digests=digests,
            media=router.media,
            is_awaited=before is None,
        )
        if saved is not None:
            restored.add(saved)
        ready_seconds = config.events.ready_deadline_ms / 1000
        own = Readiness(lambda: _awaited(discovery, workers), ready_seconds, time.monotonic)

        def follows_feeds() -> bool:
            return workers.events_enabled if own.is_listening else config.events.enabled

        made = RunningRouter(
            config=config,
            member=member,
            certificates=certificates,
            discovery=discovery,
            fleet=fleet,
            workers=workers,
            metrics=metrics,
            remote=remote,
            observations=observations,
            recorder=recorder,
            router=router,
            reporter=reporter,
            sharing=_sharing(config, reporter, workers, router),
            restored=restored,
            state=file,
            own_readiness=own,
            readiness=own if member is None else with_others(own, member, ready_seconds),
            steer=functools.partial(_steer, router.steering, member),
            inherited={} if before is None else before.sockets,
            feed_role=member and FeedRole(member.directory, fleet, follows_feeds),
            failure_mode=FailureModeWatch(config.envoy.admin),
        )
        for source in _fault_sources(made):
            made.faults.add(source)
        metrics.registry.register(FaultCollector(made.faults))
        if made.sharing is not None:
            made.sharing.rows = _rows(made, shared)
        _show(made)
        async with started(parts_of(made)):
            if before is not None:
                await before.end()
            yield made


def parts_of(made: RunningRouter) -> list[Part]:
    """Returns the parts of a router, in the order of their start.

    What a part uses comes before it, so that it also outlives it.
    """
    workers, discovery = made.workers, made.discovery
    sampling = FleetSampler(made.observations, workers.states.fills, time.time)
    return [
        *_certificate_parts(made),
        *_failure_mode_parts(made),
        task_part("faults", made.faults.follow),
        Part("remote tokenizers", stop=functools.partial(_close_all, made.remote.values())),
        *_recorder_parts(made),
        Part("router", stop=made.router.close),
        *_sharing_parts(made),
        *_report_parts(made),
        _site_part(made, "admin", _admin(made), made.config.admin.listen),
        _site_part(made, "metrics", _scraped(made), made.config.metrics.listen),
        *_probe_parts(made),
        *_joining_parts(made),
        *_feed_role_parts(made),
        Part("stored blocks", made.restored.begin),
        Part("workers", workers.start, workers.close),
        *_store_parts(made),
        *_endpoint_file_parts(made),
        Part("discovery", lambda: discovery.start(workers.replace), discovery.close),
        Part("sampling", sampling.start, sampling.close),
        *_state_parts(made),
        *_deletion_cost_parts(made),
        _server_part(made),
        *_member_parts(made),
        *_handover_parts(made),
        *_leaving_parts(made),
    ]


def _store_parts(made: RunningRouter) -> Iterator[Part]:
    """Yields what follows the events of stores that publish them themselves."""
    stores = [one for one in made.config.stores if one.zmq is not None]
    if not stores or not made.config.events.enabled:
        return

    async def follow() -> None:
        for one in stores:
            if one.zmq is not None:
                (transport,) = open_feed((ZmqSource(one.zmq, None, ""),))
                made.fleet.pools.follow(one.name, transport)

    yield Part("stores", follow)


def _workers(
    config: Config,
    discovery: Discovery,
    reporter: SignallingReporter | None,
    tokenizers: "Mapping[str, Tokenizer]",
    secret: int,
) -> tuple[FollowedWorkers, Workers]:
    """Returns the workers' caches, keyed by a secret, and the workers, to which feeds report."""

    def emptied(name: str, why: Loss) -> None:
        workers.note_emptied(name, why)

    def cut(name: str) -> None:
        workers.note_cut(name)

    fleet = FollowedWorkers(
        secret,
        time.time,
        random.random,
        emptied=emptied,
        cut=cut,
        stores=store_rules(config.stores),
    )
    workers = Workers(config, fleet, open_feed, discovery.fault, reporter, encoders=tokenizers)
    return fleet, workers


def _shared_secret(config: Config, reporter: SignallingReporter | None) -> int | None:
    """Returns the secret of the block keys that all routers of a fleet have, None if none.

    Only a secret file is good enough: a channel's name may be guessed, and a password tried.
    """
    if config.sharing is None or reporter is None or config.sharing.secret_file is None:
        return None
    return reporter.keys.blocks


async def _saved_state(config: Config, secret: int | None) -> SavedState | None:
    """Returns what the state file says, None if nothing that can be used.

    secret: that of the block keys; None if it is whichever the file has.
    """
    file = config.state.file
    if file is None:
        return None
    found = await asyncio.to_thread(read, file, saved_layout(), time.time())
    if found is not None and secret not in (None, found.about.secret):
        log.warning("state.file: %s is not used: sharing.secret_file is another one now", file)
        return None
    return found


def _file_digests(config: Config) -> dict[str, bytes]:
    """Returns the digests of the models' files, by model; none without a state file."""
    models = () if config.state.file is None else config.models
    found = {model.name: digest_of(model, installed_version()) for model in models}
    return {name: digest for name, digest in found.items() if digest is not None}


def _state(
    config: Config,
    fleet: FollowedWorkers,
    workers: Workers,
    *,
    digests: Mapping[str, bytes],
    media: MediaKnowledge,
    is_awaited: bool,
) -> tuple[RestoredWorkers, StateFile | None]:
    """Returns the workers that begin with what is known of them, and the file, if configured.

    digests: of the models' files, by model. media: what is known of it. is_awaited: whether no
    other router serves until this one does.
    """

    def about() -> StateHeader:
        return StateHeader(saved_layout(), installed_version(), time.time(), fleet.secret)

    def identity(name: str) -> str | None:
        worker = workers.records.get(name)
        return None if worker is None else worker.sighting.identity

    remembered = RememberedWorkers(workers.records, workers.engines.identifying, workers.monotonic)
    model_of = workers.candidates.model_of
    proofs = ProofMemory(
        workers.records, model_of, digests, workers.monotonic, workers.engines.note_printed
    )
    workers.engines.identifying.watch(proofs.note_engine)
    keepers: Sequence[Keeper] = [remembered, proofs, MediaMemory(media)]
    seconds = PROVING_SECONDS if is_awaited else RELIEVING_SECONDS
    restored = RestoredWorkers(fleet, identity, keepers, seconds)
    if config.state.file is None:
        return restored, None
    interval_seconds = config.state.interval_ms / 1000
    file = StateFile(config.state.file, interval_seconds, fleet, about, identity, keepers)
    return restored, file


def _rows(made: RunningRouter, secret: int | None) -> RowsExchange | None:
    """Returns what exchanges rows of the index with other routers, None if that is not possible."""
    sharing, reporter = made.sharing, made.reporter
    if sharing is None or reporter is None or secret is None or not made.config.events.enabled:
        return None
    header = StateHeader(saved_layout(), installed_version(), time.time(), 0)

    async def sections() -> AsyncIterator[bytes]:
        writer = StateWriter()
        yield writer.begin(msgspec.structs.replace(header, written_at=time.time()))
        async for saved in made.fleet.rows.saved_ranks(made.restored.identity_of):
            for section in await asyncio.to_thread(list, writer.held(saved)):
                yield section
        yield writer.end()

    layout, is_giving = header.layout, made.own_readiness
    return RowsExchange(
        reporter.keys,
        reporter.tag,
        layout,
        sharing.send,
        sections,
        is_giving,
        is_alone=lambda: not sharing.received_bytes,
    )


async def _join(made: RunningRouter, rows: RowsExchange) -> None:
    """Has workers begin with what another router knows of them, if one answers."""
    data = await rows.take()
    if data is None:
        return
    try:
        state = await asyncio.to_thread(state_in, data, saved_layout(), time.time())
    except DamagedError as error:
        log.warning("sharing: the rows of another router are not used: %s", error)
        return
    state.others.clear()  # they are about what that router has measured
    log.info("sharing: another router knows %d blocks", state.block_count)
    made.restored.add(state)


def _joining_parts(made: RunningRouter) -> Iterator[Part]:
    """Yields what asks another router for its rows, before any worker is followed."""
    rows = None if made.sharing is None else made.sharing.rows
    if rows is not None:
        begin = functools.partial(_join, made, rows)
        yield Part("rows", nothing if made.inherited else begin, rows.close)


def _recorder(config: Config) -> Recorder | None:
    options = config.recorder
    if options.file is None:
        return None
    return Recorder(options, options.file, drawn_secret(os.environ))


def _recording(config: Config, recorder: Recorder | None) -> Iterator[Feature]:
    """Yields the feature that records requests, if they are recorded."""
    if recorder is not None:
        yield Recording(recorder, config.recorder, are_salted=config.isolation is not None)


def _sharing(
    config: Config, reporter: SignallingReporter | None, workers: Workers, router: Router
) -> Sharing | None:
    if config.sharing is None or reporter is None:
        return None
    fleet, ledger = workers.candidates, router.ledger
    return Sharing(
        config.sharing,
        reporter,
        fleet,
        ledger.claims,
        ledger.homes,
        ledger.lines,
        time.monotonic,
        router.media,
    )


def _show(made: RunningRouter) -> None:
    """Adds to the metrics what the parts show."""
    metrics, certificates = made.metrics, made.certificates
    metrics.expect_models(model.name for model in made.config.models)
    metrics.show_readiness(made.readiness)
    if certificates is not None:
        metrics.show_certificate(
            lambda: certificates.current.expires_at, lambda: certificates.fault is not None
        )
    collectors = [
        SharingCollector(made.sharing),
        StateCollector(made.state, _restored_if_any(made)),
        DiscoveryCollector(made.discovery.status),
        VerifiedCollector(made.workers.engines.verifying.of_models),
        FeedRoleCollector(made.feed_role),
    ]
    for collector in collectors:
        metrics.registry.register(collector)


def _restored_if_any(made: RunningRouter) -> RestoredWorkers | None:
    """Returns the workers that may begin with something, None if none may."""
    can_join = made.sharing is not None and made.sharing.rows is not None
    return made.restored if can_join or made.state is not None else None


def _certificate_parts(made: RunningRouter) -> Iterator[Part]:
    """Yields what reloads the certificates when their files change."""
    if made.certificates is not None:
        yield task_part("certificates", made.certificates.follow)


async def _close_all(tokenizers: Iterable[RemoteTokenizer]) -> None:
    for tokenizer in tokenizers:
        await tokenizer.close()


def _recorder_parts(made: RunningRouter) -> Iterator[Part]:
    recorder = made.recorder
    if recorder is not None:
        yield Part("recorder", recorder.start, lambda: asyncio.to_thread(recorder.close))


def _feed_role_parts(made: RunningRouter) -> Iterator[Part]:
    """Yields what finds the role of one of several processes, before any worker is followed."""
    if made.feed_role is not None:
        yield Part("feed role", made.feed_role.start)


def _leaving_parts(made: RunningRouter) -> Iterator[Part]:
    """Yields what ends that role first, so that no other process takes over while all stop."""
    if made.feed_role is not None:
        yield Part("leaving", nothing, made.feed_role.close)


def _fault_sources(made: RunningRouter) -> Iterator[FaultSource]:
    """Yields the parts that can see that something is wrong, in the order in which it is shown."""
    if made.sharing is not None:
        yield made.sharing.faults
    if made.certificates is not None:
        yield made.certificates.faults
    yield lambda: _apart(made.config)
    yield lambda: discovery_faults(made.discovery.status())
    yield made.workers.faults
    yield made.router.delivery.faults
    yield made.router.unrecognized.faults
    yield made.router.reasons.faults
    yield made.failure_mode.faults


def _apart(config: Config) -> Iterator[Fault]:
    """Yields a fault if several routers share nothing."""
    says = routers_apart(config)
    if says:
        yield Fault("routers-share-nothing", ROUTER, says)


def _failure_mode_parts(made: RunningRouter) -> Iterator[Part]:
    """Yields what looks whether Envoy keeps what `isolation.fail` promises."""
    if is_promised(made.config):
        yield task_part("failure mode", made.failure_mode.follow)


def _sharing_parts(made: RunningRouter) -> Iterator[Part]:
    if made.sharing is not None:
        yield Part("sharing", made.sharing.start, made.sharing.close)


def _report_parts(made: RunningRouter) -> Iterator[Part]:
    if made.config.report.file is not None:
        file = ReportFile(made.config.report.file, made.metrics.report)
        yield Part("report", file.start, file.close)


def _deletion_cost_parts(made: RunningRouter) -> Iterator[Part]:
    """Yields what tells Kubernetes which pods are missed least, if that is wanted.

    Of several processes, which get equal parts of the requests, the first one tells it.
    """
    options, member = made.config.discovery.kubernetes, made.member
    is_first = member is None or member.number == 0
    if options is not None and options.deletion_cost and is_first:
        from extproc.fleet.discovery.deletion_costs import DeletionCosts

        costs = DeletionCosts(options, made.workers.states.saved_by_pod)
        yield task_part("deletion costs", costs.run)


def _state_parts(made: RunningRouter) -> Iterator[Part]:
    """Yields what waits for proof of what was restored, and writes the state file."""
    restored, state, discovery = made.restored, made.state, made.discovery
    yield Part("restored", lambda: restored.start(lambda: discovery.is_complete), restored.close)
    if state is not None:
        yield Part("state", state.start, state.close)


def _admin(made: RunningRouter) -> Application:
    """Returns the application of the operator's HTTP server."""
    config, router, workers = made.config, made.router, made.workers
    member, listen = made.member, config.admin.listen
    peers = {} if member is None else member.other_addresses(listen)
    misses = router.feature(Misses)
    admin = admin_application(
        router,
        workers,
        made.observations,
        config.extproc.max_body_bytes,
        (address.parse(listen).host, *config.admin.hosts),
        config.policy.header,
        session_headers(config.policy.session_header),
    )
    admin.add_routes(
        [
            *fault_routes(made.faults),
            *discovery_routes(workers, made.discovery),
            *sharing_routes(made.sharing),
            *report_routes(
                made.metrics.report,
                notes_of(config),
                missing_in(config),
                peers,
                classes_of(config),
                found=tuple if misses is None else misses.totals.sentences,
            ),
            *steering_routes(router, made.steer, steers_all=config.disaggregation.steers_all),
        ]
    )
    return admin


def _scraped(made: RunningRouter) -> Application:
    """Returns the application of the HTTP server for metrics and readiness."""
    hindrance, notes = made.readiness.hindrance, [*unseen_causes(made.config)]
    return metrics_application(made.metrics, hindrance, made.faults, notes)


def _probe_parts(made: RunningRouter) -> Iterator[Part]:
    """Yields the server for gateways that ask before they choose, if it is configured."""
    config, router, options = made.config, made.router, made.config.probe
    if options is None:
        return
    speed = float(config.policy.cost.prefill_tokens_per_second)
    probing = Probing(router, Models(config.models), made.workers.states.load, speed)
    policy = config.policy.header and config.policy.header.lower()
    names = header_names(router, policy, session_headers(config.policy.session_header))
    most = min(MAX_BYTES, config.extproc.max_body_bytes)
    limits = ProbeLimits(most, options.max_concurrent)
    figures = ProbeFigures()
    made.metrics.registry.register(figures)
    application = probe_application(probing, token_in(options.token_file), names, limits, figures)
    yield _site_part(made, "probe", application, options.listen, inflates=False)


def _site_part(
    made: RunningRouter, name: str, application: Application, at: str, *, inflates: bool = True
) -> Part:
    """Returns an HTTP server.

    name: its section in the configuration. inflates: whether it reads compressed bodies inflated.
    """
    runners: list[AppRunner] = []

    async def start() -> None:
        inherited = made.inherited.get(name, ())
        place = address.parse(at)
        runners.append(await listen(application, place, name, inherited, inflates=inflates))
        made.listening[name] = lambda: [*listening_in(runners[0])]
        made.unlisten.append(lambda: stop_listening(runners[0]))

    async def stop() -> None:
        for runner in runners:
            await runner.cleanup()

    return Part(name, start, stop)


def _endpoint_file_parts(made: RunningRouter) -> Iterator[Part]:
    """Yields what has Envoy follow the workers, if that is configured."""
    directory = made.config.envoy.eds_directory
    if directory is not None:
        from extproc.running.eds import endpoint_files

        files = endpoint_files(made.config, directory, made.workers, made.discovery)
        yield Part("endpoint files", files.start, files.close)


def _server_part(made: RunningRouter) -> Part:
    """Returns the server of ext_proc."""
    service = service_of(made.config, made.router, made.metrics)
    inherited = made.inherited.get("extproc", ())
    server = LeanServer(
        service, made.readiness, certificates=made.certificates, inherited=inherited
    )
    made.listening["extproc"] = server.listening
    made.metrics.registry.register(ServerCollector(server.figures))
    _watch_whether_asked(made, lambda: server.figures().connections)

    async def start() -> None:
        await server.start()
        made.own_readiness.is_listening = made.readiness.is_listening = True

    async def stop() -> None:
        server.is_handed_over = made.replaced.is_set()
        await server.stop()

    return Part("server", start, stop)


def _watch_whether_asked(made: RunningRouter, connections: Callable[[], int]) -> None:
    """Has it told if no proxy asks, where no other router or process may be asked instead."""
    if made.member is not None or made.sharing is not None:
        return
    workers, fleet = made.workers, made.fleet
    unasked = UnaskedRouter(
        made.metrics.decided,
        connections,
        lambda: sum([fleet.feeds.batches(name) for name in workers.records]),
        time.monotonic,
    )
    made.faults.add(unasked.faults)


def _handover_parts(made: RunningRouter) -> Iterator[Part]:
    """Yields what waits for a successor, if there is a state file to pass on."""
    file, state = made.config.state.file, made.state
    if file is None or state is None or made.member is not None:
        return

    def stop() -> None:
        state.is_handed_over = True
        made.replaced.set()
        for each in made.unlisten:  # they are the successor's, who answers better
            each()

    handover = Handover(
        place_of(file),
        state.write,
        lambda: {name: numbers() for name, numbers in made.listening.items()},
        stop,
    )
    yield Part("handover", handover.start, handover.close)


def _member_parts(made: RunningRouter) -> Iterator[Part]:
    """Yields what this process tells the others, and what it follows of them."""
    member = made.member
    if member is not None:
        steer = functools.partial(_steer, made.router.steering, None)
        yield task_part("announcement", lambda: member.announce(made.own_readiness))
        yield task_part("steering", lambda: member.follow(steer))


def _steer(steering: Steering, member: ProcessMember | None, percent: float) -> None:
    """Steers this percentage of requests from now on, here and in all other processes."""
    if percent != steering.percent:
        log.info("steering %g %% of requests from now on", percent)
        steering.change(percent)
    if member is not None:
        try:
            member.hand_on(percent)
        except OSError as error:
            log.error("the other processes could not be informed: %s", error.strerror)


def _awaited(discovery: Discovery, workers: Workers) -> str:
    """Returns what is still missing before all workers' caches are known, "" if nothing is."""
    if not discovery.is_complete:
        return "sources of workers have not answered yet"
    return "" if workers.states.replays_done() else "replays are still running"


def _count_avoided(endpoints: Callable[[], Endpoints]) -> int:
    return count_avoided(endpoints())
