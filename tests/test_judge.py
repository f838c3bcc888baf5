"""The judge: engines that do what was recorded, and scores that routers deserve."""

import random
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from kvstate.index.index import Index
from kvstate.overlap import Prompt, Tokens
from kvstate.wire.zmq_wire import decode_batch
from tests.ports import free_port

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import judge_play
import judge_recordings
from judge_claims import Logged, Silent
from judge_engines import Arrival, Engines
from judge_recordings import RECORDINGS, Recorded, Recording
from judge_routers import places_at
from judge_score import Score, Verdict
from judge_world import World

WORKERS = 3
REQUESTS = 30

# The hash of a block contains the token after it too, which our index does not keep: it may credit
# the last block of a prompt that goes on otherwise.
LOOKS_AHEAD = "vllm_0.33.0_eagle.jsonl.gz"
read = cache(judge_recordings.read)

Pick = Callable[[set[int]], int]


def request(cached: int) -> Recorded:
    return Recorded(
        path="/v1/completions",
        body={},
        response={},
        tokens=[],
        salt=None,
        cached=cached,
        session=0,
        block_size=16,
        batches=[],
    )


@pytest.mark.parametrize("name", RECORDINGS)
@given(seed=st.integers(0, 1_000_000))
def test_a_holder_reports_what_was_recorded_whoever_computed_what(name: str, seed: int) -> None:
    world, chance = World(WORKERS), random.Random(seed)
    for one in read(name).requests:
        holders = world.holders(one)
        assert bool(holders) == (one.cached > 0)
        assert {world.reported(one, worker) for worker in holders} <= {one.cached}
        world.served(one, chance.randrange(WORKERS), 0.0)


@pytest.mark.parametrize("name", RECORDINGS)
def test_events_tell_what_each_worker_reports(name: str) -> None:
    world, index, chance = World(WORKERS), Index(12345678), random.Random(1)
    owners = [index.add(str(number), 0, "tiny") for number in range(WORKERS)]
    for owner in owners:
        owner.trusted = True
    for one in read(name).requests:
        found = index.overlaps(Prompt("tiny", Tokens("I", one.tokens), None, one.salt))
        for worker in range(WORKERS):
            overlap = found.get(str(worker))
            blocks = sum(overlap.tiers) + overlap.uncertain if overlap else 0
            told = min(blocks * one.block_size, one.cached)
            more = told - world.reported(one, worker)
            assert more in ((0, one.block_size) if name == LOOKS_AHEAD else (0,))
        for worker, payload in world.served(one, chance.randrange(WORKERS), 0.0):
            index.apply(owners[worker], decode_batch(payload).events)


@pytest.mark.parametrize("name", RECORDINGS)
def test_with_one_worker_the_messages_are_the_recorded_ones(name: str) -> None:
    world = World(1)
    for one in read(name).requests:
        told = world.served(one, 0, 0.0)
        assert told == [(0, batch.payload) for batch in one.batches]


async def score_of(pick: Pick, monkeypatch: pytest.MonkeyPatch, *, finds: bool) -> Score:
    """The score of a proxy that knows who holds what."""
    monkeypatch.setattr(judge_play, "SETTLED_SECONDS", 0.0)
    recording: Recording = read(next(iter(RECORDINGS)))
    ports = (free_port(), free_port(), free_port())
    places = places_at(["127.0.0.31", "127.0.0.32", "127.0.0.33"], ports)
    engines = Engines(recording, places, lambda _: "", shares=not finds)

    async def passed_on(asked: web.Request) -> web.Response:
        worker = pick(engines.holders)
        url = f"http://{places[worker].api}{asked.path}"
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json=await asked.json()) as answer,
        ):
            return web.json_response(await answer.json(), status=answer.status)

    app = web.Application()
    app.router.add_post("/{path:.*}", passed_on)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()

    def start(_: ExitStack, __: Path) -> tuple[str, judge_play.Foretelling]:
        return f"http://127.0.0.1:{port}", lambda _: Silent()

    try:
        return await judge_play.judged(recording, engines, start, REQUESTS, finds=finds)
    finally:
        await runner.cleanup()


