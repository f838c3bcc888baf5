"""Verdicts on real clients' conversations with planted causes, through a real router and Envoy."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from tests.misses.day import counted, day_of
from tests.misses.judging import table
from tests.misses.playing import AROUND, Result, play_all, rows_in_order
from tests.misses.plays import (
    BY_ITSELF,
    MARKS,
    NOTHING,
    UNSEEN,
    Play,
    plays,
    plays_of_effort,
    proving,
)
from tests.misses.recordings import CLIENTS
from tests.misses.stage import SHOWS_EFFORT, staged

# Of each cause and client in the whole judgement: three clients make more than twenty.
PLAYS = 8

# Of the generated day.
CHATS = 500

NO_CAUSE = (MARKS, NOTHING, UNSEEN, AROUND)


def check(result: Result, least: int) -> None:
    """Checks that enough verdicts of each row are right, and that all add up."""
    scores = rows_in_order(result.scores)
    shown = table(scores)
    print(shown)
    wrong = [line for score in scores.values() for line in score.wrong]
    assert result.short == []
    assert [name for name, one in scores.items() if not one.is_enough] == [], "\n".join(
        [shown, *wrong]
    )
    few = [name for name, one in scores.items() if one.turns < least and name != BY_ITSELF]
    assert few == [], shown
    named = [line for name in NO_CAUSE for line in scores[name].wrong if name in scores]
    assert named == [], "\n".join(named)


def one_of_each(wanted: Sequence[Play]) -> list[Play]:
    """One play of each cause, of one client after the other."""
    clients = itertools.cycle(CLIENTS)
    found = []
    for cause in sorted({one.cause for one in wanted}):
        own = [one for one in wanted if one.cause == cause]
        client = next(clients)
        found.append(next((one for one in own if client in one.name), own[0]))
    return found


@pytest.mark.slow
async def test_verdicts_name_a_few_planted_causes_and_their_places(tmp_path: Path) -> None:
    async with staged(tmp_path / "model") as stage:
        result = await play_all(stage, one_of_each(list(plays(1))))
    assert result.short == []
    wrong = [line for score in result.scores.values() for line in score.wrong]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.timeout(1_800)
async def test_verdicts_name_nineteen_of_twenty_planted_causes_and_their_places(
    tmp_path: Path,
) -> None:
    async with staged(tmp_path / "model") as stage:
        await stage.prove(list(proving()))
        result = await play_all(stage, plays(PLAYS))
    async with staged(tmp_path / "other", SHOWS_EFFORT) as stage:
        await stage.prove(list(proving()))
        result = await play_all(stage, plays_of_effort(PLAYS), result)
    check(result, least=20)


@pytest.mark.slow
async def test_every_prompt_token_of_a_day_has_one_cause() -> None:
    day = await counted(list(day_of(Random(60), CHATS)))
    assert day.verdicts == day.requests > 2_000
    assert day.short == 0
    assert sum(day.tokens.values()) == day.prompt_tokens
    assert day.tokens["reused"] == day.cached_tokens
    assert {"evicted", "elsewhere", "changed", "restarted", "cleared"} <= day.tokens.keys()
