from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.picking.speed import (
    AT_END_SHARE,
    EVEN,
    IDLE_SECONDS,
    LEAST_SECONDS,
    MAX_DELAY_SECONDS,
    MAX_SLOWNESS,
    MIN_SLOWNESS,
    Common,
    Speed,
)

LOOK_SECONDS = 0.05


class Queue:
    """A worker that computes prompts one after another, and what is learned about it.

    batch: the number of prompts that it announces at once. delay: how late its events are, in
    seconds. common: that of the fleet to which it belongs.
    """

    def __init__(
        self, slowness: float, batch: int = 1, delay: float = 0.02, common: Common | None = None
    ) -> None:
        self.slowness, self.batch, self.delay = slowness, batch, delay
        self.common, self.speed = common or Common(), Speed[int]()
        self.now = self.free_at = 0.0
        self.under_way: list[tuple[float, int]] = []  # when a prompt is computed, and which one
        self.count = 0
        self.told = 0

    def send(self, work: float) -> None:
        self.count += 1
        self.speed.begin(self.count, work, self.now, is_sure=True)
        self.free_at = max(self.free_at, self.now) + work * self.slowness
        self.under_way.append((self.free_at, self.count))

    def until(self, end: float) -> None:
        while self.now + LOOK_SECONDS <= end:
            self.now += LOOK_SECONDS
            done = [one for one in self.under_way if one[0] + self.delay <= self.now]
            if len(done) >= self.batch or len(done) == len(self.under_way):
                for one in done:
                    self.under_way.remove(one)
                    self.speed.computed(one[1], self.now, self.common)
                    self.told += 1
            self.speed.look(self.now, self.common)
        self.now = end


def busy(queue: Queue, seconds: float, utilization: float = 0.7, seed: int = 1) -> None:
    rng, end = Random(seed), queue.now + seconds
    while queue.now < end:
        work = rng.uniform(0.05, 1.0)
        queue.until(queue.now + rng.expovariate(utilization / (0.5 * queue.slowness)))
        queue.send(work)
    queue.until(queue.now + 1)


@given(
    slowness=st.floats(0.25, 3.0),
    utilization=st.floats(0.4, 1.5),
    batch=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_the_speed_of_a_queue_is_found_however_long_requests_wait_in_it(
    slowness: float, utilization: float, batch: int, seed: int
) -> None:
    queue = Queue(slowness, batch)
    busy(queue, 60 * max(1.0, slowness), utilization, seed)
    assert queue.told > 20
    assert queue.speed.slowness == pytest.approx(slowness, rel=0.5)
    assert queue.speed.confidence > 0.5


def test_a_worker_that_turns_slow_is_seen_within_seconds_and_forgiven_when_it_recovers() -> None:
    queue = Queue(1.0)
    busy(queue, 60)
    queue.slowness = 4.0
    for _ in range(16):
        queue.send(0.5)
    queue.until(queue.now + 5)
    assert queue.speed.slowness > 1.4
    queue.until(queue.now + 7)
    assert queue.speed.slowness > 2.0
    queue.until(queue.free_at + 1)
    queue.slowness = 1.0
    busy(queue, 30)
    assert queue.speed.slowness == pytest.approx(1.0, rel=0.3)


def test_a_worker_that_stops_is_seen_before_it_tells_of_another_prompt() -> None:
    queue = Queue(1.0)
    busy(queue, 30)
    queue.slowness = 1_000.0
    told = queue.told
    queue.send(0.5)
    queue.until(queue.now + 5)
    assert queue.told == told
    assert queue.speed.slowness > 1.4
    queue.until(queue.now + 10)
    assert queue.speed.slowness > 2.0


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0, 100), st.booleans()), max_size=40))
def test_whatever_the_clock_does_the_speed_stays_within_its_bounds(
    steps: Sequence[tuple[float, float, bool]],
) -> None:
    common, speed = Common(), Speed[int]()
    for key, (now, work, is_sure) in enumerate(steps):
        speed.begin(key, work, now, is_sure=is_sure)
        speed.look(now, common)
        speed.computed(key - key % 3, now + work, common)
        assert MIN_SLOWNESS <= speed.slowness <= MAX_SLOWNESS
        assert 0.0 <= speed.confidence <= 1.0
        assert 0.0 <= common.delay_seconds <= MAX_DELAY_SECONDS
        assert MIN_SLOWNESS <= common.slowness <= MAX_SLOWNESS


def test_a_clock_that_is_set_spoils_one_measurement_and_no_more() -> None:
    queue = Queue(2.0)
    busy(queue, 60)
    before = queue.speed.slowness
    for step in (3_600.0, -3_600.0):
        queue.send(0.5)
        queue.now += step
        queue.free_at += step
        queue.under_way = [(at + step, key) for at, key in queue.under_way]
        queue.until(queue.now + 3)
        busy(queue, 30)
        assert queue.speed.slowness == pytest.approx(before, rel=0.3)


