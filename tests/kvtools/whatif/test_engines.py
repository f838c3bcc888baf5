import pytest

from kvtools.whatif.engines import (
    STORE,
    ModelledFleet,
    ModelledSpeed,
    ModelledStore,
    Request,
)

# A thousand prompt tokens per second, and steps that take almost no time.
SPEED = ModelledSpeed(1_000.0, 1_000, 0.000_1, 0.0)

# Arrivals and first blocks: of a prompt, and of four on another engine, the second one the same.
QUEUE = ((0.0, 0), (5.0, 50), (5.0, 0), (5.0, 100), (5.0, 150))


def request(at: float, first_block: int, answer: int = 0, blocks: int = 10) -> Request:
    answer_blocks = range(-first_block - 1, -first_block - 1 - answer // 100, -1)
    return Request(
        at, range(first_block, first_block + blocks), 128 * blocks, answer, answer_blocks
    )


def served(fleet: ModelledFleet, *requests: Request, worker: int = 0) -> list[float]:
    fleet.run(requests, lambda *_: worker, lambda *_: None)
    return [one.first_token_at for one in requests]


def test_engine_answers_at_most_max_running_requests_at_once() -> None:
    alone = ModelledSpeed(1_000.0, 1_000, 0.01, 0.0, max_running=1)
    first, second = served(
        ModelledFleet([alone], 1_000, 0.0), request(0, 0, 200), request(0, 100, 200)
    )
    assert second > first + 200 * 0.01  # the first answer is complete only then


def test_engine_computes_lower_ranks_first_and_equal_ones_in_order() -> None:
    requests = [request(0.0, 100 * number) for number in range(4)]
    for one, rank in zip(requests, (0.0, 9.0, 5.0, 5.0), strict=True):
        one.rank = rank
    times = served(ModelledFleet([SPEED], 1_000, 0.0), *requests)
    assert sorted(range(4), key=times.__getitem__) == [0, 2, 3, 1]


def test_prompt_waits_for_room_in_the_cache() -> None:
    speed = ModelledSpeed(1_000.0, 1_000, 0.01, 0.0)
    roomy, tight = (
        served(ModelledFleet([speed], blocks, 0.0), request(0, 0, 200), request(0, 100, 200))
        for blocks in (1_000, 15)
    )
    assert roomy[1] < tight[1]


def test_engine_slows_down_and_recovers() -> None:
    turns = [(1.0, 0, SPEED.slower(10.0)), (20.0, 0, SPEED)]
    fleet = ModelledFleet([SPEED], 1_000, 0.0, turns=turns)
    found = served(fleet, request(0.0, 0, blocks=5), request(2.0, 50, blocks=5), request(21.0, 90))
    assert found == pytest.approx([0.64, 8.4, 22.28], rel=0.01)


@pytest.mark.parametrize(
    ("speed", "blocks"),
    [(ModelledSpeed(1_000.0, 1_000, 0.01, 0.0, max_running=1), 1_000), (SPEED, 18)],
)
def test_transferred_prompt_waits_for_a_place_too(speed: ModelledSpeed, blocks: int) -> None:
    fleet = ModelledFleet([SPEED, speed], blocks, 0.0, transfer_rate=10_000.0)
    requests = [request(0.0, 0, 3_000), request(0.0, 100, 300)]
    requests[1].prefill = 0
    first, second = served(fleet, *requests, worker=1)
    assert second >= requests[0].done_at > first


def test_block_computed_twice_is_stored_once() -> None:
    fleet = ModelledFleet([SPEED], 1_000, 0.0)
    # the last block of a prompt is always computed, and answers may fill a block that is stored
    requests = [Request(0.0, (1, 2), 256, 3_000 * turn, (99,)) for turn in (1, 2)]
    served(fleet, *requests)
    stored = [block for _, _, blocks, _ in fleet.published for block in blocks]
    assert sorted(stored) == [1, 2, 99]


def test_pull_waits_for_the_one_before_it_and_spares_the_prompt() -> None:
    fleet = ModelledFleet([SPEED, SPEED], 1_000, 0.0, transfer_rate=1_280.0)
    holder, first, second, other = request(0, 0), request(5, 0), request(5, 0), request(5, 50)
    first.source = second.source = other.source = 0
    workers = iter([0, 1, 1, 1])
    fleet.run([holder, first, second, other], lambda *_: next(workers), lambda *_: None)
    assert (first.fetched, second.fetched, other.fetched) == (9, 9, 0)
    assert first.fetched_at == pytest.approx(5 + 9 * 128 / 1_280 + 0.010)
    assert second.fetched_at == pytest.approx(first.fetched_at + 0.010)  # connected once more
    assert first.cached == 9 * 128


def test_request_is_fetched_for_in_its_turn_takes_no_room_meanwhile_and_keeps_its_place() -> None:
    fleet = ModelledFleet([SPEED, SPEED], 12, 0.0, transfer_rate=1_280.0)  # room for one
    holder, before, pulling, meanwhile, after = (request(at, n) for at, n in QUEUE)
    pulling.source = 0
    workers = iter([0, 1, 1, 1, 1])
    fleet.run(
        [holder, before, pulling, meanwhile, after], lambda *_: next(workers), lambda *_: None
    )
    assert pulling.fetched_at == pytest.approx(before.first_token_at + 0.9 + 0.010)
    assert meanwhile.first_token_at == pytest.approx(before.first_token_at + 1.28, rel=0.01)
    assert pulling.first_token_at == pytest.approx(meanwhile.first_token_at + 0.128, rel=0.01)
    assert after.first_token_at == pytest.approx(pulling.first_token_at + 1.28, rel=0.01)


@pytest.mark.parametrize("tells_removals", [False, True])
def test_store_gives_its_blocks_to_those_that_mount_it(*, tells_removals: bool) -> None:
    store = ModelledStore(10, frozenset({0, 1}), 12_800.0, tells_removals=tells_removals)
    fleet = ModelledFleet([SPEED] * 3, 1_000, 0.0, store=store)
    requests = [request(0, 0), request(5, 0), request(5, 0), request(10, 50), request(20, 0)]
    workers = iter([0, 1, 2, 0, 1])
    fleet.run(requests, lambda *_: next(workers), lambda *_: None)
    assert [one.fetched for one in requests] == [0, 9, 0, 0, 0]
    played = [sorted(removed) for _, number, _, removed in fleet.published if number == STORE]
    assert any(played) is tells_removals
