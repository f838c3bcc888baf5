"""Each planted cause changes what it says, from its turn on, and nothing else."""

import json
import re
from collections.abc import Sequence

import pytest

from tests.misses import planting
from tests.misses.planting import CLOCKS, EFFORTS, renewed
from tests.misses.recordings import CLIENTS, Asked, Body, recorded

TURN = 3


@pytest.fixture(params=CLIENTS)
def turns(request: pytest.FixtureRequest) -> Sequence[Asked]:
    return recorded(request.param)["fixes"].turns


def bodies(turns: Sequence[Asked]) -> list[Body]:
    return [one.body for one in turns]


def said(body: Body) -> list[Body]:
    found: list[Body] = body.get("messages") or body["input"]
    return found


def test_nothing_changes_nothing(turns: Sequence[Asked]) -> None:
    assert planting.nothing(turns, TURN) == (tuple(turns), None)


def test_recorded_conversations_stay_as_they_were(turns: Sequence[Asked]) -> None:
    before = json.dumps(bodies(turns))
    for plant in (planting.clock, planting.tools_reordered, planting.compacted):
        plant(turns, TURN)
    assert json.dumps(bodies(turns)) == before


@pytest.mark.parametrize("form", range(len(CLOCKS)))
def test_clock_stands_still_until_its_turn_and_then_goes(turns: Sequence[Asked], form: int) -> None:
    planted = bodies(planting.clock(turns, TURN, form, is_last=bool(form % 2)).turns)
    heads = [json.dumps(body.get("system") or said(body)[0]) for body in planted]
    assert len(set(heads[:TURN])) == 1
    assert len(set(heads[TURN - 1 :])) == len(turns) - TURN + 1


def test_tools_change_places_from_their_turn_on(turns: Sequence[Asked]) -> None:
    planted = bodies(planting.tools_reordered(turns, TURN, 1, 3).turns)
    tools = turns[TURN].body["tools"]
    assert planted[TURN - 1]["tools"] == tools
    assert planted[TURN]["tools"] == [tools[0], tools[3], tools[2], tools[1], *tools[4:]]


@pytest.mark.parametrize("place", [0, 2, -1])
def test_tool_comes_before_the_one_at_its_place(turns: Sequence[Asked], place: int) -> None:
    tools = turns[TURN].body["tools"]
    at = place % (len(tools) + 1)
    planted = bodies(planting.tool_added(turns, TURN, at).turns)
    assert planted[TURN - 1]["tools"] == tools
    new = planted[TURN]["tools"]
    assert "look_up_ticket" in json.dumps(new[at])
    assert [*new[:at], *new[at + 1 :]] == tools


def test_number_of_a_printed_tool_counts_those_of_namespaces_and_skips_others() -> None:
    turns = recorded("codex")["fixes"].turns
    tools = turns[0].body["tools"]
    inner = next(len(tool["tools"]) for tool in tools if tool["type"] == "namespace")
    last = len(tools)
    planted = planting.tool_added(turns, TURN, last)
    assert planted.change is not None
    assert planted.change.indices == {last, last - 2 + inner}


def test_compaction_takes_the_place_of_what_was_said(turns: Sequence[Asked]) -> None:
    planted = bodies(planting.compacted(turns, TURN).turns)
    assert said(planted[TURN - 1]) == said(turns[TURN - 1].body)
    assert len(said(planted[TURN])) < len(said(turns[TURN].body))
    assert "what was done" in json.dumps(said(planted[TURN])).lower()
    grown = said(turns[TURN + 1].body)[len(said(turns[TURN].body)) :]
    assert said(planted[TURN + 1]) == [*said(planted[TURN]), *grown]


@pytest.mark.parametrize("form", range(len(EFFORTS)))
def test_effort_changes_with_its_turn(turns: Sequence[Asked], form: int) -> None:
    planted = planting.effort_changed(turns, TURN, form)
    efforts = [
        (body.get("output_config") or body.get("reasoning") or {}).get("effort")
        or body["reasoning_effort"]
        for body in bodies(planted.turns)
    ]
    before, since = EFFORTS[form]
    assert efforts == [before] * TURN + [since] * (len(turns) - TURN)
    assert planting.effort_unseen(turns, TURN, form) == (planted.turns, None)


@pytest.mark.parametrize("client", ["claude-code", "opencode"])
def test_marks_for_a_cache_move_and_nothing_else_does(client: str) -> None:
    turns = recorded(client)["fixes"].turns
    planted = planting.cache_control_moved(turns, TURN, 1)
    assert planted.change is None
    places = [mark_places(body) for body in bodies(planted.turns)]
    assert len(set(map(str, places[TURN:]))) > 1
    assert list(map(str, map(unmarked, bodies(planted.turns)))) == list(
        map(str, map(unmarked, bodies(turns)))
    )


def test_nameless_turns_say_the_same_without_a_session(turns: Sequence[Asked]) -> None:
    for one, other in zip(planting.nameless(turns), turns, strict=True):
        assert said(one.body) == said(other.body)
        assert "user-agent" in one.headers
        assert not re.search(r"[0-9a-f]{8}-[0-9a-f]{4}-|ses_", json.dumps(one.headers))
        assert "session" not in json.dumps([*one.body, one.body.get("metadata")])


def mark_places(body: object, at: str = "") -> list[str]:
    """Where marks are in a body."""
    if isinstance(body, dict):
        own = [at] if "cache_control" in body else []
        return own + [
            one for key, value in body.items() for one in mark_places(value, f"{at}.{key}")
        ]
    if isinstance(body, list):
        return [one for n, value in enumerate(body) for one in mark_places(value, f"{at}.{n}")]
    return []


def unmarked(body: object) -> object:
    """A body without marks, and with texts instead of lists of one text."""
    if isinstance(body, dict):
        kept = {key: unmarked(value) for key, value in body.items() if key != "cache_control"}
        return kept["text"] if kept.keys() == {"type", "text"} else kept
    if isinstance(body, list):
        found = [unmarked(one) for one in body]
        return found[0] if len(found) == 1 and isinstance(found[0], str) else found
    return body


def test_renewed_conversation_is_another_one_of_the_same_size(turns: Sequence[Asked]) -> None:
    for client in CLIENTS:
        first, second = (renewed(recorded(client)["fixes"], number) for number in (1001, 1002))
        for one, other in zip(first.turns, second.turns, strict=True):
            assert len(json.dumps(one.body)) == len(json.dumps(other.body))
            assert one.headers != other.headers
            assert one.headers.keys() == other.headers.keys()
            assert f"{client}-1001" in json.dumps(one.body)
            assert f"{client}-1002" in json.dumps(other.body)
