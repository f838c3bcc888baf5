"""The command `kvsteer doctor`: examines everything that a configuration names, all at once.

Every part is bounded in time. A part that takes too long, or fails, becomes a finding itself and
hides no other part's findings.
"""

import argparse
import asyncio
import dataclasses
import logging
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from extproc.base import address
from extproc.base.errors import ExtraError, RequestError, StartError
from extproc.commands.config_file import add_config, config_of
from extproc.commands.layout import layout_of
from extproc.config.reader import load
from extproc.config.rules import doubts, unseen_causes
from extproc.config.schema import Config, Tls, WorkerSettings
from extproc.config.sections import SharingSettings
from extproc.fleet.discovery.sources import sources_of
from extproc.fleet.discovery.view import (
    STATIC,
    Sighting,
    Source,
    SourceReport,
    View,
    listed,
    merged,
)
from extproc.serving.certificates import Certificates
from extproc.sharing.carriers import transport_of
from extproc.sharing.messages import MessageError, decoded
from extproc.sharing.sharing import ALIVE_TICKS, reporter_of
from extproc.tokenizing.tokens import Tokenizer
from kvstate.undecodable import UNDECODABLE
from kvtools.doctor import (
    deletion_cost_visit,
    faults_visit,
    features_visit,
    feed_visit,
    priority_visit,
    steering_visit,
    store_visit,
    token_visit,
    worker_visit,
)
from kvtools.doctor.dead_engine import without_repeats
from kvtools.doctor.envoy_dump import hosts_in, judge_envoy
from kvtools.doctor.feed_visit import FeedReport, judge_swapped
from kvtools.doctor.findings import Finding, Subject, as_json, as_text, exit_status
from kvtools.doctor.pulls import judge_ports, judge_puller
from kvtools.doctor.shared_stores import judge_mounts, judge_publisher
from kvtools.doctor.steering_visit import local
from kvtools.doctor.tenancy import judge_engine, judge_secret
from kvtools.doctor.worker_visit import USUAL, Bounds, VisitTools, WebClient

Findings = Sequence[Finding]


class _WorkerEntry(msgspec.Struct):
    """The part of an entry of GET /workers that is read."""

    name: str
    endpoint: str


DEFAULT_SECONDS = 5.0
MAX_SECONDS = 600.0

# How many workers are examined at the same time.
MAX_WORKERS = 32

# A part, such as a feed with its probes, may take this many times the limit of one wait.
MAX_WAITS = 12

# Automatic renewal happens earlier than this many days before a certificate expires.
SOON_DAYS = 14

