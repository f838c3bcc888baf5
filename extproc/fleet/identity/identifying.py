"""Asks workers which engine they run, its release and front end, and tells who wants to know.

A worker is asked when it is added, whenever it may have been restarted, and now and then, since a
restart may not show. What it said last counts while it does not answer.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator

import aiohttp

from extproc.base.engine import SGLANG, VLLM, Engine
from extproc.base.fault import Fault
from extproc.fleet.asking.engine_metrics import MAX_METRICS_BYTES, cache_of_metrics
from extproc.fleet.asking.polling import (
    MAX_ANSWER_BYTES,
    MAX_QUESTIONS,
    TIMEOUT_SECONDS,
    Client,
    PeriodicCheck,
    Question,
)
from extproc.fleet.identity.front_ends import FrontEndSilentError, front_end_of
from extproc.fleet.records.engine_identity import (
    EngineAnswer,
    EngineRecord,
    arguments_in,
    cache_tokens_in_info,
    caches_in_info,
    drafts_in_metrics,
    engine_of_metrics,
    owner_in,
    release_in,
)
from extproc.fleet.records.shared import SharedByFleet
from extproc.fleet.records.worker import Worker
from kvstate.feeds.backoff import Backoff

log = logging.getLogger("kvsteer.workers")

MODELS = "/v1/models"
METRICS = "/metrics"
VERSION = ("/version",)
SERVER_INFO = ("/server_info", "/get_server_info")

# The limit for all answers of one worker; each one has `TIMEOUT_SECONDS`.
ALL_SECONDS = 12.0

_OK = 200
_TOO_MANY_REQUESTS = 429
_SERVER_ERROR = 500


class EngineSilentError(Exception):
    """A worker does not answer for now."""


# How asking a worker fails.
FAILURES = (EngineSilentError, FrontEndSilentError, aiohttp.ClientError, TimeoutError, OSError)


def in_words(error: Exception) -> str:
    """Returns why a worker did not answer, without what it sent."""
    is_said = isinstance(error, EngineSilentError | FrontEndSilentError)
    why = str(error) if is_said else type(error).__name__
    return f"it does not answer: {why}"


class Identifying:
    """Keeps what is known of every worker's engine up to date."""

    def __init__(self, shared: SharedByFleet) -> None:
        self._times = times = shared.times
        self._table = shared.table
        self._chance = shared.chance
        self._monotonic = shared.monotonic
        self._watchers: list[Callable[[str], None]] = []
        self.question = Question(
            "engine", asyncio.Semaphore(MAX_QUESTIONS), times.engine_again_seconds
        )
        self.check = PeriodicCheck(
            self._check, "workers that came back could not be asked for their engine"
        )

    def watch(self, changed: Callable[[str], None]) -> None:
        """Has this called with a worker's name after its engine, or how it runs, changed.

        What a worker already has when it is added is a change too.
        """
        self._watchers.append(changed)

    def faults(self) -> Iterator[Fault]:
        """Yields a fault for each worker that says that it caches no prefixes."""
        for worker in self._table:
            if worker.engine_answer.caches is False:
                says = "the engine says that its prefix cache is off: it reuses nothing"
                yield Fault("prefix-caching-off", f"worker {worker.name}", says)

    def expect(self, worker: Worker) -> None:
        """Notes which engine a worker is configured to run."""
        self._note(worker)

    def ask_now(self, worker: Worker) -> None:
        """Asks a worker at once: it may have been restarted, or moved."""
        self._note(worker)
        retries = worker.engine_questions.retries
        if retries is not None:
            retries.reset()
        poll = worker.polls.get(self.question.name)
        if poll is not None:
            poll.ask_now()

    async def ask(self, client: Client, worker: Worker) -> float:
        """Asks a worker once; returns the seconds until it is asked again."""
        least = self._times.engine_least_seconds
        asked, now, endpoint = worker.engine_questions, self._monotonic(), worker.endpoint
        if now - asked.at < least:
            return least - (now - asked.at)
        asked.at = now
        if asked.retries is None:
            asked.retries = Backoff(*self._times.engine_retry_seconds, self._chance)
        try:
            async with asyncio.timeout(ALL_SECONDS):
                answer = await ask_engine(client, endpoint)
        except FAILURES as error:
            self._take_silence(worker, in_words(error))
            return max(least, asked.retries.next_seconds())
        if self._table.has(worker) and worker.endpoint == endpoint:
            worker.identify(_kept(worker.engine_answer, answer))
            self._note(worker)
        if answer.engine is None:
            return max(least, asked.retries.next_seconds())
        asked.retries.reset()
        return self._times.engine_again_seconds * (0.9 + 0.2 * self._chance())

    def _take_silence(self, worker: Worker, why: str) -> None:
        if worker.engine_answer.engine is None and self._table.has(worker):
            worker.identify(EngineAnswer(reason=why))
            self._note(worker)

    def _check(self) -> None:
        """Asks the workers again that are no longer ejected."""
        for worker in self._table:
            is_down = worker.upstream is not None and worker.upstream.is_down
            if worker.engine_questions.was_down and not is_down:
                self.ask_now(worker)
            worker.engine_questions.was_down = is_down

    def _note(self, worker: Worker) -> None:
        """Logs what has changed, and tells it to those who watch."""
        now, before = worker.identity, worker.engine_questions.noted
        if now == before:
            return
        worker.engine_questions.noted = now
        _log(worker.name, now, before)
        was = EngineRecord(None, "", "", None) if before is None else before
        if (now.engine, now.arguments, now.drafts) != (was.engine, was.arguments, was.drafts):
            for changed in self._watchers:
                changed(worker.name)


