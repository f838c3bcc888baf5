import math
from array import array
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.load.endpoint_load import EndpointLoad
from extproc.routing.load.loads import Loads
from extproc.routing.load.speed import (
    AT_END_SHARE,
    EVEN,
    IDLE_SECONDS,
    LEAST_SECONDS,
    MAX_DELAY_SECONDS,
    MAX_SLOWNESS,
    MIN_SLOWNESS,
    START_DELAY_SECONDS,
    Common,
    SavedSpeed,
    Speed,
)
from kvstate.overlap import Prompt

LOOK_SECONDS = 0.05


class Queue:
    """A worker that computes prompts one after another, and what is learned about it.

    batch: the number of prompts that it announces at once. delay: how late its events are, in
    seconds. common, fleet: those of the fleet to which it belongs.
    """

    def __init__(
        self,
        slowness: float,
        batch: int = 1,
        delay: float = 0.02,
        common: Common | None = None,
        fleet: list[Speed[int]] | None = None,
    ) -> None:
        self.slowness, self.batch, self.delay = slowness, batch, delay
        self.common, self.speed = common or Common(), Speed[int]()
        self.fleet = [] if fleet is None else fleet
        self.fleet.append(self.speed)
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
                    self.speed.note_computed(one[1], self.now, self.common)
                    self.told += 1
            if self.common.is_due(self.now):
                self.common.update(self.fleet, self.now)
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
def test_speed_of_a_queue_is_found_for_any_waiting_time(
    slowness: float, utilization: float, batch: int, seed: int
) -> None:
    queue = Queue(slowness, batch)
    busy(queue, 60 * max(1.0, slowness), utilization, seed)
    assert queue.told > 20
    assert queue.speed.slowness == pytest.approx(slowness, rel=0.5)
    assert queue.speed.confidence > 0.5


def test_speed_follows_a_worker_that_slows_down_and_recovers() -> None:
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


def test_speed_falls_before_a_stalled_worker_computes_another_prompt() -> None:
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
def test_speed_stays_within_its_bounds_for_any_clock(
    steps: Sequence[tuple[float, float, bool]],
) -> None:
    common, speed = Common(), Speed[int]()
    for key, (now, work, is_sure) in enumerate(steps):
        speed.begin(key, work, now, is_sure=is_sure)
        common.update([speed], now)
        speed.look(now, common)
        speed.note_computed(key - key % 3, now + work, common)
        assert MIN_SLOWNESS <= speed.slowness <= MAX_SLOWNESS
        assert 0.0 <= speed.confidence <= 1.0
        assert 0.0 <= speed.delay_seconds <= MAX_DELAY_SECONDS
        assert 0.0 <= common.delay_seconds <= MAX_DELAY_SECONDS
        assert MIN_SLOWNESS <= common.slowness <= MAX_SLOWNESS


def test_speed_loses_one_measurement_to_a_clock_change() -> None:
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


def test_speed_ignores_late_events() -> None:
    queue = Queue(1.0, delay=1.0)
    busy(queue, 200, utilization=0.4)
    assert queue.speed.delay_seconds > 0.4
    assert queue.speed.slowness == pytest.approx(1.0, rel=0.5)


def test_speed_ignores_requests_that_no_event_reports() -> None:
    queue = Queue(1.0)
    for _ in range(100):
        queue.speed.begin_unseen(2.0, queue.now)
        queue.free_at = max(queue.free_at, queue.now) + 2.0
        queue.send(0.2)
        queue.until(queue.free_at + 1)
    assert queue.told == 100
    assert queue.speed.confidence == 0.0
    assert queue.speed.slowness == 1.0


def test_speed_keeps_a_measurement_beside_a_short_unreported_request() -> None:
    speed = Speed[int]()
    speed.begin(1, 1.0, 0.0, is_sure=True)
    speed.begin_unseen(LEAST_SECONDS, 0.5)
    speed.note_computed(1, 2.0, Common())
    assert speed.confidence > 0.0