def held_of(recording: Recording) -> int:
    return sum(one.cached > 0 for one in recording.requests[:REQUESTS])


@pytest.mark.parametrize("finds", [False, True])
async def test_a_router_that_is_always_right_keeps_and_finds_all(
    finds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = iter(range(1_000))
    score = await score_of(
        lambda holders: min(holders, default=next(turns) % WORKERS), monkeypatch, finds=finds
    )
    held = held_of(read(next(iter(RECORDINGS))))
    assert (score.held, score.kept, score.wrong, score.failed) == (held, held, 0, 0)
    assert score.busiest < 0.9


@pytest.mark.parametrize("finds", [False, True])
async def test_a_router_that_is_always_wrong_keeps_and_finds_nothing(
    finds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    could_not = 0  # be wrong: all workers hold it by now, as each has computed it once

    def other(holders: set[int]) -> int:
        nonlocal could_not
        could_not += len(holders) == WORKERS
        return next((one for one in range(WORKERS) if one not in holders), 0)

    score = await score_of(other, monkeypatch, finds=finds)
    assert score.held == held_of(read(next(iter(RECORDINGS))))
    assert (score.kept, score.wrong) == (could_not, score.held - could_not)
    assert score.wrong > score.kept
    assert not (finds and score.kept)


async def test_a_router_that_always_takes_one_worker_is_seen_by_its_share_and_finds_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = await score_of(lambda _: 1, monkeypatch, finds=False)
    found = await score_of(lambda _: 1, monkeypatch, finds=True)
    assert (kept.kept, kept.busiest) == (kept.held, 1.0)
    assert found.kept < found.held / 2
    assert found.wrong == found.held - found.kept


async def test_a_request_that_reaches_no_worker_failed_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = 0

    def refuses_some(holders: set[int]) -> int:
        nonlocal calls
        calls += 1
        if calls % 5 == 0:
            raise web.HTTPServiceUnavailable
        return min(holders, default=0)

    score = await score_of(refuses_some, monkeypatch, finds=False)
    assert score.failed == calls // 5
    assert score.kept + score.wrong + score.failed >= score.held
    assert score.wrong == 0


@pytest.mark.parametrize(
    ("worker", "foretold", "told", "predicted", "wrong"),
    [(0, 160, 1, 1, 0), (0, 128, 1, 0, 0), (0, None, 0, 0, 0), (1, 160, 0, 0, 1)],
)
def test_a_foretold_number_counts_where_the_request_was_not_wrong(
    worker: int, foretold: int | None, told: int, predicted: int, wrong: int
) -> None:
    score = Score()
    score.note(request(160), Arrival(worker, {0}, 160), foretold)
    assert (score.told, score.predicted, score.wrong) == (told, predicted, wrong)


def test_a_verdict_shows_both_plays() -> None:
    kept, found = Score(), Score()
    kept.note(request(160), Arrival(0, {0}, 160), 160)
    found.note(request(160), Arrival(1, {0}, 0), 0)
    found.note(request(160), None, None)
    words = str(Verdict(kept, found)).split()
    assert words == ["1", "of", "1", "100%", "0", "of", "2", "1", "1", "1", "of", "1"]


def test_what_vllm_router_logged_since_is_what_it_foretold(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("")
    logged = Logged(log)
    line = (
        '\x1b[2moutcome\x1b[0m="prefix_cost" worker="http://{}" credited_prefix_tokens\x1b[0m={}\n'
    )
    with log.open("a") as file:
        file.write(line.format("h:1", 96))
    assert logged.of("h:1") == 96
    assert logged.of("h:1") is None
    with log.open("a") as file:
        file.write(line.format("h:2", 32))
    assert logged.of("h:1") is None
