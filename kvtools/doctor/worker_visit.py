"""Asks a worker's HTTP server whether it is healthy, what it serves, and where it publishes."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from types import TracebackType
from typing import NamedTuple, Self

import aiohttp
import msgspec

from extproc.base import address
from extproc.base.engine import CONFIGURED, Engine
from extproc.config.schema import Config, Model, WorkerEvents, WorkerSettings
from extproc.fleet.asking.engine_metrics import cache_of_metrics
from extproc.fleet.asking.polling import Client
from extproc.fleet.feeds.reported_sources import PATHS, discovered
from extproc.fleet.identity import identifying, learning
from extproc.fleet.records.engine_identity import (
    EngineAnswer,
    caches_in_info,
    drafts_in_metrics,
    identity_of,
)
from extproc.routing.candidates.pins import pin_of
from extproc.tokenizing.tokens import Tokenizer
from kvstate.feeds.feed_sources import ZmqSource
from kvstate.undecodable import UNDECODABLE
from kvtools.doctor.findings import Finding, Subject, name_list

HEALTH = "/health"
# The APIs on which requests may name a rank.
API_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
METRICS = "/metrics"
OK = 200

# More than a message's delay, or the whole seconds of a Date header, can explain.
MAX_SKEW_SECONDS = 5.0


class ListedModels(NamedTuple):
    """Models that GET /v1/models lists, and the adapters that name one of them as their parent."""

    models: tuple[str, ...]
    adapters: frozenset[str]


class ReportedSources(NamedTuple):
    """Where a worker reports that it publishes, empty if nowhere, and the path of that report."""

    sources: tuple[ZmqSource, ...]
    path: str


class Answer(NamedTuple):
    """The answer of a server.

    status: 0 if it did not answer. reason: why there is no body, "" if there is one.
    ahead_seconds: how far its clock is ahead of the local one by its Date header, within a second;
    None without that header.
    """

    status: int = 0
    body: bytes = b""
    reason: str = ""
    ahead_seconds: float | None = None

    @property
    def is_ok(self) -> bool:
        """Whether it is a complete answer with status 200."""
        return self.status == OK and not self.reason


class Bounds(NamedTuple):
    """The most that doctor waits and accepts.

    listen_seconds: for an event that nothing provoked. answer_bytes: of an HTTP server, enough for
    a list of ten thousand adapters, or for Envoy's whole configuration. messages: of one feed; no
    engine publishes as many while doctor listens.
    """

    listen_seconds: float = 2.0
    answer_bytes: int = 32 * 1024 * 1024
    messages: int = 20_000


USUAL = Bounds()

MAX_CONNECTIONS = 64
_READ_BYTES = 64 * 1024


class WebClient:
    """An HTTP client that turns every failure into an `Answer`; an asynchronous context.

    Unlike the router's own HTTP client, it needs the text of a failure, the Date header, and
    answers other than 200. seconds: limit for each question. max_bytes: of each answer.
    """

    def __init__(self, seconds: float, max_bytes: int = USUAL.answer_bytes) -> None:
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._client = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=seconds),
            cookie_jar=aiohttp.DummyCookieJar(),
            connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS),
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.close()

    async def get(self, url: str) -> Answer:
        """Returns a server's answer to a GET; never raises."""
        return await self._ask("GET", url, None, {})

    async def post(self, url: str, body: bytes, headers: dict[str, str] | None = None) -> Answer:
        """Returns a server's answer to a POST of JSON; never raises."""
        return await self._ask(
            "POST", url, body, {"Content-Type": "application/json", **(headers or {})}
        )

    async def _ask(
        self, method: str, url: str, body: bytes | None, headers: dict[str, str]
    ) -> Answer:
        try:
            async with self._client.request(
                method, url, data=body, headers=headers, allow_redirects=False
            ) as response:
                ahead = _ahead(response.headers.get("Date", ""))
                content = bytearray()
                async for piece in response.content.iter_chunked(_READ_BYTES):
                    content += piece
                    if len(content) > self._max_bytes:
                        reason = f"an answer of more than {self._max_bytes} bytes"
                        return Answer(response.status, reason=reason)
        except TimeoutError:
            return Answer(reason=f"no answer within {self._seconds:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Answer(reason=_words(error))
        return Answer(response.status, bytes(content), "", ahead)


def _words(error: Exception) -> str:
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, ConnectionRefusedError):
        return "connection refused"
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__