def test_drop_discards_the_measurement_under_way() -> None:
    common, speed = Common(), Speed[int]()
    speed.begin(1, 1.0, 0.0, is_sure=True)
    speed.begin(2, 1.0, 0.0, is_sure=True)
    speed.drop(1)
    speed.drop(3)
    speed.note_computed(2, 9.0, common)
    speed.note_computed(2, 9.0, common)
    assert speed.confidence == 0.0
    assert speed.slowness == 1.0


def test_revise_counts_the_work_of_a_waiting_request_once() -> None:
    common, speed = Common(), Speed[int]()
    for key in (1, 2, 3):
        speed.begin(key, 1.0, 0.0, is_sure=key == 1)
    speed.revise(2, 0.1)  # not its turn yet
    speed.note_computed(1, 1.03, common)
    speed.revise(2, 0.1)
    assert [work for work, _ in speed.waiting.values()] == [0.1, 1.0]
    speed.note_computed(3, 1.13, common)
    assert speed.slowness == pytest.approx(1.0, rel=0.05)


def test_speed_learns_nothing_from_an_engine_that_stores_prompts_after_answers() -> None:
    queue = Queue(3.0)
    busy(queue, 60)
    assert queue.speed.slowness > 2.0
    for _ in range(round(20 / AT_END_SHARE)):
        queue.speed.note_end(0.01)
    queue.speed.look(queue.now, queue.common)
    assert (queue.speed.slowness, queue.speed.confidence) == (1.0, 0.0)
    for _ in range(40):
        queue.speed.note_end(2.0)
    queue.speed.look(queue.now, queue.common)
    assert queue.speed.slowness > 2.0


def test_speed_fades_and_begins_with_the_mean_for_a_new_worker() -> None:
    queue = Queue(3.0)
    busy(queue, 120)
    new = Speed[int]()
    new.look(queue.now, queue.common)
    assert new.slowness == pytest.approx(queue.common.slowness)
    assert new.slowness == pytest.approx(3.0, rel=0.3)
    queue.speed.look(queue.now + 10 * IDLE_SECONDS, queue.common)
    assert queue.speed.confidence < 0.01


def test_mean_speed_returns_to_the_configured_one_where_engines_teach_nothing() -> None:
    queue = Queue(3.0)
    busy(queue, 60)
    for _ in range(round(20 / AT_END_SHARE)):
        queue.speed.note_end(0.01)
    busy(queue, 1_200)
    assert queue.common.slowness == pytest.approx(1.0, rel=0.1)
    assert queue.speed.is_even


@pytest.mark.parametrize("slowness", [0.1, 0.5, 1.0, 3.0])
def test_only_measured_worker_is_even_with_unmeasured_ones(slowness: float) -> None:
    queue = Queue(slowness)
    for _ in range(200):
        queue.send(0.1)
        queue.until(queue.free_at + 0.5)
        assert queue.speed.is_even
    assert queue.speed.slowness < EVEN * queue.common.slowness


@pytest.mark.parametrize("odd", [0.4, 3.0])
def test_is_even_holds_for_workers_of_one_speed_and_not_for_an_odd_one(odd: float) -> None:
    common, speeds = Common(), list[Speed[int]]()
    queues = [Queue(slowness, 1, 0.02, common, speeds) for slowness in (*[1.0] * 5, odd)]
    for seed in range(60):
        for queue in queues:
            busy(queue, 1, seed=seed)
    assert [queue.speed.is_even for queue in queues] == [True] * 5 + [False]


@pytest.mark.parametrize("repeated", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("tokens", "jitter_seconds"), [(200, 0.05), (2_000, 0.0), (2_000, 0.005), (40_000, 0.001)]
)
def test_computed_learns_a_plausible_speed_from_equal_prompts(
    tokens: int, jitter_seconds: float, repeated: int
) -> None:
    loads, rng, rate = Loads({"a": EndpointLoad()}, 8_000.0, learns=True), Random(1), 4_000.0
    prompt, now = Prompt("m", array("I", [0])), 0.0
    least, most = tokens / rate + 0.02, tokens / rate + 0.02 + jitter_seconds
    for number in range(repeated):
        ticket = loads.begin("a", tokens, now, prompt=prompt)
        now += rng.uniform(least, most)
        loads.note_computed(ticket, now)
        loads.end(ticket, now + 1)
        now += 0.01
        if number % 100 == 99:
            loads.look("a", now)
            shown = loads.speed_as_json("a")["tokens_per_second"]
            fastest = max(8_000.0, tokens / (least - START_DELAY_SECONDS))
            assert tokens / most - 1 <= shown <= fastest + 1


