"""Clients who wait for their answers, in the simulated time of the benchmark of closed loops."""

import itertools
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import routing_closed
import routing_closed_runs
from measure import CannotRunError
from routing_clients import AGENT, CHAT, FORKING, KINDS, Kind, Turn, turns_of
from routing_closed_cells import LOOPS, agents
from routing_closed_compare import CONTESTANTS, carried, carried_summary, summary
from routing_closed_play import clients_of, play
from routing_closed_runs import Job, Runs
from routing_closed_tables import tables
from routing_spans import Span, mean_and_p90

from kvtools.whatif.engines import BLOCK_TOKENS
from kvtools.whatif.routers import Contestant

COST = CONTESTANTS["cost"]
LEAST = Contestant("least", "least_request")
SEED = 5


def first_turns(kind: Kind, number: int, count: int = 60) -> list[Turn]:
    return list(itertools.islice(turns_of(kind, number, SEED), count))


def test_agents_wait_for_their_answers_and_find_them_cached() -> None:
    loop = agents(12, 200.0, 50.0)
    ours, least = (play(loop, one, SEED) for one in (COST, LEAST))
    assert ours.ideal_hit_rate >= ours.hit_rate > 0.8 > least.hit_rate
    assert ours.prompt_turns > 0.9 * ours.turns > 0
    assert ours.computed < least.computed
    assert 1 / 8 <= least.busiest < 0.5


def test_what_has_not_ended_is_not_left_out_of_the_times() -> None:
    over = [Span(seconds, is_over=True) for seconds in (10.0, 20.0, 30.0, 40.0)]
    assert mean_and_p90(over) == (25.0, 40.0)
    mean, _ = mean_and_p90([*over, Span(35.0, is_over=False)])
    assert mean > 25.0
    assert mean_and_p90([Span(10.0, is_over=False)]) == (0.0, 0.0)


def test_slow_fleet_gets_fewer_turns_of_agents() -> None:
    loop = agents(24, 200.0, 50.0)
    usual, one_worker = (play(loop._replace(workers=count), COST, SEED) for count in (8, 1))
    assert one_worker.turns < 0.8 * usual.turns
    assert one_worker.busiest == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_turn_begins_with_the_one_before_and_its_answer(kind: Kind) -> None:
    turns = first_turns(kind, 3)
    for before, turn in itertools.pairwise(turns):
        if turn.request.session != before.request.session:
            assert turn.known * BLOCK_TOKENS == pytest.approx(kind.system_tokens, abs=BLOCK_TOKENS)
        held = [*before.request.blocks, *before.request.answer_blocks]
        assert turn.request.blocks[: turn.known] == held[: turn.known]
        assert turn.known < len(turn.request.blocks)
    conversations = {turn.request.session for turn in turns}
    assert len(turns) / len(conversations) <= kind.turns[1]


def test_sub_agents_begin_with_all_that_their_parent_has() -> None:
    turns = first_turns(FORKING, 1)
    forking = [turn for turn in turns if turn.forks]
    assert 0 < len(forking) < len(turns) / 2
    for turn in forking:
        history = [*turn.request.blocks, *turn.request.answer_blocks]
        for fork in turn.forks:
            first = next(fork)
            assert first.request.blocks[: first.known] == history
            assert first.request.session == turn.request.session


def test_client_asks_the_same_whoever_else_asks() -> None:
    few, many = (list(clients_of(agents(count), SEED)) for count in (3, 9))
    for one, other in zip(few, many, strict=False):
        pairs = zip(itertools.islice(one, 30), other, strict=False)
        assert all((a.request, a.pause) == (b.request, b.pause) for a, b in pairs)
    blocks = [{*next(client).request.blocks[70:]} for client in many]
    assert len(set().union(*blocks)) == sum(map(len, blocks))


def test_half_of_the_clients_name_no_session() -> None:
    loop = agents(10)._replace(named_share=0.5)
    names = [next(client).request.session for client in clients_of(loop, SEED)]
    assert names.count("") == 5


def test_cells_fill_the_caches_as_their_names_say() -> None:
    assert len({loop.name for loop in LOOPS}) == len(LOOPS)
    for loop in LOOPS:
        if loop.name.endswith("of the caches"):
            share = float(loop.name.split(", ")[-1].split()[0])
            assert loop.fill == pytest.approx(share, abs=0.03)
    assert 0.9 < agents(96).fill < 1.1
    assert agents(48).clients == [(AGENT, 48)]


def test_chats_pause_for_minutes() -> None:
    pauses = sorted(turn.pause for turn in first_turns(CHAT, 1, 200))
    assert 60 < pauses[100] < 300


@pytest.mark.parametrize(
    ("p90s", "number"),
    [([1.0, 4.0, 9.0], 15.0), ([0.5, 1.0, 1.5], 30.0), ([4.0, 5.0, 6.0], 5.0)],
)
def test_carried_agents_are_found_between_two_cells(p90s: list[float], number: float) -> None:
    assert carried([10, 20, 30], p90s) == pytest.approx(number)


def test_summaries_show_each_contestant() -> None:
    loops = [agents(count, 120.0, 40.0) for count in (4, 8)]
    results = [
        (loop, {name: [play(loop, CONTESTANTS[name], seed) for seed in (1, 2)] for name in
        ("cost", "ring")}) for loop in loops
    ]  # fmt: skip
    assert "8 agents (fill 0.0" in summary(*results[1])
    assert [line.split()[0] for line in carried_summary(results).splitlines()] == ["cost", "ring"]
    rows = [line for line in tables(results).splitlines() if line.startswith("| 8 agents")]
    assert len(rows) == 4
    assert {row.count("|") for row in rows} == {4, 5}


def test_cells_are_chosen_by_name_or_by_a_part_of_it() -> None:
    named = routing_closed.chosen(LOOPS, ["64 agents", "without session"])
    assert [loop.name for loop in named] == ["64 agents", "96 agents without session headers"]
    assert routing_closed.chosen(LOOPS, None) == list(LOOPS)
    with pytest.raises(CannotRunError, match="the cells are"):
        routing_closed.chosen(LOOPS, ["nothing"])


def test_interrupted_runs_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep, loop = tmp_path / "kept.jsonl", agents(4, 60.0, 20.0)
    jobs = [Job(loop, COST, seed) for seed in (1, 2)]
    with Runs(1, keep) as runs:
        runs.play(jobs[:1])
    assert len(keep.read_text().split()) > 1
    with keep.open("a") as file:
        file.write('{"key": "cut o')  # the process was killed
    with Runs(1, keep) as runs:
        runs.play(jobs)
        found = runs.results(loop, COST, (1, 2))
    assert len({one.computed for one in found}) == 2
    monkeypatch.setattr(routing_closed_runs, "_timed", None)  # nothing is left to play
    with Runs(1, keep) as runs:
        runs.play(jobs)
        assert runs.results(loop, COST, (1, 2)) == found
