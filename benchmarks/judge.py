"""Judges any router by what real engines did: predicted, kept, wrong.

    python benchmarks/judge.py [--quick] [--contestant NAME]
    python benchmarks/judge.py --router http://127.0.0.1:10000 [--admin http://127.0.0.1:9090]
    python benchmarks/judge.py --ext-proc 127.0.0.1:9002 [--settings llm-d]

Three engines replay what vLLM and SGLang did when they were recorded (docs/internals/judge.md):
they answer the recorded requests with the recorded cached tokens, and publish the recorded events
over ZMQ, with replay. The requests go one after the other through the router that is judged: all
contestants of peers.py that are installed here; with --router, any that proxies HTTP; with
--ext-proc, any that answers Envoy, behind an Envoy that is started here. The last two are yours to
start: the judge prints where the engines are, and waits for the router.
"""

import argparse
import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from http import HTTPStatus
from pathlib import Path

import measure  # noqa: F401 - before the packages that it needs
from aiohttp import ClientError, ClientSession
from extproc_contestants import OURS_LEAN, PLAIN, Contestant
from extproc_parts import Fleet, free_address
from judge_claims import Claims, Explained, Logged, Silent
from judge_engines import Engines, Place
from judge_recordings import RECORDINGS, Recorded, Recording, recordings
from judge_score import HEAD, Score, Verdict
from measure import NO_REFERENCE, CannotRunError, Figure, Goal, Row, or_reason
from peers_contestants import (
    ADDRESSES,
    HASHES,
    LLM_D,
    PICKERS,
    VLLM_ROUTER,
    PeersArena,
    topic,
    versions,
)
from peers_settings import SESSION, as_llm_d_has_it
from rows import arguments, run

from kvtools.simulator.settings import Settings

METHOD = """\
kept: of the requests of which the recorded engine had a part cached, those that reached a worker
that held all of that part; busiest: the share of requests that the worker with most of them got
then. found: the same if all other requests are computed by the workers in turn, as if another
router had sent them, so that only events tell who holds what. wrong: reached another worker;
failed: reached none; predicted: of all others, those of which the router foretold just the cached
tokens that the engine reported; all in both plays. Three workers; one request at a time, so that
none is ever busy: no router has a reason to leave the holder. Whatever a worker computed, it holds
as long as the recorded engine did."""

ALL = Goal(1.0, "all", of_ratio=False, at_least=True)
CONTESTANTS = (PLAIN, *HASHES, *PICKERS)
WAIT_SECONDS = 120.0
SETTLED_SECONDS = 0.2
# Where the engines are for a router that is started by hand.
GIVEN_PORTS = (9101, 9201, 9301)
PROBE = {
    "model": Settings().model,
    "max_tokens": 1,
    "messages": [{"role": "user", "content": "Is anybody there?"}],
}

Foretelling = Callable[[ClientSession], Claims]
Start = Callable[[ExitStack, Path], tuple[str, Foretelling]]
"""Starts a router; returns its URL, and what makes its claims."""


class JudgedArena(PeersArena):
    """Contestants in front of engines that the judge runs."""

    def __init__(
        self, stack: ExitStack, directory: Path, name: str, fleet: Fleet, size: int
    ) -> None:
        self._given = fleet
        super().__init__(stack, directory, [name], block_size=size, vllm_router_log="debug")

    def _started_fleet(self) -> Fleet:
        published, replayed = self._given.events[0]
        ports = (self._given.endpoints[0], published, replayed, published)
        self._ports = [one.rpartition(":")[2] for one in ports]
        return self._given

    def answering(self, decides: str, *, like_llm_d: bool) -> Contestant:
        """Starts an Envoy that asks the router at this address."""
        configuration = self._fleet.configuration()
        configuration["extproc"]["listen"] = decides
        change = as_llm_d_has_it if like_llm_d else str
        return self._with_envoy("given", None, configuration, change)


