from hypothesis import given
from hypothesis import strategies as st

from extproc.sharing.outages import (
    HALVED_SECONDS,
    LASTING_SECONDS,
    SETTLED_SECONDS,
    OutageNote,
    Outages,
)

# How long a fault lasts, and how long there is none after it.
TIMES = st.lists(
    st.tuples(st.floats(0.0, LASTING_SECONDS / 2), st.floats(SETTLED_SECONDS, 4 * HALVED_SECONDS)),
    max_size=200,
)


def seen(times: list[tuple[float, float]], now: float = 1_000.0) -> tuple[list[OutageNote], float]:
    """What is logged of these outages, and how long all of it lasts."""
    outages, began = Outages(), now
    found = []
    for down, up in times:
        for seconds, fault in ((0.0, "down"), (down, "down"), (up, "")):
            now += seconds
            found.append(outages.look(fault, now))
    return [news for news in found if news is not None], now - began


def test_outages_are_logged_the_first_second_and_fourth_time() -> None:
    found, _ = seen([(1.0, 2.0)] * 20)
    assert [news.number for news in found if news.fault] == [1, 2, 4, 8, 16]
    assert [news.fault for news in found] == ["down", ""] * 5


@given(TIMES)
def test_log_of_outages_grows_as_the_logarithm_of_their_number_and_slowly_with_time(
    times: list[tuple[float, float]],
) -> None:
    found, seconds = seen(times)
    assert len(found) <= 2 * (len(times).bit_length() + seconds / HALVED_SECONDS)


@given(TIMES)
def test_end_of_an_outage_is_logged_exactly_if_its_begin_was(
    times: list[tuple[float, float]],
) -> None:
    found, _ = seen(times)
    assert [bool(news.fault) for news in found] == [True, False] * (len(found) // 2)
    assert all(
        one.number == other.number for one, other in zip(found[::2], found[1::2], strict=True)
    )


def test_outage_after_a_quiet_time_is_logged_again() -> None:
    many = [(1.0, 2.0)] * 20
    found, _ = seen([*many, (1.0, 5 * HALVED_SECONDS), (1.0, 2.0)])
    assert found[-2:] == [OutageNote("down", 1), OutageNote("", 1)]


def test_outage_that_lasts_is_logged_once_however_many_there_were() -> None:
    outages = Outages()
    for number in range(3):
        outages.look("down", 10.0 * number)
        outages.look("", 10.0 * number + SETTLED_SECONDS)
    began = 20.0 + 10.0
    assert [outages.look("a", began + second) for second in range(3)] == [
        OutageNote("a", 4),
        None,
        None,
    ]
    outages.look("", began + 5)
    began += 10
    found = [outages.look("b", began + second) for second in range(200)]
    assert found.index(OutageNote("b", 5)) == LASTING_SECONDS
    assert found.count(None) == 199


def test_short_recovery_is_none() -> None:
    outages = Outages()
    assert outages.look("", 0.0) is None
    outages.look("down", 1.0)
    assert outages.look("", 1.0 + SETTLED_SECONDS / 2) is None
    assert outages.is_going_on
    assert outages.look("down", 2.0) is None
