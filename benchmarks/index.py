"""Benchmark of the index: lookup, pick, events and memory, compared with Dynamo if installed.

python benchmarks/index.py [--quick | --smoke] [--json FILE]
"""

import importlib.metadata
from collections.abc import Callable, Mapping

import peer_dynamo
from events_side import events
from measure import Row, Scale
from memory import memory
from requests_side import lookup, pick
from rows import arguments, run
from workload import PROMPTS

SECTIONS: Mapping[str, Callable[[Scale], list[Row]]] = {
    "lookup": lookup,
    "pick": pick,
    "events": events,
    "memory": memory,
}

METHOD = """\
How: medians (least-most) of rounds, contestants in turn within a round, after one that does not
count; garbage collector off. A cost is the CPU time of all threads, or elapsed time where that is
less. The ratio is ours / reference, round by round. Overlaps, picks and what events leave behind
were compared with the reference where it ran.
Lookup: RadixTree, compute_block_hash_for_seq, find_matches and scores, from a list of tokens.
Pick: SelectionService, select with a list of tokens, or with their hashes where that is cheaper.
Events: ours from bytes in memory to applied, one thread; SelectionService over ZMQ until visible,
on as many threads as it likes. "Over ZMQ too": ours behind bare sockets, all threads.
Memory: growth of the resident set, each measurement in a process of its own.
"""

FULL = Scale(rounds=25, passes=5, event_rounds=9, fleets=(8, 64, 128), memory_fleets=(8, 64))
SMOKE = Scale(1, 1, event_rounds=1, fleets=(8,), memory_fleets=(8,), memory_blocks=20_000)
QUICK = Scale(rounds=7, passes=3, event_rounds=3, fleets=(8, 64), memory_fleets=(8,))


def main() -> None:
    """Runs all sections, or one of them."""
    parser = arguments("Benchmark of the index.", "less of all, within two minutes")
    parser.add_argument("--only", choices=SECTIONS, help="one section only")
    with run(parser, METHOD) as one:
        scale = one.amount(SMOKE, QUICK, FULL)
        for name, section in SECTIONS.items():
            if one.options.only in (None, name):
                print(f"measuring: {name}", flush=True)
                one.add(section(scale))
        print(f"\n{_how(scale)}")


def _how(scale: Scale) -> str:
    """Describes how much was measured, and with which packages."""
    packages = [f"{name} {_version(name)}" for name in ("msgspec", "pyzmq", "xxhash")]
    rounds = f"{scale.rounds} of {scale.passes} passes over {PROMPTS} prompts"
    return (
        f"Rounds: {rounds}, {scale.event_rounds} of events. "
        f"Memory: {scale.memory_blocks:,} worker-blocks. "
        f"{', '.join([*packages, peer_dynamo.version()])}"
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


if __name__ == "__main__":
    main()