def _ahead(date: str) -> float | None:
    try:
        return parsedate_to_datetime(date).timestamp() - time.time()
    except (TypeError, ValueError, OverflowError):
        return None


class VisitTools(NamedTuple):
    """What every visit needs.

    tokenizers: those loaded from files, by model. seconds: limit for each question and each wait.
    probes: whether to send test requests that trigger events, and to drain queues.
    """

    config: Config
    web: WebClient
    tokenizers: Mapping[str, Tokenizer]
    seconds: float
    probes: bool
    bounds: Bounds


class WorkerReport(NamedTuple):
    """What a worker reports about itself.

    model: the configured model that it serves. engine: None if it is unknown.
    """

    findings: list[Finding]
    is_there: bool = False
    model: Model | None = None
    served: ListedModels | None = None
    sources: ReportedSources | None = None
    engine: Engine | None = None

    @property
    def is_served(self) -> bool:
        """Whether the worker would accept a request for the model."""
        return self.served is not None and self.model_name in self.served.models

    @property
    def model_name(self) -> str:
        """The name by which the worker knows the model."""
        if self.model is None:
            return ""
        names = (self.model.name, *self.model.aliases)
        listed = self.served.models if self.served else ()
        return next((name for name in names if name in listed), self.model.name)


async def visit(tools: VisitTools, worker: WorkerSettings, about: Subject) -> WorkerReport:
    """Asks a worker about itself; returns the findings and its answers."""
    health = await tools.web.get(f"http://{worker.endpoint}{HEALTH}")
    if health.status == 0:
        says = f"{worker.endpoint}{HEALTH}: {health.reason}"
        return WorkerReport([about.wrong("worker-unreachable", says)])
    findings = [_health(about, health)]
    if health.ahead_seconds is not None:
        witness = "the Date header of its answers"
        findings.append(judge_clock(about, health.ahead_seconds, witness))
    asked = (learning.MODELS, METRICS, *PATHS)
    models, metrics, *listings = await asyncio.gather(
        *(tools.web.get(f"http://{worker.endpoint}{path}") for path in asked)
    )
    served = models_of(models.body) if models.is_ok else None
    if served is None:
        findings.append(about.wrong("answer-unreadable", _unread(learning.MODELS, models)))
    else:
        findings += judge_models(about, tools.config, worker, served)
    info = next((one.body for one in listings[1:] if one.is_ok), b"")
    told_metrics = metrics.body if metrics.is_ok else b""
    findings += judge_prefix_caching(about, told_metrics, info)
    findings += judge_draft(about, told_metrics)
    findings += _block_size(tools, worker, about, listings)
    engine = await _engine(worker.endpoint, tools.seconds)
    findings.append(judge_engine(about, worker, engine))
    sources = _find_sources(worker, listings)
    findings += judge_ranks(about, worker, engine, _ranks(worker, sources))
    model = model_served(tools.config, worker, served or ListedModels((), frozenset()))
    findings += judge_template_arguments(about, model, engine)
    found = identity_of(worker.engine, CONFIGURED, engine).engine
    return WorkerReport(findings, True, model, served, sources, found)


def _health(about: Subject, answer: Answer) -> Finding:
    if answer.is_ok:
        return about.right("http", f"{HEALTH} answers 200")
    if answer.status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
        return about.note("http", f"it has no {HEALTH}")
    return about.wrong("worker-unhealthy", _unread(HEALTH, answer))


async def _engine(endpoint: str, seconds: float) -> EngineAnswer:
    """Returns what a worker says about its engine, asked as the router asks it."""
    client = Client()
    try:
        async with asyncio.timeout(seconds):
            return await identifying.ask_engine(client, endpoint)
    except identifying.FAILURES as error:
        return EngineAnswer(reason=identifying.in_words(error))
    finally:
        await client.close()


def _ranks(worker: WorkerSettings, reported: ReportedSources | None) -> int:
    """Returns how many ranks a worker has: as configured, else as it reports."""
    if isinstance(worker.events, WorkerEvents):
        return worker.events.ranks
    return len(reported.sources) if reported is not None else 1


