"""How often the verdict on a turn names the right cause, and the right place in the prompt.

    python benchmarks/misses.py [--quick | --smoke] [--json FILE]

Real conversations of Claude Code, Codex and opencode (tests/misses/recorded) are sent through a
real Envoy and router to simulated engines, with one planted cause each: in the prompts, or by what
happens to the worker of the turn before. `GET /misses` tells what the router says of each turn. A
day of generated chats shows that every prompt token has one cause.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import measure  # noqa: F401 - before the packages that it needs
from measure import NO_REFERENCE, Figure, Goal, Row
from rows import arguments, run

from tests.misses.day import Counted, counted, day_of
from tests.misses.judging import Score, table
from tests.misses.playing import Result, play_all, rows_in_order
from tests.misses.plays import Play, plays, plays_of_effort, proving
from tests.misses.stage import SHOWS_EFFORT, staged

METHOD = """\
turns: of which verdicts were judged. cause: the verdict names the right one, or none where there is
none. position: it says at which token and in which part (tool, system, turn, template) the prompt
leaves the one before, or that it does not. kind: it says what changed there. all tokens: each
cause has just the tokens that it has by the prompts, by what engines reported and by what the
simulated caches held. The truth is made without the router: prompts are rendered by the tests' own
code, which equals vLLM's renderer. Three workers; conversations are sent one after the other.
Sums: of a day's chats with restarts, cleared caches, drained workers and evictions, a few at once,
the tokens of all causes, against the prompt tokens that engines reported; the same of those reused.
"""

# Chats of the generated day.
CHATS = (8, 80, 500)
SHARE = Goal(0.95, ">= 0.95", of_ratio=False, at_least=True)
NONE = Goal(0.0, "0", of_ratio=False)


async def judged(count: int, most: int | None) -> Result:
    """Plays so many plays of each cause and client, at most so many in all."""
    with tempfile.TemporaryDirectory(prefix="kvsteer-bench-") as directory:
        folder = Path(directory)
        async with staged(folder / "usual") as stage:
            await stage.prove(_first(list(proving()), most))
            result = await play_all(stage, _first(list(plays(count)), most))
        async with staged(folder / "effort", SHOWS_EFFORT) as stage:
            await stage.prove(_first(list(proving()), most))
            return await play_all(stage, _first(list(plays_of_effort(count)), most), result)


def _first(wanted: Sequence[Play], most: int | None) -> Sequence[Play]:
    return wanted[:most]


def rows_of(result: Result) -> list[Row]:
    """The share of right verdicts of each cause."""
    made = [_row(name, score) for name, score in rows_in_order(result.scores).items()]
    short = Row("verdicts that do not add up", Figure([len(result.short)]), NO_REFERENCE, NONE)
    return [*made, short]


def _row(name: str, score: Score) -> Row:
    return Row(f"right: {name}", Figure([score.right / score.turns]), NO_REFERENCE, SHARE)


def rows_of_day(day: Counted) -> list[Row]:
    """How many tokens of a day have no cause, or a second one."""
    missing = abs(day.prompt_tokens - sum(day.tokens.values()))
    reused = abs(day.cached_tokens - day.tokens["reused"])
    return [
        Row("prompt tokens of a day without just one cause", Figure([missing]), NO_REFERENCE, NONE),
        Row("reused tokens of a day, difference", Figure([reused]), NO_REFERENCE, NONE),
        Row("verdicts of a day that do not add up", Figure([day.short]), NO_REFERENCE, NONE),
    ]


def main() -> None:
    """Judges verdicts, and adds up a day's."""
    with run(arguments(__doc__, "three plays of each cause and client"), METHOD) as one:
        result = asyncio.run(judged(one.amount(1, 3, 8), one.amount(4, None, None)))
        print(table(rows_in_order(result.scores)))
        for score in result.scores.values():
            for line in score.wrong:
                print(line)
        one.add(rows_of(result))
        day = asyncio.run(counted(list(day_of(Random(60), one.amount(*CHATS)))))
        print(f"a day of {day.requests} requests: {dict(day.tokens)}")
        one.add(rows_of_day(day))


if __name__ == "__main__":
    main()
