"""Compares KVSteer with pickers and gateways that could be used instead.

    python benchmarks/peers.py [--quick] [--only PART] [--json FILE]

None of them is a dependency of KVSteer. Install what you want to compare, each as its project says:
SMG with `pip install smg`, vLLM Router with `pip install vllm-router`, each in an environment of
its own with its program in PATH; Dynamo with `pip install ai-dynamo packaging uvloop`, and
KVSTEER_DYNAMO_PYTHON=PATH if that is in another environment; the programs `epp` (llm-d-router,
release 0.10), `lwepp` (gateway-api-inference-extension, release 1.6) and `aibrix-plugins` (AIBrix's
cmd/plugins, release 0.6; needs redis-server) in PATH. A program built from a working copy does not
know its version: set KVSTEER_PEERS_VERSION_EPP=... Missing programs are named in the output.

speed: wrk's chats of known conversations (extproc.py says how), contestants in turn. hits: chats
over simulated vLLM workers whose caches are too small for every chat everywhere; fresh workers and
a fresh contestant each time. losses: requests while the picker is killed, and while it hangs.
kinds: six ways to ask, as peers_kinds.py says. renderers: vLLM's in Rust beside that in Python.
agents: real coding agents, as peers_agents.py says.
"""

import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from extproc_contestants import LEAN_IDLE, OURS_LEAN, PLAIN, Contestant
from extproc_load import conversations, found_wrk, write
from extproc_rounds import Cell, Figures, Measured, measured
from measure import CannotRunError, Figure, Goal, Row, missed
from peers_agents import stays
from peers_contestants import AIBRIX, DYNAMO, LLM_D, PEERS, PICKERS, PeersArena, versions
from peers_kinds import kept_turns
from peers_renderers import renderers
from peers_trials import Hits, hits, losses, resident_mib
from rows import arguments, run

PARTS = ("speed", "hits", "losses", "kinds", "renderers", "agents")
CELLS = [Cell(size, connections) for size in (2, 32, 128) for connections in (1, 16)]
QUICK = [Cell(2, 1), Cell(2, 16)]
LEARNS_SECONDS, SETTLED_SECONDS = 2.0, 10.0
FIFTH = Goal(1 / 5, "<= 1/5 of theirs")
HALF = Goal(1 / 2, "<= 1/2 of theirs")

# A round with fewer answers per connection than this says little about one request.
ENOUGH = 4

METHOD = """\
How: two shared cores, everything on them; medians of rounds in which contestants take turns.
added: p50 or p99 less that of Envoy alone in the same round. picker us: CPU a request of the
process that decides (all threads; for SMG and Dynamo of the proxy that they are). + tokens us: with
the process that tokenizes for llm-d's picker; KVSteer and Dynamo do that themselves, the others not
at all. all us: Envoy's too. few: so few requests were answered in a round that what was under way
at its end weighs too much; no goal is looked at. "lean, idle" answers each message at once and
picks nothing: no picker on KVSteer's server reaches more requests/s. Three workers; no events come
while it is measured. llm-d's: TLS, tracing and access logs off, else as its chart has it. Dynamo
answers from its own simulated engines and not from the upstreams that the others share; its
requests/s and latencies include them."""


def speed(cells: Sequence[Cell], rounds: int, seconds: int) -> tuple[list[Row], str]:
    """Returns rows with goals, and all results."""
    wrk = found_wrk()
    with tempfile.TemporaryDirectory(prefix="kvsteer-bench-") as name, ExitStack() as stack:
        directory = Path(name)
        bodies = directory / "bodies"
        bodies.mkdir()
        names = [PLAIN, LEAN_IDLE, *PICKERS]
        arena = PeersArena(stack, directory, names)
        known = []
        for size in sorted({cell.size for cell in cells}):
            requests = conversations(size)
            write(requests, bodies / str(size))
            arena.learn(requests)
            time.sleep(LEARNS_SECONDS)
            known.append(_picked(arena, requests, size))
        figures = measured(arena, wrk, bodies, cells, rounds, seconds, settled)
        sizes = [
            f"{who}: {resident_mib(one.decides.pid):.0f} MiB"
            for who, one in arena.contestants.items()
            if one.decides is not None
        ]
        told = [_overview(figures, cells, list(arena.contestants))]
        told += [f"{who}: {reason}" for who, reason in arena.missing.items()]
        told += ["known conversations sent to their holder (1/3 is chance):", *known]
        told += ["resident after it: " + ", ".join(sizes)]
    return _goals(figures, cells), "\n".join(told)


def _picked(arena: PeersArena, requests: Sequence[dict[str, object]], size: int) -> str:
    found = [
        f"{who} {arena.holders(requests, one.url):.0%}"
        for who, one in arena.contestants.items()
        if who != DYNAMO
    ]
    return f"  {size} KB: {', '.join(found)}"


