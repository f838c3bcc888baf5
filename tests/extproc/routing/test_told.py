"""What other routers tell, counted compiled and in Python, to the last bit."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing import load_columns
from extproc.routing import told as told_figures
from extproc.routing.load import EndpointLoad, Loads
from extproc.routing.told import count_later, plain_count_later
from extproc.sharing.messages import WorkerNews
from tests.without_core import without_core

compiled = pytest.mark.skipif(not load_columns.IS_COMPILED, reason="no C compiler at installation")

PLACES = {number: (f"10.0.0.{number}:1", None) for number in range(5)}  # the last has no record
RULES = (1.0, 8_000.0, 10.0, 320_000.0)


def fleet() -> Loads:
    return Loads({PLACES[number][0]: EndpointLoad() for number in range(4)}, 8_000)


def told(rng: Random) -> tuple[WorkerNews, ...]:
    """Figures of some workers, the same one more than once at times, and of unknown ones."""
    tokens = [rng.choice((9, 9_999, 2**50)) for _ in range(4)]
    return tuple(
        WorkerNews(rng.randrange(6), rng.randrange(9), *map(rng.randrange, tokens))
        for _ in range(rng.randrange(8))
    )


def one_by_one(
    loads: Loads, router: str, figures: tuple[WorkerNews, ...], now: float, *, is_known: bool
) -> int:
    """Records figures as `Loads.record_reports` does without the core."""
    return sum(
        one.worker not in PLACES
        or not loads.record_report(router, PLACES[one.worker][0], one, now, is_known=is_known)
        for one in plain_count_later(figures, PLACES, loads.endpoints, router, RULES)
    )


def seen(loads: Loads, now: float) -> list[object]:
    """Everything that was recorded."""
    own = [(state.gauges, state.ahead_tokens) for state in loads.endpoints.values()]
    endpoints = list(loads.endpoints)
    return [*own, loads.told(endpoints, now), [loads.load(one, now) for one in endpoints]]


@compiled
@given(st.integers(0, 2**32), st.integers(1, 12))
def test_figures_are_counted_the_same_compiled_and_in_python(seed: int, messages: int) -> None:
    rng, (ours, plain) = Random(seed), (fleet(), fleet())
    for now in range(messages):
        figures, router = told(rng), rng.choice(("one", "other"))
        is_known, own = rng.random() < 0.5, (f"10.0.0.{rng.randrange(4)}:1", 900.0, float(now))
        for loads in (ours, plain):
            loads.begin(*own)
        unknown = ours.record_reports(router, figures, PLACES, now, is_known=is_known)
        assert unknown == one_by_one(plain, router, figures, now, is_known=is_known)
        assert seen(ours, now + 0.5) == seen(plain, now + 0.5)


@compiled
@pytest.mark.parametrize(
    "given_instead",
    [
        ([WorkerNews(0, 1, 1, 1, 1, 1)], {}, {}, "one", RULES),
        ((None,), PLACES, {}, "one", RULES),
        ((), PLACES, {}, "one", RULES[:3]),
        ((WorkerNews(0, 1, 1, 1, 1, 1),), {0: "no place"}, {}, "one", RULES),
        ((WorkerNews(0, 1, 1, 1, 1, 1),), PLACES, {"10.0.0.0:1": object()}, "one", RULES),
        ((),),
    ],
    ids=["a list", "no news", "few rules", "no place", "no record", "few arguments"],
)
def test_compiled_counting_refuses_what_is_of_another_type(given_instead: tuple[object]) -> None:
    with pytest.raises((TypeError, AttributeError)):
        count_later(*given_instead)  # type: ignore[arg-type]


@compiled
def test_more_requests_than_a_number_has_room_for_are_refused() -> None:
    loads = fleet()
    few, many = (WorkerNews(0, count, 0, 0, 0, 0) for count in (-(2**62), 2**63 - 1))
    loads.record_reports("one", (few,), PLACES, 0.0, is_known=True)
    with pytest.raises(OverflowError):
        loads.record_reports("one", (many,), PLACES, 0.0, is_known=True)


def test_without_a_compiler_all_figures_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = without_core(told_figures, "extproc._core", monkeypatch)
    figures = (WorkerNews(0, 1, 1, 1, 1, 1),)
    assert bare.count_later(figures, PLACES, fleet().endpoints, "one", RULES) == figures
