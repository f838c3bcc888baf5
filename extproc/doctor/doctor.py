"""Puts the doctor together: everything at once, each part bounded in time."""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from extproc.config import Config, Worker
from extproc.config.doubts import doubts
from extproc.discovery.view import Found
from extproc.doctor import (
    envoy_visit,
    feed_visit,
    http_visit,
    sources_visit,
    tls_visit,
    token_visit,
)
from extproc.doctor.feed_places import Telling, judge_swapped
from extproc.doctor.findings import About, Finding
from extproc.doctor.means import Means
from extproc.doctor.web_client import WebClient
from extproc.errors import RequestError, StartError
from extproc.tokenizing.tokens import Tokenizer

T = TypeVar("T")

# Workers that are looked at together.
MAX_WORKERS = 32

# Waits of one part, such as a feed with its probes.
MAX_WAITS = 12


async def examine(config: Config, seconds: float, *, probes: bool) -> list[Finding]:
    """Everything that was found.

    seconds: for each question and each wait; no part takes more than `MAX_WAITS` times as long.
    probes: whether completions are asked for to provoke events, and queues are drained.
    """
    tokenizers, findings = await asyncio.to_thread(_tokenizers, config)
    findings += await asyncio.to_thread(tls_visit.visit, config)
    async with contextlib.AsyncExitStack() as stack:
        web = await stack.enter_async_context(WebClient(seconds))
        means = Means(config, web, tokenizers, seconds, probes)
        fleet, discovered = await sources_visit.visit(config, seconds)
        turns = asyncio.Semaphore(MAX_WORKERS)
        tellings: list[Telling] = []
        found = await asyncio.gather(
            _bounded(
                About(f"envoy {config.envoy.admin}"),
                envoy_visit.visit(means, fleet),
                seconds,
            ),
            *(_in_turn(means, one, turns, tellings) for one in fleet),
        )
    about = About("configuration")
    doubted = (about.note("configuration", doubt) for doubt in doubts(config, os.path.exists))
    looked_at = (finding for part in found for finding in part)
    return [*doubted, *findings, *discovered, *looked_at, *judge_swapped(tellings)]


async def _in_turn(
    means: Means, found: Found, turns: asyncio.Semaphore, tellings: list[Telling]
) -> Sequence[Finding]:
    """Looks at one worker. tellings: gets what it says of its feed."""
    about = About(f"worker {found.worker.endpoint}")
    if found.excluded:
        return [about.note("discovery", f"not looked at: it takes no requests: {found.excluded}")]
    async with turns:
        try:
            return await _worker(means, found.worker, about, tellings)
        except Exception as error:  # noqa: BLE001 - as below
            return [_failed(about, error)]


async def _worker(
    means: Means, worker: Worker, about: About, tellings: list[Telling]
) -> Sequence[Finding]:
    visited = await http_visit.visit(means, worker, about)
    tellings.append(Telling(worker.endpoint, feed_visit.zmq_places(worker), visited.told))
    parts = [feed_visit.visit(means, worker, visited, about)]
    if visited.is_there:
        parts.append(token_visit.visit(means, worker, visited, about))
    found = await asyncio.gather(*(_bounded(about, part, means.seconds) for part in parts))
    return list(dict.fromkeys([*visited.findings, *(one for part in found for one in part)]))


async def _bounded(
    about: About, work: Awaitable[Sequence[Finding]], seconds: float
) -> Sequence[Finding]:
    """What a part finds; a part that takes too long or fails is found faulty itself."""
    limit = MAX_WAITS * seconds
    try:
        async with asyncio.timeout(limit):
            return await work
    except TimeoutError:
        return [about.wrong("not-checked", f"not done within {limit:g} s")]
    except Exception as error:  # noqa: BLE001 - one part must not take the others' findings away
        return [_failed(about, error)]


def _failed(about: About, error: Exception) -> Finding:
    return about.wrong("not-checked", f"the check itself failed: {error!r}")


def _tokenizers(config: Config) -> tuple[dict[str, Tokenizer], list[Finding]]:
    loaded: dict[str, Tokenizer] = {}
    findings: list[Finding] = []
    for model in config.models:
        about = About(f"model {model.name}")
        try:
            tokenizer = Tokenizer.load(model)
        except (StartError, RequestError) as error:
            findings.append(about.wrong("tokenizer-unloadable", str(error)))
            continue
        if tokenizer is not None:
            loaded[model.name] = tokenizer
            findings.append(about.right("tokenizer", f"{model.tokenizer} is loaded"))
        elif model.tokenizer is None:
            says = "none is configured: the model is routed by load"
            findings.append(about.note("tokenizer", says))
    return loaded, findings