def _log(name: str, now: EngineRecord, before: EngineRecord | None) -> None:
    if now.engine is not None and (before is None or now.engine != before.engine):
        log.info("worker %s runs %s (%s)", name, now.engine, now.source)
    if now.engine is not None and now.reason:
        log.warning("worker %s should run %s: %s", name, now.engine, now.reason)
    if now.engine is None:
        log.debug("worker %s: its engine is unknown: %s", name, now.reason)


async def ask_engine(client: Client, endpoint: str) -> EngineAnswer:
    """Asks a worker which engine it runs.

    endpoint: host:port of its HTTP server.

    Raises:
        one of `FAILURES`: it does not answer for now.
    """
    name = await _engine_of(client, endpoint)
    if name is None:
        return EngineAnswer(
            reason=f"neither {MODELS} nor {METRICS} names an engine that is known here"
        )
    reasons = []
    for path in SERVER_INFO if name == SGLANG else VERSION:
        answer = await _answer(client, endpoint, path)
        release = answer if isinstance(answer, str) else release_in(answer)
        if isinstance(release, str):
            reasons.append(f"{path}: {release}")
            continue
        assert isinstance(answer, bytes)
        metrics = await _metrics(client, endpoint) if name == VLLM else b""
        front_end = await front_end_of(client, endpoint, name)
        engine = Engine(name, release, front_end)
        return _with_metrics(_engine_answer(engine, answer, path), metrics)
    return EngineAnswer(reason=f"it is {name}, but {'; '.join(reasons)}")


def _engine_answer(engine: Engine, answer: bytes, path: str) -> EngineAnswer:
    if engine.name != SGLANG:
        return EngineAnswer(engine, "")
    arguments = arguments_in(answer)
    return EngineAnswer(
        engine,
        "" if arguments else f"{path}: its arguments cannot be read",
        arguments,
        caches=caches_in_info(answer),
        cache_tokens=cache_tokens_in_info(answer),
    )


def _kept(before: EngineAnswer, answer: EngineAnswer) -> EngineAnswer:
    """Returns what a worker said, with what it said before of what it does not say now."""
    return answer._replace(
        drafts=before.drafts if answer.drafts is None else answer.drafts,
        caches=before.caches if answer.caches is None else answer.caches,
        block_size=before.block_size if answer.block_size is None else answer.block_size,
        cache_tokens=before.cache_tokens if answer.cache_tokens is None else answer.cache_tokens,
    )


def _with_metrics(answer: EngineAnswer, metrics: bytes) -> EngineAnswer:
    """Returns what a worker said, and what vLLM's metrics say; b"" if there are none."""
    if not metrics:
        return answer
    cache = cache_of_metrics(metrics)
    return answer._replace(
        drafts=drafts_in_metrics(metrics),
        caches=cache.is_on,
        block_size=cache.block_size,
        cache_tokens=cache.tokens,
    )


async def _metrics(client: Client, endpoint: str) -> bytes:
    """Returns the metrics of a worker, b"" if it does not show them."""
    try:
        _, text = await client.get(endpoint, METRICS, TIMEOUT_SECONDS, MAX_METRICS_BYTES)
    except FAILURES:
        return b""
    return text


async def _engine_of(client: Client, endpoint: str) -> str | None:
    """Returns the engine that a worker names, as the owner of its models or in its metrics.

    A server with an API key may show metrics, but no models.
    """
    models = await _answer(client, endpoint, MODELS)
    name = None if isinstance(models, str) else owner_in(models)
    if name is not None:
        return name
    _, metrics = await client.get(endpoint, METRICS, TIMEOUT_SECONDS, MAX_METRICS_BYTES)
    return engine_of_metrics(metrics)


async def _answer(client: Client, endpoint: str, path: str) -> bytes | str:
    """Returns the body of an answer, or why there is none.

    Raises:
        EngineSilentError: it is overloaded, or starts or stops.
    """
    limit = MAX_ANSWER_BYTES
    status, body = await client.get(endpoint, path, TIMEOUT_SECONDS, limit + 1)
    if status >= _SERVER_ERROR or status == _TOO_MANY_REQUESTS:
        raise EngineSilentError(f"{path}: status {status}")
    if status != _OK:
        return f"status {status}"
    return f"more than {limit} bytes" if len(body) > limit else body
