"""Asks the sources of workers once each."""

import asyncio
from collections.abc import Sequence

from extproc.config import Config
from extproc.discovery.configured import sources_of
from extproc.discovery.sources import Report, Source
from extproc.discovery.view import STATIC, Found, View, listed, merged
from extproc.doctor.findings import About, Finding
from extproc.errors import StartError


async def visit(config: Config, seconds: float) -> tuple[list[Found], list[Finding]]:
    """All workers, those of the configuration and those found; and what is wrong with sources."""
    try:
        sources = sources_of(config)
    except StartError as error:
        return list(listed(config.workers)), [_about("").wrong("discovery-fault", str(error))]
    answers = await asyncio.gather(*(_ask(one, seconds) for one in sources))
    views: dict[str, View] = {STATIC: listed(config.workers)}
    findings: list[Finding] = []
    for source, (view, finding) in zip(sources, answers, strict=True):
        views[source.name] = view
        findings += finding
    fleet = [member.found for member in merged(views).values()]
    if not fleet and not any(one.code == "no-workers" for one in findings):
        findings.append(_about("").wrong("no-workers", "there is no worker at all"))
    return fleet, findings


async def _ask(source: Source, seconds: float) -> tuple[View, list[Finding]]:
    """The first view of a source."""
    about = _about(source.name)
    seen: list[tuple[View, str]] = []
    faults: list[str] = []
    answered = asyncio.Event()

    def take(view: View, note: str, fault: str = "") -> None:
        seen.append((view, fault or note))
        answered.set()

    def fail(fault: str) -> None:
        faults.append(fault)
        answered.set()

    running = asyncio.create_task(source.run(Report(take, lambda: None, fail)))
    waiting = asyncio.create_task(answered.wait())
    await asyncio.wait((running, waiting), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    running.cancel()
    waiting.cancel()
    ended, _ = await asyncio.gather(running, waiting, return_exceptions=True)
    if isinstance(ended, Exception):
        faults.append(f"ended with {type(ended).__name__}")
    return _judged(about, seen, faults or [f"no answer within {seconds:g} s"])


def _judged(
    about: About, seen: Sequence[tuple[View, str]], faults: Sequence[str]
) -> tuple[View, list[Finding]]:
    if not seen:
        return (), [about.wrong("discovery-fault", faults[0])]
    view, note = seen[-1]
    if note:
        return view, [about.wrong("discovery-fault", note)]
    if not view:
        return view, [about.wrong("no-workers", "it names no worker")]
    names = "1 worker" if len(view) == 1 else f"{len(view)} workers"
    return view, [about.right("discovery", f"names {names}")]


def _about(name: str) -> About:
    return About(f"discovery {name}".strip())