async def judged(
    recording: Recording, engines: Engines, start: Start, last: int | None, *, finds: bool
) -> Score:
    """Starts engines and a router, plays a recording, and returns the score.

    last: the number of requests, None for all. finds: whether unheld requests go to the workers in
    turn, and not through the router.
    """
    with tempfile.TemporaryDirectory(prefix="kvsteer-bench-") as directory, ExitStack() as stack:
        async with engines.running(), ClientSession() as session:
            url, foretelling = await asyncio.to_thread(start, stack, Path(directory))
            try:
                await _answers(session, url)
                play = Play(session, url, engines, foretelling(session), finds=finds)
                for request in recording.requests[:last]:
                    await play.send(request)
                return play.score
            finally:
                await asyncio.to_thread(stack.close)


async def _answers(session: ClientSession, url: str) -> None:
    """Waits until a router passes requests on."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(ClientError, TimeoutError):
            async with session.post(f"{url}/v1/chat/completions", json=PROBE) as answer:
                if answer.status == HTTPStatus.OK:
                    return
        await asyncio.sleep(0.5)
    raise CannotRunError(f"no request was answered through {url}")


class Play:
    """One play of a recording through a router, request by request."""

    def __init__(
        self, session: ClientSession, url: str, engines: Engines, claims: Claims, *, finds: bool
    ) -> None:
        self.score = Score()
        self._session = session
        self._url = url
        self._engines = engines
        self._claims = claims
        self._finds = finds
        self._turns = itertools.cycle(range(len(engines.places)))

    async def send(self, request: Recorded) -> None:
        """Sends one request, and counts what became of it."""
        engines = self._engines
        engines.expect(request)
        if self._finds and not request.cached:
            engines.arrive(next(self._turns))
            return
        await asyncio.sleep(SETTLED_SECONDS)  # no router tells when it has read an event
        headers = {SESSION: f"session-{request.session}"}
        await self._claims.ask(request, headers)
        with contextlib.suppress(ClientError, TimeoutError):
            url = f"{self._url}{request.path}"
            async with self._session.post(url, json=request.body, headers=headers) as answer:
                await answer.read()
        arrival = engines.arrival
        if arrival is None:
            self.score.note(request, None, None)
            engines.arrive(next(self._turns))  # what follows is as recorded
            return
        self.score.note(request, arrival, self._claims.of(engines.places[arrival.worker].api))


def places_at(addresses: Sequence[str], ports: tuple[int, int, int]) -> list[Place]:
    """Returns an engine's places for each IP address."""
    api, events, replay = ports
    return [
        Place(f"{ip}:{api}", f"tcp://{ip}:{events}", f"tcp://{ip}:{replay}") for ip in addresses
    ]


def contestant(name: str, places: Sequence[Place], size: int) -> Start:
    """Returns what starts one of CONTESTANTS."""
    fleet = _fleet(places)

    def start(stack: ExitStack, directory: Path) -> tuple[str, Foretelling]:
        arena = JudgedArena(stack, directory, name, fleet, size)
        if name in arena.missing:
            raise CannotRunError(arena.missing[name])
        one = arena.contestants[name]
        if name == VLLM_ROUTER:
            return one.url, lambda _: Logged(directory / "vllm-router.log")
        return one.url, _foretelling(one.admin)

    return start


def given(options: argparse.Namespace, places: Sequence[Place], size: int) -> Start:
    """Returns what starts nothing, or an Envoy, for a router that runs already."""

    def start(stack: ExitStack, directory: Path) -> tuple[str, Foretelling]:
        if options.router:
            return options.router.rstrip("/"), _foretelling(options.admin)
        arena = JudgedArena(stack, directory, "", _fleet(places), size)
        like_llm_d = options.settings == "llm-d"
        url = arena.answering(options.ext_proc, like_llm_d=like_llm_d).url
        return url, _foretelling(options.admin)

    return start


def _foretelling(admin: str | None) -> Foretelling:
    return lambda session: Explained(session, admin) if admin else Silent()


