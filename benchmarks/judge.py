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
from collections.abc import Sequence
from functools import partial

from extproc_contestants import OURS_LEAN, PLAIN
from extproc_parts import free_address
from judge_engines import Engines
from judge_play import WAIT_SECONDS, judged
from judge_recordings import RECORDINGS, Recording, recordings
from judge_routers import contestant, places_at, running_router
from judge_score import HEAD, Score, Verdict
from measure import NO_REFERENCE, Figure, Goal, Row, or_reason
from peers_contestants import ADDRESSES, HASHES, LLM_D, PICKERS, topic, versions
from rows import arguments, run

from kvtools.simulator.settings import Settings

METHOD = """\
kept: of the requests of which the recorded engine had a part cached, those that reached a worker
that held all of that part; busiest: the share of requests that the worker with most of them got
then. found: the same if all other requests are computed by the workers in turn, and those that
reached a wrong worker by a holder, as if another router had sent them: only events tell who holds
what. wrong: reached another worker;
failed: reached none; predicted: of all others, those of which the router foretold just the cached
tokens that the engine reported; all in both plays. Three workers; one request at a time, so that
none is ever busy: no router has a reason to leave the holder. Whatever a worker computed, it holds
as long as the recorded engine did."""

ALL = Goal(1.0, "all", of_ratio=False, at_least=True)
NEARLY_ALL = Goal(0.99, ">= 0.99", of_ratio=False, at_least=True)
CONTESTANTS = (PLAIN, *HASHES, *PICKERS)
# Where the engines are for a router that is started by hand.
GIVEN_PORTS = (9101, 9201, 9301)


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
    def row(what: str, count: int, of: int, goal: Goal = ALL) -> Row:
        share = Figure([count / of]) if of else "nothing to count"
        return Row(f"{what}, {recording}", share, NO_REFERENCE, goal)

    if isinstance(verdict, str):
        return [Row(f"judged, {recording}", verdict, NO_REFERENCE, ALL)]
    kept, found = verdict.kept, verdict.found
    return [
        row("kept", kept.kept, kept.held),
        row("found", found.kept, found.held),
        row("predicted", kept.predicted + found.predicted, kept.told + found.told, NEARLY_ALL),
    ]


def _judged_by(recording: Recording, name: str, last: int | None) -> Verdict:
    play = partial(_score_of, recording, name, last)
    return Verdict(play(finds=False), play(finds=True))


def _score_of(recording: Recording, name: str, last: int | None, *, finds: bool) -> Score:
    api, events, replay = (int(free_address().rpartition(":")[2]) for _ in range(3))
    places = places_at(ADDRESSES, (api, events, replay))
    engines = Engines(recording, places, partial(topic, names=[name]), shares=not finds)
    start = contestant(name, places, recording.block_size)
    return asyncio.run(judged(recording, engines, start, last, finds=finds))


def judge_given(options: argparse.Namespace, last: int | None) -> None:
    """Judges the router that the options name."""
    recording = next(one for one in recordings() if one.name == options.recording)
    places = places_at(ADDRESSES, GIVEN_PORTS)
    names = [LLM_D] if options.settings == "llm-d" else []
    print(f"{recording.name}, blocks of {recording.block_size} tokens, model {Settings().model}:")
    for place in places:
        print(f"  http://{place.api}  events {place.events}  replay {place.replay}")
    start = running_router(options, places, recording.block_size)

    def play(*, finds: bool) -> Score:
        print(f"waiting for the router ({WAIT_SECONDS:.0f} s)", flush=True)
        engines = Engines(recording, places, partial(topic, names=names), shares=not finds)
        return asyncio.run(judged(recording, engines, start, last, finds=finds))

    verdict = Verdict(play(finds=False), play(finds=True))
    print(f"{HEAD}\n{verdict}")


def main() -> None:
    """Judges what the options name."""
    parser = arguments(__doc__, "the first forty requests of each recording")
    router = parser.add_mutually_exclusive_group()
    router.add_argument("--router", metavar="URL", help="judge the router at this URL")
    router.add_argument("--ext-proc", metavar="HOST:PORT", help="judge the router that Envoy asks")
    router.add_argument(
        "--contestant",
        choices=CONTESTANTS,
        action="append",
        metavar="NAME",
        help=f"judge only this one; may be repeated: {'; '.join(CONTESTANTS)}".replace("%", "%%"),
    )
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
        one.add(judge_all(one.options.contestant or CONTESTANTS, last))


if __name__ == "__main__":
    main()
