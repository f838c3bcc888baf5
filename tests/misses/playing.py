"""Plays many plays on a stage, and adds up how right the verdicts on them are."""

from collections.abc import Iterable
from typing import NamedTuple

from tests.misses.judging import Score
from tests.misses.plays import BY_ITSELF, NOTHING, Play
from tests.misses.stage import Played, Stage

# The rows of turns into which nothing was planted.
AROUND = "turns around, none planted"


class Result(NamedTuple):
    """scores: by what was planted. verdicts: all. short: those whose tokens do not add up."""

    scores: dict[str, Score]
    verdicts: int
    short: list[str]


async def play_all(stage: Stage, plays: Iterable[Play], into: Result | None = None) -> Result:
    """Plays all; returns the result, added to another one."""
    scores, verdicts, short = into or Result({}, 0, [])
    for play in plays:
        for played in await stage.play(play):
            verdicts += 1
            if not played.adds_up:
                short.append(f"{play.name}: {dict(played.verdict)}")
            if played.judged is not None:
                score = scores.setdefault(_row(play, played), Score())
                score.add(played.judged, f"{play.name}, request {played.number}")
    return Result(scores, verdicts, short)


def _row(play: Play, played: Played) -> str:
    """The name of the row to which a verdict belongs; a clock goes on after its first turn."""
    assert played.truth is not None
    is_planted = played.number == play.at or (played.number > play.at and played.truth.is_changed)
    return play.cause if is_planted else AROUND


def rows_in_order(scores: dict[str, Score]) -> dict[str, Score]:
    """Returns the rows in the table's order: those of no cause last."""
    last = [name for name in (BY_ITSELF, NOTHING, AROUND) if name in scores]
    first = sorted(name for name in scores if name not in last)
    return {name: scores[name] for name in (*first, *last)}