def _fleet(places: Sequence[Place]) -> Fleet:
    endpoints = [one.api for one in places]
    return Fleet(endpoints, endpoints, [(one.events, one.replay) for one in places])


def judge_all(names: Sequence[str], last: int | None) -> list[Row]:
    """Judges contestants by every recording, and prints their scores; returns rows of ours."""
    rows = []
    for recording in recordings():
        print(f"\n{recording.name}\n{'':<19}{HEAD}", flush=True)
        for name in names:
            verdict = or_reason(partial(_judged_by, recording, name, last))
            print(f"{name:<19}{verdict}", flush=True)
            if name == OURS_LEAN:
                rows += _rows(recording.name, verdict)
    return rows


def _rows(recording: str, verdict: Verdict | str) -> list[Row]:
    def row(what: str, count: int, of: int) -> Row:
        share = Figure([count / of]) if of else "nothing to count"
        return Row(f"{what}, {recording}", share, NO_REFERENCE, ALL)

    if isinstance(verdict, str):
        return [Row(f"judged, {recording}", verdict, NO_REFERENCE, ALL)]
    kept, found = verdict.kept, verdict.found
    return [
        row("kept", kept.kept, kept.held),
        row("found", found.kept, found.held),
        row("predicted", kept.predicted + found.predicted, kept.told + found.told),
    ]


def _judged_by(recording: Recording, name: str, last: int | None) -> Verdict:
    def play(*, finds: bool) -> Score:
        api, events, replay = (int(free_address().rpartition(":")[2]) for _ in range(3))
        places = places_at(ADDRESSES, (api, events, replay))
        engines = Engines(recording, places, partial(topic, names=[name]))
        start = contestant(name, places, recording.block_size)
        return asyncio.run(judged(recording, engines, start, last, finds=finds))

    return Verdict(play(finds=False), play(finds=True))


def judge_given(options: argparse.Namespace, last: int | None) -> None:
    """Judges the router that the options name."""
    recording = next(one for one in recordings() if one.name == options.recording)
    places = places_at(ADDRESSES, GIVEN_PORTS)
    names = [LLM_D] if options.settings == "llm-d" else []
    print(f"{recording.name}, blocks of {recording.block_size} tokens, model {Settings().model}:")
    for place in places:
        print(f"  http://{place.api}  events {place.events}  replay {place.replay}")
    start = given(options, places, recording.block_size)

    def play(*, finds: bool) -> Score:
        print(f"waiting for the router ({WAIT_SECONDS:.0f} s)", flush=True)
        engines = Engines(recording, places, partial(topic, names=names))
        return asyncio.run(judged(recording, engines, start, last, finds=finds))

    verdict = Verdict(play(finds=False), play(finds=True))
    print(f"{HEAD}\n{verdict}")


def main() -> None:
    """Judges what the options name."""
    parser = arguments(__doc__, "the first forty requests of each recording")
    router = parser.add_mutually_exclusive_group()
    router.add_argument("--router", metavar="URL", help="judge the router at this URL")
    router.add_argument("--ext-proc", metavar="HOST:PORT", help="judge the router that Envoy asks")
    router.add_argument("--contestant", choices=CONTESTANTS, help="judge only this one")
    parser.add_argument("--admin", metavar="URL", help="KVSteer's, to ask what it foretells")
    parser.add_argument(
        "--settings", choices=("kvsteer", "llm-d"), default="kvsteer", help="Envoy's for --ext-proc"
    )
    parser.add_argument(
        "--recording",
        choices=[name.partition(".jsonl")[0] for name in RECORDINGS],
        default="vllm_0.32.0_cached_tokens",
        help="for --router and --ext-proc",
    )
    with run(parser, METHOD) as one:
        last = one.amount(12, 40, None)
        if one.options.router or one.options.ext_proc:
            judge_given(one.options, last)
            return
        print(versions())
        only = one.options.contestant
        one.add(judge_all([only] if only else CONTESTANTS, last))


if __name__ == "__main__":
    main()