@given(
    measured=st.lists(st.tuples(st.floats(1, 1e6), st.floats(0, 30)), min_size=1, max_size=20),
    repeated=st.integers(0, 300),
)
def test_computed_keeps_speed_and_delay_within_the_measured_ones(
    measured: list[tuple[float, float]], repeated: int
) -> None:
    load = EndpointLoad()
    loads, now = Loads({"a": load}, 8_000.0, learns=True), 0.0
    for tokens, seconds in measured + measured[-1:] * repeated:
        ticket = loads.begin("a", tokens, now, prompt=Prompt("m", array("I", [0])))
        loads.note_computed(ticket, now + seconds)
        now += seconds
        loads.end(ticket, now + 1)
        loads.look("a", now)
        longest = max(each for _, each in measured)
        assert 0.0 <= load.speed.delay_seconds <= max(longest, START_DELAY_SECONDS) + 1e-9
        slowest = max(each * 8_000.0 / tokens for tokens, each in measured)
        assert MIN_SLOWNESS <= load.speed.slowness <= min(MAX_SLOWNESS, max(1.0, slowest)) + 1e-9
        assert loads.load("a", now).slowness <= max(1.0, slowest) + 1e-9


def test_speed_is_the_same_in_a_later_process() -> None:
    queue = Queue(3.0)
    for _ in range(20):
        queue.send(0.4)
        queue.until(queue.now + 2.0)
    before, now = queue.speed, queue.now + 5.0
    saved = before.saved(now)
    assert saved is not None
    assert saved.is_sound
    later = Speed[int]()
    later.restore(saved, 1000.0)
    before.look(now, queue.common)
    later.look(1000.0, queue.common)
    assert later.slowness == pytest.approx(before.slowness)
    assert later.confidence == pytest.approx(before.confidence)
    assert later.delay_seconds == pytest.approx(before.delay_seconds)


def test_own_measurements_count_more_than_those_of_an_earlier_process() -> None:
    queue = Queue(3.0)
    assert queue.speed.saved(0.0) is None
    queue.send(0.4)
    queue.until(2.0)
    before = queue.speed.saved(2.0)
    queue.speed.restore(SavedSpeed(0.0, 9.0, 1.0, 0.0, (0.0,) * 5), 2.0)
    assert queue.speed.saved(2.0) == before


@pytest.mark.parametrize(
    "saved",
    [
        SavedSpeed(math.inf, 1.0, 1.0, 0.5, (0.0,) * 5),
        SavedSpeed(0.0, -1.0, 1.0, 0.5, (0.0,) * 5),
        SavedSpeed(0.0, 1.0, math.nan, 0.5, (0.0,) * 5),
        SavedSpeed(0.0, 1.0, 1.0, 1.5, (0.0,) * 5),
    ],
)
def test_impossible_measurements_are_not_sound(saved: SavedSpeed) -> None:
    assert not saved.is_sound


@pytest.mark.parametrize("lie", [0.001, 1_000.0])
def test_lying_worker_changes_the_speed_of_no_other_and_little_of_the_mean(lie: float) -> None:
    common, fleet = Common(), list[Speed[int]]()
    honest = [Queue(1.0, common=common, fleet=fleet) for _ in range(3)]
    liar = Queue(lie, delay=0.0, common=common, fleet=fleet)
    for second in range(1, 120):
        for queue in (*honest, liar):
            queue.send(0.5)
            queue.until(float(second))
    assert all(one.speed.slowness == pytest.approx(1.0, rel=0.25) for one in honest)
    assert 1 / 2 <= common.slowness <= 2
    assert MIN_SLOWNESS <= liar.speed.slowness <= MAX_SLOWNESS
