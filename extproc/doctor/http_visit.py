"""What a worker's HTTP server tells: whether it is well, what it serves, where it publishes."""

import asyncio
from http import HTTPStatus
from typing import NamedTuple

from extproc import address
from extproc.config import Model, Worker
from extproc.doctor import answers
from extproc.doctor.answers import Served, Told
from extproc.doctor.findings import About, Finding
from extproc.doctor.means import Means
from extproc.doctor.web_client import Answer
from extproc.workers import learned
from extproc.workers.feed_sources import PATHS

HEALTH = "/health"
METRICS = "/metrics"


class Visited(NamedTuple):
    """What is known of a worker after it was asked; model: the configured one that it serves."""

    findings: list[Finding]
    is_there: bool = False
    model: Model | None = None
    served: Served | None = None
    told: Told | None = None

    @property
    def is_served(self) -> bool:
        """Whether the worker would take a request for the model."""
        return self.served is not None and self.model_name in self.served.models

    @property
    def model_name(self) -> str:
        """How requests name the model so that the worker knows it."""
        if self.model is None:
            return ""
        names = (self.model.name, *self.model.aliases)
        listed = self.served.models if self.served else ()
        return next((name for name in names if name in listed), self.model.name)


async def visit(means: Means, worker: Worker, about: About) -> Visited:
    """Asks a worker."""
    health = await means.web.get(f"http://{worker.endpoint}{HEALTH}")
    if health.status == 0:
        says = f"{worker.endpoint}{HEALTH}: {health.reason}"
        return Visited([about.wrong("worker-unreachable", says)])
    findings = [_health(about, health)]
    if health.ahead_seconds is not None:
        witness = "the Date of its answers"
        findings.append(answers.judge_clock(about, health.ahead_seconds, witness))
    asked = (learned.MODELS, METRICS, *PATHS)
    models, metrics, *listings = await asyncio.gather(
        *(means.web.get(f"http://{worker.endpoint}{path}") for path in asked)
    )
    served = answers.served(models.body) if models.is_ok else None
    if served is None:
        findings.append(about.wrong("answer-unreadable", _unread(learned.MODELS, models)))
    else:
        findings += answers.judge_models(about, means.config, worker, served)
    info = next((one.body for one in listings[1:] if one.is_ok), b"")
    told_metrics = metrics.body if metrics.is_ok else b""
    findings += answers.judge_prefix_caching(about, told_metrics, info)
    findings += _block_size(means, worker, about, listings)
    model = answers.model_served(means.config, worker, served or Served((), frozenset()))
    return Visited(
        findings, is_there=True, model=model, served=served, told=_told(worker, listings)
    )


def _health(about: About, answer: Answer) -> Finding:
    if answer.is_ok:
        return about.right("http", f"{HEALTH} answers 200")
    if answer.status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
        return about.note("http", f"it has no {HEALTH}")
    return about.wrong("worker-unhealthy", _unread(HEALTH, answer))


def _block_size(
    means: Means, worker: Worker, about: About, listings: list[Answer]
) -> list[Finding]:
    for path, answer in zip(PATHS, listings, strict=True):
        size = learned.block_size_in(answer.body) if answer.is_ok else None
        if size is not None and path in learned.SERVER_INFO:
            return [answers.judge_block_size(about, means.config, worker, size, path)]
    return []


def _told(worker: Worker, listings: list[Answer]) -> Told | None:
    host = address.parse(worker.endpoint).host
    for path, answer in zip(PATHS, listings, strict=True):
        told = answers.told_sources(path, answer.body, host) if answer.is_ok else None
        if told is not None:
            return told
    return None


def _unread(path: str, answer: Answer) -> str:
    if answer.reason:
        return f"{path}: {answer.reason}"
    if answer.status != HTTPStatus.OK:
        return f"{path}: status {answer.status}"
    return f"{path}: an answer of {len(answer.body)} bytes that makes no sense"