def test_late_events_are_not_taken_for_a_slow_worker() -> None:
    queue = Queue(1.0, delay=1.0)
    busy(queue, 200, utilization=0.4)
    assert queue.common.delay_seconds > 0.4
    assert queue.speed.slowness == pytest.approx(1.0, rel=0.5)


def test_requests_that_nobody_tells_of_are_not_taken_for_slowness() -> None:
    queue = Queue(1.0)
    for _ in range(100):
        queue.speed.begin_unseen(2.0, queue.now)
        queue.free_at = max(queue.free_at, queue.now) + 2.0
        queue.send(0.2)
        queue.until(queue.free_at + 1)
    assert queue.told == 100
    assert queue.speed.confidence == 0.0
    assert queue.speed.slowness == 1.0


def test_a_short_request_that_nobody_tells_of_spoils_no_measurement() -> None:
    speed = Speed[int]()
    speed.begin(1, 1.0, 0.0, is_sure=True)
    speed.begin_unseen(LEAST_SECONDS, 0.5)
    speed.computed(1, 2.0, Common())
    assert speed.confidence > 0.0


def test_what_ends_without_being_seen_spoils_the_measurement_under_way() -> None:
    common, speed = Common(), Speed[int]()
    speed.begin(1, 1.0, 0.0, is_sure=True)
    speed.begin(2, 1.0, 0.0, is_sure=True)
    speed.drop(1)
    speed.drop(3)
    speed.computed(2, 9.0, common)
    speed.computed(2, 9.0, common)
    assert speed.confidence == 0.0
    assert speed.slowness == 1.0


def test_the_work_of_a_request_that_waits_for_others_counts_once_it_is_known() -> None:
    common, speed = Common(), Speed[int]()
    for key in (1, 2, 3):
        speed.begin(key, 1.0, 0.0, is_sure=key == 1)
    speed.revise(2, 0.1)  # not its turn yet
    speed.computed(1, 1.03, common)
    speed.revise(2, 0.1)
    assert [work for work, _ in speed.waiting.values()] == [0.1, 1.0]
    speed.computed(3, 1.13, common)
    assert speed.slowness == pytest.approx(1.0, rel=0.05)


def test_of_an_engine_that_stores_prompts_at_the_end_of_answers_nothing_is_learned() -> None:
    queue = Queue(3.0)
    busy(queue, 60)
    assert queue.speed.slowness > 2.0
    for _ in range(round(20 / AT_END_SHARE)):
        queue.speed.ended(0.01)
    queue.speed.look(queue.now, queue.common)
    assert (queue.speed.slowness, queue.speed.confidence) == (1.0, 0.0)
    for _ in range(40):
        queue.speed.ended(2.0)
    queue.speed.look(queue.now, queue.common)
    assert queue.speed.slowness > 2.0


def test_what_was_learned_fades_and_a_new_worker_begins_with_the_mean() -> None:
    queue = Queue(3.0)
    busy(queue, 120)
    new = Speed[int]()
    new.look(queue.now, queue.common)
    assert new.slowness == pytest.approx(queue.common.slowness)
    assert new.slowness == pytest.approx(3.0, rel=0.3)
    queue.speed.look(queue.now + 10 * IDLE_SECONDS, queue.common)
    assert queue.speed.confidence < 0.01


def test_engines_of_which_nothing_is_learned_bring_the_mean_back_to_what_was_configured() -> None:
    queue = Queue(3.0)
    busy(queue, 60)
    for _ in range(round(20 / AT_END_SHARE)):
        queue.speed.ended(0.01)
    busy(queue, 1_200)
    assert queue.common.slowness == pytest.approx(1.0, rel=0.1)
    assert queue.speed.is_even


@pytest.mark.parametrize("slowness", [0.1, 0.5, 1.0, 3.0])
def test_the_only_worker_that_is_measured_is_even_with_one_that_is_not(slowness: float) -> None:
    queue = Queue(slowness)
    for _ in range(200):
        queue.send(0.1)
        queue.until(queue.free_at + 0.5)
        assert queue.speed.is_even
    assert queue.speed.slowness < EVEN * queue.common.slowness


@pytest.mark.parametrize("odd", [0.4, 3.0])
def test_workers_of_one_speed_are_even_and_one_of_another_speed_is_not(odd: float) -> None:
    common = Common()
    fleet = [Queue(slowness, common=common) for slowness in (1.0, 1.0, 1.0, 1.0, 1.0, odd)]
    for seed in range(60):
        for queue in fleet:
            busy(queue, 1, seed=seed)
    assert [queue.speed.is_even for queue in fleet] == [True] * 5 + [False]
