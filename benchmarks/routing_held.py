"""Benchmark of a hold: closed loops of more conversations than the caches have room for.

python benchmarks/routing_held.py [--quick] [--only CELL ...] [--seeds N] [--jobs N] [--keep FILE]
    [--markdown FILE] [--json FILE]

Beside `cost` with and without a hold (`policy.hold`) are Envoy's RING_HASH by session, and the same
with bounded loads.
"""

from collections.abc import Iterator, Mapping, Sequence

from measure import Figure
from routing_clients import CHAT, ENDLESS, FORKING
from routing_closed import chosen
from routing_closed_cells import QUICK_SECONDS, Loop, agents, filled, mixed
from routing_closed_compare import CONTESTANTS, figure
from routing_closed_play import LoopResult
from routing_closed_runs import Job, Runs, add_run_arguments
from routing_compare import DEFAULT, PairedRow
from rows import Run, arguments, run

from extproc.config.sections import HoldSettings
from kvtools.whatif.routers import Contestant

HELD = "held"
FREE = ("ring", "ring150")
HOLDS = {
    HELD: CONTESTANTS[DEFAULT]._replace(name=HELD, hold=HoldSettings(enabled=True)),
    DEFAULT: CONTESTANTS[DEFAULT],
    **{name: CONTESTANTS[name] for name in FREE},
}

LOOPS = (
    *(agents(count) for count in (64, 112, 128, 160, 200)),
    *(filled(FORKING, share) for share in (1.0, 1.3, 2.0)),
    *(filled(CHAT, share) for share in (1.3,)),
    *(mixed(share) for share in (1.0, 1.6, 2.0)),
    *(filled(ENDLESS, share) for share in (0.6, 1.0, 1.3, 2.0)),
    agents(160)._replace(name="160 agents, four routers", routers=4),
)
QUICK_LOOPS = (agents(160, QUICK_SECONDS)._replace(name="160 agents, 2000 s"),)
SMOKE_LOOPS = (agents(8, 120.0, 40.0),)

# Others than those with which the limit's constants were chosen.
SEEDS = tuple(range(11, 21))

METHOD = """\
How: as benchmarks/routing_closed.py. The hold is the router's own code, with its defaults: 120 s at
most, then a tenth of what fits goes on in 120 s and the others are refused; they come again after
5 s, and keep their place. Chats never wait, as if their class were not named. Times to the first
token, and of conversations, include the wait; who still waits at the end has waited until then, and
conversations that have not ended are estimated as Kaplan and Meier do. least_served: turns of the
client that ranks tenth of a hundred from below. Seeds: others than those by which its constants
were chosen.
"""

HEAD = (
    "turns/s (with the first token within 2 s) | TTFT p50 / p90 | a conversation, s | longest wait"
)


def main() -> None:
    """Plays every cell with and without a hold."""
    parser = arguments(__doc__, "one short cell, with two seeds")
    parser.add_argument("--only", nargs="+", metavar="CELL", help="these cells, or parts of names")
    add_run_arguments(parser)
    with run(parser) as one:
        _compare(one)


def _compare(one: Run) -> None:
    wanted = one.options
    seeds = SEEDS[: wanted.seeds or one.amount(2, 2, len(SEEDS))]
    loops = chosen(one.amount(SMOKE_LOOPS, QUICK_LOOPS, LOOPS), wanted.only)
    lines = []
    with Runs(wanted.jobs, wanted.keep) as runs:
        runs.play([Job(loop, each, seed) for seed in seeds for loop in loops for each in _all()])
        for loop in loops:
            found = {name: runs.results(loop, each, seeds) for name, each in HOLDS.items()}
            print("\n".join(_summary(loop, found)), flush=True)
            one.add(_rows(loop, found))
            lines.append(_line(loop, found))
    if wanted.markdown:
        head = "| cell; fill | held | cost | ring_hash | ring_hash 150 |\n|" + " --- |" * 5
        wanted.markdown.write_text("\n".join([head, *lines]) + "\n")
    print(f"\n{METHOD}Seeds: {len(seeds)}, from {seeds[0]}")


def _all() -> Sequence[Contestant]:
    return list(HOLDS.values())


def _rows(loop: Loop, found: Mapping[str, Sequence[LoopResult]]) -> Iterator[PairedRow]:
    ended = all(one.conversation for one in found[DEFAULT])
    spans = ("conversation", "conversation_p90") if ended else ()
    for what in ("turns", "least_served", *spans):
        held, free = (figure(found[name], what) for name in (HELD, DEFAULT))
        yield PairedRow(f"{loop.name}: {what}, held / not", held, free)


def _mean(results: Sequence[LoopResult], what: str) -> float:
    return Figure([getattr(one, what) for one in results]).median


def _summary(loop: Loop, found: Mapping[str, Sequence[LoopResult]]) -> Iterator[str]:
    yield f"\n{loop.name}, fill {loop.fill:.2f}: {HEAD}"
    for name, results in found.items():
        yield f"  {name:<8}{_cell(results)}"


def _line(loop: Loop, found: Mapping[str, Sequence[LoopResult]]) -> str:
    cells = " | ".join(_cell(results) for results in found.values())
    return f"| {loop.name}; {loop.fill:.2f} | {cells} |"


def _cell(results: Sequence[LoopResult]) -> str:
    def of(what: str) -> float:
        return _mean(results, what)

    took = f"{of('conversation'):.0f} s" if of("conversation") else "-"
    return (
        f"{of('turns'):.2f} ({of('prompt_turns'):.2f}), {of('p50'):.2f} / {of('p90'):.1f} s,"
        f" {took}, {max(one.longest_hold for one in results):.0f} s"
    )


if __name__ == "__main__":
    main()
