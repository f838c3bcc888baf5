"""What somebody can do who repeats messages, or a router that lies although it knows the secret."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.requests.outline import beginning_of
from extproc.routing.claims.claim_table import (
    Claim,
    ReportedBounds,
    ReportedClaim,
    ReportedCounts,
    ReportedPlaces,
)
from extproc.routing.claims.marks import LENGTHS, packed
from extproc.routing.load.endpoint_load import EndpointLoad
from extproc.routing.load.loads import MAX_REPORTED_WINDOWS, Gauges
from extproc.routing.load.reports import WorkerLoadReport
from extproc.sharing.messages import (
    MAX_CLAIMS,
    MAX_MARKS,
    ClaimReport,
    RouterReport,
    decoded,
    encoded,
    worker_id,
)
from extproc.sharing.other_routers import (
    DRIFT,
    MARKS_AT_ONCE,
    MARKS_PER_SECOND,
    MAX_GONE,
    MAX_STRANGERS,
)
from tests.extproc.sharing.routers import (
    FORGET_SECONDS,
    KEYS,
    WORKERS,
    Router,
    introduce,
    met,
    tell_all,
    wall_us,
)

A, B = WORKERS
TICK = 0.01


def life_of(one: Router, other: Router, ticks: int) -> list[bytes]:
    """All messages of a router that sends a request in each tick, until it ends."""
    recorded: list[bytes] = []
    for tick in range(ticks):
        now = tick * TICK
        one.loads.begin(A, 500, now)
        recorded += one.due(now)
        other.hear(recorded[-1:], now)
        one.hear(other.due(now), now)
    return recorded


def ticks_heard(listener: Router, messages: Sequence[tuple[float, bytes]]) -> float:
    """Plays messages at their times; returns for how long some router counted, in seconds."""
    counted = 0.0
    for now, message in messages:
        listener.others.forget(now)
        counted += TICK * bool(listener.others.peers)
        listener.hear([message], now)
        listener.due(now)
    return counted


@given(st.floats(0, 3_600), st.sampled_from([TICK, 0.05, 0.15]), st.sampled_from([1, 2]))
def test_recording_of_an_ended_router_is_ignored(
    later: float, pace: float, incarnation: int
) -> None:
    one, other = met("one", "other")
    recorded = life_of(one, other, 20)
    end = 20 * TICK + 2 * FORGET_SECONDS + later
    other.others.forget(end)
    listener = other if incarnation == 1 else Router("other", incarnation)
    played = [(end + pace * number, one) for number, one in enumerate(3 * recorded)]
    assert ticks_heard(listener, played) == 0.0
    assert (listener.load(A, end).others, listener.load(A, end).backlog_tokens) == (0, 0)


@given(st.floats(0.02, 1.0))
def test_delayed_messages_keep_their_router_only_for_a_moment(pace: float) -> None:
    one, other = met("one", "other")
    held = [message for tick in range(200) for message in _said(one, tick * TICK)]
    played = [(pace * number, message) for number, message in enumerate(held)]
    assert ticks_heard(other, played) / TICK * pace <= (
        2 * FORGET_SECONDS * (1 + pace / (pace - TICK) * (1 + DRIFT)) + 3 * pace
    )


def _said(router: Router, now: float) -> list[bytes]:
    router.loads.begin(A, 500, now)
    return router.due(now)


def test_delayed_answer_does_not_admit_its_sender() -> None:
    one, other = Router("one"), Router("other")
    other.hear(one.due(0.0), 0.0)
    one.hear(other.due(0.01), 0.01)
    (answer,) = one.due(0.02)
    assert decoded(answer, KEYS).answers
    other.hear([answer], 0.02 + FORGET_SECONDS)
    assert not other.others.peers
    assert other.others.counts["unproven"] == 2


def test_answer_for_another_router_does_not_admit_its_sender() -> None:
    one, other, third = Router("one"), Router("other"), Router("third")
    hello = one.due(0.0)
    other.hear(hello, 0.0)
    third.hear(hello, 0.0)
    one.hear(other.due(0.01), 0.01)
    third.hear(one.due(0.02), 0.02)
    assert not third.others.peers


def test_memory_of_strangers_and_ended_routers_is_bounded() -> None:
    other = Router("other")
    for number in range(2 * MAX_STRANGERS):
        other.hear([encoded(RouterReport(f"r{number}", 1, 1, 0), KEYS)], 0.0)
    challenges = [one for each in other.due(0.0) for one in decoded(each, KEYS).challenges]
    assert len(challenges) <= MAX_STRANGERS
    for number in range(MAX_GONE + 5):
        introduce(other, RouterReport(f"g{number}", 1, 1, 0), float(number))
        other.others.forget(number + 0.5)
    assert len(other.others.departed) == MAX_GONE
    assert len(other.others.strangers) <= MAX_STRANGERS


@given(st.integers(2, 2**63 - 1), st.integers(1, 2**63 - 1), st.integers(2, 40))
def test_liar_under_the_name_of_a_router_silences_no_router(
    incarnation: int, sequence: int, ticks: int
) -> None:
    one, other = met("one", "other")
    introduce(other, RouterReport("one", incarnation, sequence, 0), 0.0)
    before = other.others.counts["accepted"]
    for tick in range(ticks):
        now = tick * TICK
        other.hear(_said(one, now), now)
        lie = RouterReport("one", incarnation, min(sequence + tick + 1, 2**63 - 1), 0)
        other.hear([encoded(lie, KEYS)], now)
        other.others.forget(now)
    assert other.others.counts["accepted"] - before >= ticks
    assert other.load(A, ticks * TICK).others == ticks


@given(st.integers(0, 2**50), st.integers(0, 2**50), st.sampled_from([0, 1]))
def test_utilization_is_bounded_for_any_figures(sent: int, lately: int, is_whole: int) -> None:
    other = Router("other")
    introduce(other, RouterReport("one", 1, 1, 0, is_whole=is_whole > 0), 0.0)
    for sequence in range(2, 30):
        figures = WorkerLoadReport(worker_id(KEYS, A), 0, 0, sent * (sequence % 2), 0, lately)
        other.hear(
            [encoded(RouterReport("one", 1, sequence, 0, workers=(figures,)), KEYS)],
            0.0,
        )
    assert other.load(A, 0.0).utilization <= MAX_REPORTED_WINDOWS
    other.others.forget(2 * FORGET_SECONDS)
    assert other.load(A, 40.0).utilization < 0.1
    ((_, newcomer),) = other.loads.gauges([A], 2 * FORGET_SECONDS)
    assert Gauges(*newcomer).lately_tokens <= MAX_REPORTED_WINDOWS * 10_000


def claims_of(first: int, marks: int, count: int = MAX_CLAIMS) -> tuple[ClaimReport, ...]:
    keys = packed(range(marks))
    return tuple(ClaimReport(first + each, worker_id(KEYS, A), keys) for each in range(count))


@given(st.integers(1, len(LENGTHS)), st.integers(1, MAX_CLAIMS))
def test_message_is_merged_up_to_its_bound_of_marks(marks: int, count: int) -> None:
    other = Router("other")
    introduce(other, RouterReport("one", 1, 1, 0), 0.0)
    other.hear(
        [encoded(RouterReport("one", 1, 2, 0, claims=claims_of(0, marks, count)), KEYS)], 0.0
    )
    taken = len(other.knows("one").claims)
    assert taken == min(count, MAX_MARKS // marks)
    assert other.others.excess_claims == count - taken


@pytest.mark.parametrize("seconds", [0.0, 13.0])
def test_claims_of_a_router_are_bounded(seconds: float) -> None:
    other = Router("other")
    introduce(other, RouterReport("one", 1, 1, 0), 0.0)
    recorded = Counter[str]()
    record = other.sent.record_reported

    def count(
        told: Sequence[ReportedClaim],
        places: ReportedPlaces,
        known: dict[int, Claim],
        bounds: ReportedBounds,
        now: float,
    ) -> ReportedCounts:
        counts = record(told, places, known, bounds, now)
        recorded["n"] += counts[0]
        return counts

    other.sent.record_reported = count  # type: ignore[method-assign]
    for sequence in range(2, 3_000):
        now = seconds * sequence / 3_000
        begun = claims_of(sequence * MAX_CLAIMS, 25)
        over = tuple(one.number for one in begun)
        news = RouterReport("one", 1, sequence, wall_us(now), claims=begun, ended=over)
        other.hear([encoded(news, KEYS)], now)
    assert MARKS_AT_ONCE - 25 <= recorded["n"] <= MARKS_AT_ONCE + seconds * MARKS_PER_SECOND


def test_honest_router_is_within_the_bounds_with_its_longest_prompts() -> None:
    one, other = met("one", "other")
    for key in range(400):
        marks = one.sent.text_marks("m", beginning_of(bytes([key % 256]) * (4 << 20)))
        one.send(A, marks, 0.0)
    other.hear(one.due(0.0), 0.0)
    assert len(other.knows("one").claims) == 400
    assert other.others.excess_claims == 0


SILENCES = st.lists(st.floats(TICK, FORGET_SECONDS * 0.9), min_size=1, max_size=20)


@given(SILENCES)
def test_slow_router_stays_known(silences: list[float]) -> None:
    one, other = met("one", "other")
    since = other.knows("one").since
    now = 0.0
    for silence in silences:
        now += silence
        assert not other.others.forget(now)
        other.hear(_said(one, now), now)
    assert other.knows("one").since == since


def test_figures_of_a_worker_new_to_the_listener_are_bounded() -> None:
    one, other = met("one", "other")
    for now in range(100):
        one.loads.begin(A, 2_000, now / 10)
        other.hear(one.due(now / 10), now / 10)
    other.endpoints[A] = EndpointLoad()
    tell_all([one, other], 10.0)
    assert other.load(A, 10.0).utilization <= MAX_REPORTED_WINDOWS
