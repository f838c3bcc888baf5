"""What other routers tell, read and counted compiled and in Python, to the last bit."""

from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing import load_columns
from extproc.routing import told as told_figures
from extproc.routing.load import EndpointLoad, Loads
from extproc.routing.told import (
    MAX_WORKERS,
    WorkerNews,
    are_figures,
    are_plain_figures,
    count_later,
    decoded_figures,
    encoded_figures,
)
from kvstate.undecodable import UNDECODABLE
from tests.without_core import without_core

compiled = pytest.mark.skipif(not load_columns.IS_COMPILED, reason="no C compiler at installation")

PLACES = {number: (f"10.0.0.{number}:1", None) for number in range(5)}  # the last has no record
RULES = (1.0, 8_000.0, 10.0, 320_000.0)


def fleet() -> Loads:
    return Loads({PLACES[number][0]: EndpointLoad() for number in range(4)}, 8_000)


def raw(told: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(told))


def told(rng: Random) -> msgspec.Raw:
    """Figures of some workers, the same one more than once at times, and of unknown ones."""
    tokens = [rng.choice((9, 9_999, 2**50)) for _ in range(4)]
    rows: list[list[object]] = [
        [rng.randrange(6), rng.randrange(9), *map(rng.randrange, tokens)]
        for _ in range(rng.randrange(8))
    ]
    if rng.random() < 0.2:  # of a later version, or in a way that only the decoder reads
        rows = [[*row, rng.choice((7, [{"a": b"b"}], "\u00e9"))] for row in rows]
    return raw(rows)


def one_by_one(
    loads: Loads, router: str, figures: msgspec.Raw, now: float, *, is_known: bool
) -> int:
    """Records figures as `Loads.record_reports` does without the core."""
    return sum(
        one.worker not in PLACES
        or not loads.record_report(router, PLACES[one.worker][0], one, now, is_known=is_known)
        for one in decoded_figures(figures)
    )


def seen(loads: Loads, now: float) -> list[object]:
    """Everything that was recorded."""
    own = [(one.gauges, one.numbers.ahead_tokens) for one in loads.endpoints.values()]
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


LARGEST = [2**63 - 1, 1_000_000, *[2**50] * 4]
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.sampled_from(
    [one + n for one in LARGEST for n in (0, 1)]
)
ROWS = st.lists(st.lists(st.integers(0, 1_000_000) | NUMBERS | VALUES, max_size=8), max_size=4)


def is_decoded(told: msgspec.Raw) -> bool:
    try:
        decoded_figures(told)
    except UNDECODABLE:
        return False
    return True


@given(ROWS.map(msgspec.msgpack.encode) | st.binary(max_size=60))
def test_figures_are_sound_if_their_decoder_takes_them(body: bytes) -> None:
    told = msgspec.Raw(body)
    assert are_figures(told) == is_decoded(told)
    assert is_decoded(told) or not are_plain_figures(told)


@compiled
@pytest.mark.parametrize("field", range(6))
def test_figures_are_read_up_to_their_bounds(field: int) -> None:
    beyond = [most + (at == field) for at, most in enumerate(LARGEST)]
    below = [-(at == field) for at in range(6)]
    found = [are_plain_figures(raw([row])) for row in (LARGEST, beyond, below)]
    assert found == [are_figures(raw([row])) for row in (LARGEST, beyond, below)]
    assert found == [True, False, False]


@compiled
def test_figures_are_read_up_to_their_number_and_to_their_end() -> None:
    assert are_plain_figures(raw([LARGEST] * MAX_WORKERS))
    assert not are_figures(raw([LARGEST] * (MAX_WORKERS + 1)))
    whole = msgspec.msgpack.encode([LARGEST, [*LARGEST, "later"]])
    cut = [msgspec.Raw(bytes(whole[:end])) for end in range(len(whole))]
    assert are_plain_figures(msgspec.Raw(whole))
    assert not any(map(are_figures, [*cut, msgspec.Raw(whole + b"\0")]))


@compiled
@given(st.lists(st.builds(WorkerNews, *[st.integers(0, 1_000_000)] * 6), max_size=9))
def test_figures_that_were_encoded_are_read_by_the_core(news: list[WorkerNews]) -> None:
    told = encoded_figures(news)
    assert are_plain_figures(told)
    assert decoded_figures(told) == tuple(news)


ONE = raw([[0, 1, 1, 1, 1, 1]])
RECORD = {"10.0.0.0:1": EndpointLoad()}
WRONG = EndpointLoad()
WRONG.gauges["one"] = bytearray(5)  # type: ignore[assignment]


@compiled
@pytest.mark.parametrize(
    "given_instead",
    [
        (None, PLACES, {}, "one", RULES),
        (ONE, PLACES, {}, "one", RULES[:3]),
        (ONE, {0: "no place"}, {}, "one", RULES),
        (ONE, PLACES, {"10.0.0.0:1": object()}, "one", RULES),
        (ONE, PLACES, {"10.0.0.0:1": WRONG}, "one", RULES),
        (ONE,),
    ],
    ids=["no figures", "few rules", "no place", "no record", "nothing counted", "few arguments"],
)
def test_compiled_counting_refuses_what_is_of_another_type(given_instead: Any) -> None:
    with pytest.raises((TypeError, AttributeError)):
        count_later(*given_instead)


@compiled
def test_more_requests_than_a_number_has_room_for_are_refused() -> None:
    loads = fleet()
    loads.record_report(
        "one", PLACES[0][0], WorkerNews(0, -(2**63), 0, 0, 0, 0), 0.0, is_known=True
    )
    with pytest.raises(OverflowError):
        loads.record_reports("one", raw([[0, 1, 0, 0, 0, 0]]), PLACES, 0.0, is_known=True)


def test_without_a_compiler_the_decoder_reads_figures_and_all_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bare = without_core(told_figures, "extproc._core", monkeypatch)
    assert bare.are_figures(ONE)
    assert not bare.are_plain_figures(ONE)
    assert bare.count_later(ONE, PLACES, fleet().endpoints, "one", RULES) is None
    loads = fleet()
    monkeypatch.setattr("extproc.routing.load.count_later", bare.count_later)
    assert loads.record_reports("one", ONE, PLACES, 0.0, is_known=True) == 0
    assert loads.in_flight_of("one") == 1