_DAY_SECONDS = 86_400
DUMP = "/config_dump"
CLUSTERS = "/clusters?format=json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    parser.set_defaults(run=run)
    add_config(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=DEFAULT_SECONDS,
        metavar="SECONDS",
        help="time limit of each request and each wait (default: %(default)g)",
    )
    parser.add_argument(
        "--envoy",
        type=_host_port,
        metavar="HOST:PORT",
        help="where Envoy's admin server is reached from here, if not at envoy.admin: the name of"
        " its container, for instance",
    )
    parser.add_argument(
        "--probe",
        action="store_true",
        help="ask each worker for tiny completions and wait for their events, ask for whole"
        " replays, and drain queues: what is drained, a running router does not get",
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_SECONDS:
        wanted = f"a number of seconds above 0 and up to {MAX_SECONDS:g}"
        raise argparse.ArgumentTypeError(f"must be {wanted}, is {text!r}")
    return seconds


def _host_port(text: str) -> str:
    try:
        return str(address.parse(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(arguments: argparse.Namespace) -> int:
    """Examines everything and prints the findings; returns the exit status.

    The status is 0 when nothing is wrong, 1 otherwise.

    Raises:
        ConfigError: the configuration cannot be used.
    """
    config = load(config_of(arguments))
    logging.disable(logging.WARNING)  # the findings already say what the parts would log
    try:
        findings = asyncio.run(
            examine(config, arguments.timeout, probes=arguments.probe, envoy=arguments.envoy)
        )
    finally:
        logging.disable(logging.NOTSET)
    layout = layout_of(sys.stdout, os.environ)
    print(as_json(findings) if arguments.json else as_text(findings, layout))
    return exit_status(findings)


async def examine(
    config: Config,
    seconds: float,
    *,
    probes: bool,
    envoy: str | None = None,
    bounds: Bounds = USUAL,
) -> list[Finding]:
    """Examines everything that a configuration names; returns all findings.

    seconds: limit of each question and each wait; no part takes more than `MAX_WAITS` times as
    long. probes: whether to send test requests that provoke events, and to drain queues. envoy: the
    address of Envoy's admin server, if it is not `envoy.admin`. bounds: of waits and answers.
    """
    at = envoy or config.envoy.admin
    tokenizers, findings = await asyncio.to_thread(_tokenizers, config)
    findings += await asyncio.to_thread(visit_tls, config)
    async with WebClient(seconds, bounds.answer_bytes) as web:
        tools = VisitTools(config, web, tokenizers, seconds, probes, bounds)
        fleet, discovered = await visit_sources(config, seconds)
        found = await _visits(tools, fleet, at, [*findings, *discovered])
    about = Subject("configuration")
    likely = (*doubts(config, os.path.exists), *unseen_causes(config))
    doubted = [about.note("configuration", doubt) for doubt in likely]
    doubted += judge_secret(config)
    doubted += judge_ports(config, [found.worker for found in fleet])
    doubted += judge_mounts(config, [found.worker.endpoint for found in fleet])
    return [*doubted, *findings, *discovered, *found]


async def _visits(
    tools: VisitTools, fleet: Sequence[Sighting], at: str, known: Findings
) -> list[Finding]:
    """Examines everything that runs, all at once; returns the findings.

    at: the address of Envoy's admin server. known: what was found before.
    """
    turns, reports = asyncio.Semaphore(MAX_WORKERS), list[FeedReport]()

    async with asyncio.TaskGroup() as group:

        def start(name: str, visit: Awaitable[Findings]) -> asyncio.Task[Findings]:
            return group.create_task(_bounded(Subject(name), visit, tools.seconds))

        async def steering_later() -> Findings:
            # its request must not be among those whose connections are judged
            await asyncio.wait([envoy])
            return await steering_visit.visit(tools, at)

        envoy = start(f"envoy {at}", visit_envoy(tools, fleet, at))
        sharing = start("sharing", visit_sharing(tools.config, tools.seconds))
        steering = start("steering", steering_later())
        own = start("router", faults_visit.visit(tools))
        features = start("router", features_visit.visit(tools))
        kubernetes = deletion_cost_visit.visit(tools.config, tools.seconds)
        deletion_cost = start("discovery kubernetes", kubernetes)
        workers = [group.create_task(_in_turn(tools, one, turns, reports)) for one in fleet]
    swapped = list(judge_swapped(reports))
    before = [envoy, sharing, features, deletion_cost, *workers]
    found = [one for part in before for one in part.result()]
    seen = faults_visit.without_doubles(own.result(), [*known, *found, *swapped])
    return [*seen, *found, *swapped, *steering.result()]


async def _in_turn(
    tools: VisitTools, found: Sighting, turns: asyncio.Semaphore, reports: list[FeedReport]
) -> Sequence[Finding]:
    """Examines one worker, at most `MAX_WORKERS` at a time.

    reports: what the worker reports about its feed is appended here.
    """
    about = Subject(f"worker {found.worker.endpoint}")
    if found.excluded:
        return [about.note("discovery", f"not checked: it takes no requests: {found.excluded}")]
    async with turns:
        try:
            return await _worker(tools, found.worker, about, reports)
        except Exception as error:  # noqa: BLE001 - as below
            return [_failed(about, error)]


async def _worker(
    tools: VisitTools, worker: WorkerSettings, about: Subject, reports: list[FeedReport]
) -> Sequence[Finding]:
    visited = await worker_visit.visit(tools, worker, about)
    reports.append(FeedReport(worker.endpoint, feed_visit.zmq_places(worker), visited.sources))
    parts = [feed_visit.visit(tools, worker, visited, about)]
    if visited.is_there:
        parts.append(token_visit.visit(tools, worker, visited, about))
        parts.append(priority_visit.visit(tools, worker, visited, about))
        parts.append(store_visit.visit(tools, worker, visited, about))
    bounded = [_bounded(about, part, tools.seconds) for part in parts]
    found = await asyncio.gather(*bounded)
    judged: list[Finding] = []
    if visited.is_there:
        judged += judge_engine(tools.config, visited.engine, about)
        judged += judge_puller(tools.config, worker, visited.engine, about)
        judged += judge_publisher(tools.config, worker, visited.engine, about)
    parts_found = (one for part in found for one in part)
    return without_repeats(list(dict.fromkeys([*visited.findings, *judged, *parts_found])))


async def _bounded(
    about: Subject, work: Awaitable[Sequence[Finding]], seconds: float
) -> Sequence[Finding]:
    """Returns the findings of a part, or one finding that says why the part did not finish."""
    limit = MAX_WAITS * seconds
    try:
        async with asyncio.timeout(limit):
            return await work
    except TimeoutError:
        return [about.wrong("not-checked", f"not finished within {limit:g} s")]
    except StartError as error:
        return [about.wrong(_code(error, "not-checked"), str(error))]
    except Exception as error:  # noqa: BLE001 - one part must not hide the others' findings
        return [_failed(about, error)]


def _code(error: StartError, otherwise: str) -> str:
    """Returns the code of a part that could not be started."""
    return "extra-missing" if isinstance(error, ExtraError) else otherwise


def _failed(about: Subject, error: Exception) -> Finding:
    return about.wrong("not-checked", f"the check itself failed: {error!r}")


def _tokenizers(config: Config) -> tuple[dict[str, Tokenizer], list[Finding]]:
    loaded: dict[str, Tokenizer] = {}
    findings: list[Finding] = []
    for model in config.models:
        about = Subject(f"model {model.name}")
        try:
            tokenizer = Tokenizer.load(model)
        except (StartError, RequestError) as error:
            findings.append(about.wrong("tokenizer-unloadable", str(error)))
            continue
        if tokenizer is not None:
            loaded[model.name] = tokenizer
            findings.append(about.right("tokenizer", f"{model.tokenizer} is loaded"))
        elif model.tokenizer is None:
            says = "none is configured: texts are compared, not tokens"
            findings.append(about.note("tokenizer", says))
    return loaded, findings


async def visit_sources(config: Config, seconds: float) -> tuple[list[Sighting], list[Finding]]:
    """Asks all sources for their workers.

    Returns the configured workers and those found, and the findings about the sources.
    """
    try:
        sources = sources_of(config)
    except StartError as error:
        code = _code(error, "discovery-fault")
        return list(listed(config.workers)), [_discovery_subject("").wrong(code, str(error))]
    answers = await asyncio.gather(*(_ask(one, seconds) for one in sources))
    views: dict[str, View] = {STATIC: listed(config.workers)}
    findings: list[Finding] = []
    for source, (view, finding) in zip(sources, answers, strict=True):
        views[source.name] = view
        findings += finding
    fleet = [member.sighting for member in merged(views).values()]
    if not fleet and not any(one.code == "no-workers" for one in findings):
        findings.append(
            _discovery_subject("").wrong("no-workers", "no worker is configured or discovered")
        )
    return fleet, findings


async def _ask(source: Source, seconds: float) -> tuple[View, list[Finding]]:
    """Returns the first view of a source, and the findings about the source."""
    about = _discovery_subject(source.name)
    seen: list[tuple[View, str]] = []
    faults: list[str] = []
    answered = asyncio.Event()

    def take(view: View, note: str, fault: str = "") -> None:
        seen.append((view, fault or note))
        answered.set()

    def fail(fault: str) -> None:
        faults.append(fault)
        answered.set()

    running = asyncio.create_task(source.run(SourceReport(take, lambda: None, fail)))
    waiting = asyncio.create_task(answered.wait())
    await asyncio.wait((running, waiting), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    running.cancel()
    waiting.cancel()
    ended, _ = await asyncio.gather(running, waiting, return_exceptions=True)
    if isinstance(ended, Exception):
        faults.append(f"ended with {type(ended).__name__}")
    return _judged(about, seen, faults or [f"no answer within {seconds:g} s"])


def _judged(
    about: Subject, seen: Sequence[tuple[View, str]], faults: Sequence[str]
) -> tuple[View, list[Finding]]:
    if not seen:
        return (), [about.wrong("discovery-fault", faults[0])]
    view, note = seen[-1]
    if note:
        return view, [about.wrong("discovery-fault", note)]
    if not view:
        return view, [about.wrong("no-workers", "it lists no worker")]
    names = "1 worker" if len(view) == 1 else f"{len(view)} workers"
    return view, [about.right("discovery", f"lists {names}")]


def _discovery_subject(name: str) -> Subject:
    return Subject(f"discovery {name}".strip())


def visit_tls(config: Config) -> list[Finding]:
    """Reads the router's TLS files as the router itself does; returns the findings."""
    options = config.extproc.tls
    return [] if options is None else list(_findings(Subject("router"), options))


def _findings(about: Subject, options: Tls) -> Iterator[Finding]:
    try:
        found = Certificates(dataclasses.replace(options, client_ca=None))
    except StartError as error:
        yield about.wrong("tls-certificate", str(error))
    else:
        yield _expiry(about, found.current.expires_at, time.time())
    if options.client_ca is None:
        return
    try:
        Certificates(options)
    except StartError as error:
        if str(error).startswith("extproc.tls.client_ca"):
            yield about.wrong("tls-client-ca", str(error))
    else:
        yield about.right(
            "tls", "extproc.tls.client_ca can be read: clients must have a certificate"
        )


def _expiry(about: Subject, expires_at: float, now: float) -> Finding:
    day = datetime.fromtimestamp(expires_at, UTC).date()
    if expires_at <= now:
        return about.wrong("tls-expired", f"the certificate expired on {day}: nobody can connect")
    days = int((expires_at - now) // _DAY_SECONDS)
    if days < SOON_DAYS:
        return about.note("tls", f"the certificate expires on {day}, in {days} days: renew it")
    return about.right("tls", f"the certificate matches its key and is valid until {day}")


class ReceivedReports(NamedTuple):
    """What a listener received from the routers that share.

    fault: why nothing could be received, "" if it could. heard_seconds: age of each router's last
    message, by the router's name. rejected: messages, by the reason.
    """

    fault: str
    heard_seconds: Mapping[str, float]
    rejected: Mapping[str, int]


async def receive_reports(options: SharingSettings, seconds: float) -> ReceivedReports:
    """Receives messages for so many seconds, as a router with this configuration does; sends none.

    Raises:
        StartError: the client library is missing, or a file with a secret cannot be read.
    """
    keys = reporter_of(options).keys
    heard_at: dict[str, float] = {}
    counts: Counter[str] = Counter()
    opened = asyncio.Event()

    def hear(message: bytes) -> float:
        try:
            heard_at[decoded(message, keys).origin] = time.monotonic()
        except MessageError as error:
            counts[error.reason] += 1
        return 0.0

    carrier = transport_of(options, hear, opened.set, seconds)
    running = asyncio.create_task(carrier.run())
    await asyncio.sleep(seconds)
    fault = "" if opened.is_set() else carrier.fault
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    now = time.monotonic()
    return ReceivedReports(fault, {name: now - at for name, at in heard_at.items()}, counts)


# Shortest time to listen; longer if routers may be silent for longer.
HEAR_SECONDS = 1.5


async def visit_sharing(config: Config, seconds: float) -> list[Finding]:
    """Listens to the routers that share; returns the findings."""
    options = config.sharing
    if options is None:
        return []
    about = Subject(f"sharing {options.url}")
    try:
        silent_seconds = (ALIVE_TICKS + 1) * options.tick_ms / 1000
        heard = await receive_reports(options, max(min(seconds, HEAR_SECONDS), silent_seconds))
    except StartError as error:
        return [about.wrong(_code(error, "sharing-unreachable"), str(error))]
    if heard.fault:
        return [about.wrong("sharing-unreachable", heard.fault)]
    found = [
        about.right("sharing", f"router {name} sent its last message {age * 1000:.0f} ms ago")
        for name, age in heard.heard_seconds.items()
    ]
    if heard.rejected:
        words = ", ".join(f"{count} {reason}" for reason, count in heard.rejected.items())
        found.append(about.wrong("sharing-unsealed", f"messages are rejected: {words}"))
    if not heard.heard_seconds:
        found.append(about.note("sharing", "no other router was heard"))
    return found


async def visit_envoy(tools: VisitTools, fleet: Sequence[Sighting], at: str) -> list[Finding]:
    """Checks the running configuration of Envoy; returns the findings.

    fleet: the workers that its clusters should have. at: the address of its admin server.
    """
    about = Subject(f"envoy {at}")
    answer = await tools.web.get(f"http://{at}{DUMP}")
    if answer.status == 0:
        says = f"not checked: its admin server does not answer: {answer.reason}"
        return [about.note("envoy", f"{says}; --envoy HOST:PORT names another address")]
    if not answer.is_ok:
        says = f"{DUMP}: {answer.reason or f'status {answer.status}'}"
        return [about.wrong("envoy-unreadable", says)]
    clusters = await tools.web.get(f"http://{at}{CLUSTERS}")
    hosts = hosts_in(clusters.body) if clusters.is_ok else {}
    workers = await _hosts_wanted(tools, fleet)
    return list(judge_envoy(about, tools.config, answer.body, hosts, workers))


async def _hosts_wanted(tools: VisitTools, fleet: Sequence[Sighting]) -> dict[str, str]:
    """Returns the workers in the form that `judge_hosts` expects.

    The running router knows where it sends requests; a look-up of one's own may find another
    address of the same name.
    """
    answer = await tools.web.get(f"http://{local(tools.config.admin.listen)}/workers")
    used = endpoints_in(answer.body) if answer.is_ok else {}
    found = await asyncio.gather(
        *(_resolved(used.get(one.worker.endpoint, one.worker.endpoint)) for one in fleet)
    )
    names = ["" if one.excluded else one.worker.endpoint for one in fleet]
    return dict(zip(found, names, strict=True))


def endpoints_in(answer: bytes) -> dict[str, str]:
    """Returns the endpoints of workers by name, from an answer to GET /workers; {} without any."""
    try:
        shown = msgspec.json.decode(answer, type=list[_WorkerEntry])
    except UNDECODABLE:
        return {}
    return {one.name: one.endpoint for one in shown if _is_place(one.endpoint)}


def _is_place(endpoint: str) -> bool:
    try:
        address.parse(endpoint)
    except ValueError:
        return False
    return True


async def _resolved(endpoint: str) -> str:
    """Returns the ip:port of an endpoint, "" if its name does not resolve.

    Of several addresses it is the one that the router takes (`extproc.fleet.identity.resolving`).
    """
    at = address.parse(endpoint)
    if at.is_ip:
        return str(at)
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(at.host, at.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ""
    return min(str(address.Address(str(one[4][0]), at.port)) for one in found)