def judge_ranks(
    about: Subject, worker: WorkerSettings, answer: EngineAnswer, ranks: int
) -> Iterator[Finding]:
    """Yields on which APIs a worker of several ranks reads no rank from a request."""
    engine = identity_of(worker.engine, CONFIGURED, answer).engine
    if ranks > 1 and engine is not None:
        unread = [path for path in API_PATHS if pin_of(engine, path) is None]
        if unread:
            says = f"{engine} reads no rank on {name_list(unread)}: the blocks of one rank count"
            yield about.note("ranks", f"{says} as uncertain there, and requests may miss them")


def judge_engine(about: Subject, worker: WorkerSettings, answer: EngineAnswer) -> Finding:
    """Returns whether a worker's engine is known, and the one that is configured.

    answer: what the worker says.
    """
    known = identity_of(worker.engine, CONFIGURED, answer)
    if known.engine is None:
        says = f"unknown: {known.reason}; what depends on its release is not certain until"
        return about.note("engine", f"{says} `workers[].engine` names it")
    if answer.engine not in (None, known.engine):
        return about.wrong("engine-differs", f"{known.engine} is configured; {known.reason}")
    source = "as it says itself" if worker.engine is None else "as configured"
    if known.reason:
        return about.note("engine", f"{known.engine}, {source}; {known.reason}")
    return about.right("engine", f"{known.engine}, {source}")


def _block_size(
    tools: VisitTools, worker: WorkerSettings, about: Subject, listings: list[Answer]
) -> list[Finding]:
    for path, answer in zip(PATHS, listings, strict=True):
        size = learning.block_size_in(answer.body) if answer.is_ok else None
        if size is not None and path in learning.SERVER_INFO:
            return [judge_block_size(about, tools.config, worker, size, path)]
    return []


def _find_sources(worker: WorkerSettings, listings: list[Answer]) -> ReportedSources | None:
    host = address.parse(worker.endpoint).host
    for path, answer in zip(PATHS, listings, strict=True):
        sources = sources_in(path, answer.body, host) if answer.is_ok else None
        if sources is not None:
            return sources
    return None


def _unread(path: str, answer: Answer) -> str:
    if answer.reason:
        return f"{path}: {answer.reason}"
    if answer.status != HTTPStatus.OK:
        return f"{path}: status {answer.status}"
    return f"{path}: its answer of {len(answer.body)} bytes cannot be read"


def models_of(answer: bytes) -> ListedModels | None:
    """Returns the models that an answer to GET /v1/models lists; None if it cannot be read."""
    cards = learning.cards_in(answer)
    if cards is None:
        return None
    models = tuple(card.id for card in cards if not card.parent)
    return ListedModels(models, frozenset(card.id for card in cards if card.parent))


def model_served(config: Config, worker: WorkerSettings, models: ListedModels) -> Model | None:
    """Returns the configured model that a worker serves; None if unknown."""
    listed = [
        one for one in config.models if not {one.name, *one.aliases}.isdisjoint(models.models)
    ]
    if worker.model is not None or len(config.models) == 1:
        name = config.model_of(worker)
        return next(one for one in config.models if one.name == name)
    return listed[0] if listed else None


def judge_models(
    about: Subject, config: Config, worker: WorkerSettings, models: ListedModels
) -> Iterator[Finding]:
    """Yields findings on whether a worker serves the model that its requests name, and adapters."""
    model = model_served(config, worker, models)
    names = name_list(models.models)
    if model is None or {model.name, *model.aliases}.isdisjoint(models.models):
        wanted = " or ".join(one.name for one in ((model,) if model else config.models))
        says = (
            f"it serves {names}; requests routed to it name {wanted}, so it answers them with 404"
        )
        yield about.wrong("model-not-served", says)
        return
    yield about.right("models", f"it serves {names}")
    unlisted = [name for name in (model.name, *model.aliases) if name not in models.models]
    if unlisted:
        says = f"it does not list {name_list(unlisted)}: requests with such a name may get 404"
        yield about.note("models", says)
    yield from _adapters(about, worker, model, models.adapters)