def _overview(figures: Measured, cells: Sequence[Cell], names: Sequence[str]) -> str:
    head = f"{'cell':<13}{'who':<19}{'req/s':>7}{'p50 added ms':>14}{'p99 added ms':>14}"
    lines = [f"{head}{'picker us':>11}{'+ tokens us':>13}{'all us':>9}"]
    for cell in cells:
        plain = figures[cell, PLAIN].samples
        for name in names:
            found = figures[cell, name]
            pairs = list(zip(found.samples, plain, strict=True))
            failed = sum(one.errors for one in found.samples)
            lines.append(
                f"{cell!s:<13}{name:<19}"
                f"{found.of(lambda one: one.per_second).median:>7,.0f}"
                f"{statistics.median(one.p50 - other.p50 for one, other in pairs):>14.2f}"
                f"{statistics.median(one.p99 - other.p99 for one, other in pairs):>14.2f}"
                f"{statistics.median(found.cpu):>11,.0f}{statistics.median(found.helped):>13,.0f}"
                f"{statistics.median(found.both):>9,.0f}"
                + ("" if _enough(found, cell) else "  few")
                + (f"  {failed} failed" if failed else "")
            )
    return "\n".join(lines)


def _enough(found: Figures, cell: Cell) -> bool:
    return found.of(lambda one: one.requests).median >= ENOUGH * cell.connections


def _goals(figures: Measured, cells: Sequence[Cell]) -> list[Row]:
    rows = []
    for cell in cells:
        ours, plain = figures[cell, OURS_LEAN], figures[cell, PLAIN]
        for name in (LLM_D, AIBRIX):
            theirs = figures.get((cell, name))
            if theirs is None or not _enough(theirs, cell):
                why = "did not run" if theirs is None else "too few requests"
                rows.append(Row(f"{name}: picker us, {cell}", Figure(ours.cpu), why))
                continue
            kinds = {"picker us": theirs.cpu}
            kinds |= {"+ tokens us": theirs.helped} if name == LLM_D else {}
            for what, cpu in kinds.items():
                rows.append(Row(f"{name}: {what}, {cell}", Figure(ours.cpu), Figure(cpu), FIFTH))
            added = [
                Figure([a.p50 - b.p50 for a, b in zip(one.samples, plain.samples, strict=True)])
                for one in (ours, theirs)
            ]
            rows.append(Row(f"{name}: p50 added ms, {cell}", added[0], added[1], HALF))
    return rows


def settled(contestant: Contestant) -> None:
    """Waits until a contestant is idle, so that the next one has the machine to itself."""
    working = [one for one in (contestant.decides, contestant.helps) if one is not None]
    deadline = time.monotonic() + SETTLED_SECONDS
    while working and time.monotonic() < deadline:
        before = sum(one.cpu_seconds() for one in working)
        time.sleep(0.2)
        if sum(one.cpu_seconds() for one in working) - before < 0.02:
            return


def hit_shares(rounds: int, seconds: int) -> str:
    """Returns a table of hit shares of prompt tokens; the contestants take turns."""
    found: dict[str, list[Hits]] = {}
    missing: dict[str, str] = {}
    for turn in range(rounds):
        for name in PEERS[turn % len(PEERS) :] + PEERS[: turn % len(PEERS)]:
            try:
                found.setdefault(name, []).append(hits(name, seconds))
            except CannotRunError as error:
                missing[name] = missed(error)
    lines = [f"{'who':<19}{'cached':>8}{'(least-most)':>14}{'first byte p50 s':>18}{'p90 s':>8}"]
    for name in PEERS:
        if not (all_of := found.get(name)):
            lines.append(f"{name:<19}{missing[name]}")
            continue
        cached = [one.cached for one in all_of]
        failed = sum(one.failed for one in all_of)
        lines.append(
            f"{name:<19}{statistics.median(cached):>8.0%}{min(cached):>9.0%}-{max(cached):.0%}"
            f"{statistics.median(one.p50 for one in all_of):>18.3f}"
            f"{statistics.median(one.p90 for one in all_of):>8.3f}"
            + (f"  {failed} failed" if failed else "")
        )
    return "\n".join(lines)


def lost_requests() -> str:
    """Returns a table of requests lost while a picker is killed, and while it hangs."""
    lines = []
    for what, number in (("killed", signal.SIGKILL), ("hung", signal.SIGSTOP)):
        for name in PICKERS:
            try:
                lines.append(f"{what:<8}{name:<19}{losses(name, number)}")
            except CannotRunError as error:
                lines.append(f"{what:<8}{name:<19}{error}")
    return "\n".join(lines)


def main() -> None:
    """Runs the chosen measurements and prints them."""
    parser = arguments(__doc__, "two cells, fewer rounds")
    parser.add_argument("--only", choices=PARTS, help="one part of them")
    with run(parser, METHOD) as one:
        parts = [one.options.only] if one.options.only else [*PARTS]
        print(versions())
        if "speed" in parts:
            rows, seen = speed(*one.amount((QUICK[:1], 1, 1), (QUICK, 2, 1), (CELLS, 3, 2)))
            one.add(rows)
            print(f"\n{seen}", flush=True)
        if "hits" in parts:
            print(f"\n{hit_shares(*one.amount((1, 2), (1, 6), (2, 12)))}", flush=True)
        if "kinds" in parts:
            print(f"\n{kept_turns(one.amount(2, 8, 24))}", flush=True)
        if "renderers" in parts:
            one.add(renderers(one.amount(1, 3, 6)))
        if "agents" in parts:
            one.add(stays(one.amount(1, 4, 8)))
        if "losses" in parts:
            print(f"\n{lost_requests()}", flush=True)


if __name__ == "__main__":
    main()
