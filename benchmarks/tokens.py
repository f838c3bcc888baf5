"""Benchmark of tokens: text to ids and body to pick, compared with tokenizer libraries.

python benchmarks/tokens.py [--quick] [--json FILE]
"""

import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from measure import CannotRunError, Goal, Row, arguments, keep, table
from peer_tokenizers import version
from tekken import write_model
from tokens_side import FIRST_SIGHT_GOAL, NEXT_TURN_GOAL, first_sight, known, texts

SECTIONS: Mapping[str, Callable[[Path, int], list[Row]]] = {
    "texts": texts,
    "first_sight": first_sight,
    "known": known,
}

# The rows with a goal, by section, for when nothing can run.
GOALS: Mapping[str, tuple[str, Goal]] = {
    "first_sight": ("first sight, body to pick", FIRST_SIGHT_GOAL),
    "known": ("next turn, body to pick", NEXT_TURN_GOAL),
}

METHOD = """\
How: medians (least-most) of rounds, contestants in turn within a round, after one that does not
count; garbage collector off. A cost is the CPU time of all threads, or elapsed time where that is
less. The ratio is ours / reference, round by round. One vocabulary of 130k tokens; all contestants
gave the same ids for 20 texts before. Texts and first sights are new in every round, made of
the same words; a contestant takes one more before the clock starts, as a router at work does.
Body to pick: JSON, chat template, ids, overlap with 8 workers, decision. The reference gets the
prompt text. A next turn adds an answer of 2,400 characters and a question of 400.
"ours" uses fastokens, "ours on tokenizers" does not.
"""

FULL_ROUNDS, QUICK_ROUNDS = 25, 7


def main() -> None:
    """Runs all sections, or one of them."""
    parser = arguments("Benchmark of tokens.", "fewer rounds, within two minutes")
    parser.add_argument("--only", choices=SECTIONS, help="one section only")
    wanted = parser.parse_args()
    rounds = QUICK_ROUNDS if wanted.quick else FULL_ROUNDS
    started = time.monotonic()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        missing = _missing(Path(directory))
        for name, section in SECTIONS.items():
            if wanted.only in (None, name):
                print(f"measuring: {name}", flush=True)
                rows += _cannot(name, missing) if missing else section(Path(directory), rounds)
    print(f"\n{table(rows)}\n\n{_how(rounds)}\ntook {time.monotonic() - started:.0f} s")
    keep(rows, wanted.json)


def _missing(directory: Path) -> str:
    """Writes the model to measure with; returns why that is not possible, "" if it is."""
    try:
        write_model(directory)
    except CannotRunError as error:
        return str(error)
    return ""


def _cannot(section: str, reason: str) -> list[Row]:
    what, goal = GOALS.get(section, (section, None))
    return [Row(what, reason, reason, goal)]


def _how(rounds: int) -> str:
    """Describes how the table was made."""
    packages = ("tokenizers", "tiktoken", "fastokens", "msgspec", "jinja2", "xxhash")
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    machine = f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores"
    return f"{METHOD}Rounds: {rounds}. {machine}, load {load}; " + ", ".join(map(version, packages))


if __name__ == "__main__":
    main()