def _adapters(
    about: Subject, worker: WorkerSettings, model: Model, listed: frozenset[str]
) -> Iterator[Finding]:
    wanted = model.lora if worker.lora is None else worker.lora
    strangers = sorted(listed - {*model.lora, *wanted})
    if strangers:
        says = f"it serves {name_list(strangers)}, which `lora` does not name: requests for such an"
        yield about.wrong("adapter-not-configured", f"{says} adapter are routed by load alone")
    missing = sorted(set(wanted) - listed)
    if not missing:
        return
    if worker.lora or (listed and not worker.learn):
        says = f"it does not list the adapters {name_list(missing)}"
        yield about.wrong("adapter-not-served", says)
    elif not listed:
        yield about.note("models", "it lists no adapters; it may still serve them")


def judge_clock(about: Subject, ahead_seconds: float, witness: str) -> Finding:
    """Returns whether a clock agrees with the local one.

    witness: the source of the time.
    """
    if abs(ahead_seconds) <= MAX_SKEW_SECONDS:
        return about.right("clock", f"agrees with the local clock, according to {witness}")
    where = "ahead of" if ahead_seconds > 0 else "behind"
    says = f"it is {abs(ahead_seconds):.0f} s {where} the local clock, according to {witness}"
    return about.wrong("clock-skew", says)


def judge_block_size(
    about: Subject, config: Config, worker: WorkerSettings, size: int, witness: str
) -> Finding:
    """Returns whether the engine's block size is the configured one.

    size: tokens. witness: the source of the size.
    """
    if worker.block_size not in (None, size):
        says = f"{size} tokens according to {witness}, {worker.block_size} in the configuration"
        return about.wrong("block-size", says)
    if size == 1:
        says = "1 token: every token is a block, so the index is sixteen times as large as with 16"
        return about.note("block size", says)
    if worker.block_size is None and size != config.policy.block_size:
        says = f"{size} tokens according to {witness}; {config.policy.block_size} are assumed until"
        says += " an event arrives"
        return about.note("block size", says)
    return about.right("block size", f"{size} tokens according to {witness}")


def judge_draft(about: Subject, metrics: bytes) -> Iterator[Finding]:
    """Yields a note if an engine drafts tokens. metrics: vLLM's answer to /metrics, or b""."""
    if drafts_in_metrics(metrics):
        says = "it drafts: with EAGLE or MTP it may compute the last cached block of a prompt again"
        yield about.note("attention", f"{says}, which the router learns from its answers")


def judge_prefix_caching(about: Subject, metrics: bytes, info: bytes) -> Iterator[Finding]:
    """Yields a fault if an engine reports that it caches no prefixes.

    metrics: vLLM's answer to /metrics. info: SGLang's answer to /server_info; b"" if missing.
    """
    answers = (
        (cache_of_metrics(metrics).is_on, "/metrics"),
        (caches_in_info(info), "/server_info"),
    )
    for caches, path in answers:
        if caches is False:
            says = f"the engine's prefix cache is off ({path}): it reuses nothing"
            yield about.wrong("prefix-caching-off", says)


def judge_template_arguments(
    about: Subject, model: Model | None, engine: EngineAnswer
) -> Iterator[Finding]:
    """Yields a note if SGLang shows other default arguments of templates than are configured."""
    configured = (model and model.chat_template_kwargs) or {}
    if engine.arguments is None or model is None:
        return
    shown = engine.arguments.default_chat_template_kwargs or "{}"
    if msgspec.json.decode(shown) != configured:
        said = msgspec.json.encode(configured).decode()
        says = f"it was started with --default-chat-template-kwargs {shown}, which is followed"
        yield about.note("tokens", f"{says}; models[].chat_template_kwargs is {said}")


def sources_in(path: str, answer: bytes, host: str) -> ReportedSources | None:
    """Returns where a worker publishes, by its answer at a path; None if that is not in the answer.

    path: one of `extproc.fleet.feeds.reported_sources.PATHS`.
    """
    sources = discovered(path, answer, host)
    if sources:
        return ReportedSources(sources, path)
    try:
        raw = msgspec.json.decode(answer)
    except UNDECODABLE:
        return None
    if not isinstance(raw, Mapping):
        return None
    is_off = not raw or ("kv_events" in raw and not raw["kv_events"])
    return ReportedSources((), path) if is_off else None
