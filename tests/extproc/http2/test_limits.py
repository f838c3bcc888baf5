from hypothesis import given
from hypothesis import strategies as st

from extproc._core import Budget
from extproc.http2.limits import Limits
from tests.oracles.http2.budget import PARTS


def test_announced_frames_fit_the_windows() -> None:
    limits = Limits()
    assert limits.stream_window_bytes <= limits.connection_window_bytes


def test_budget_takes_as_much_as_it_has_room_for() -> None:
    budget = Budget(10)
    assert budget.take(6)
    assert not budget.take(5)
    budget.give_back(1)
    assert budget.take(5)
    assert budget.used_bytes == 10


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 300)), max_size=200))
def test_share_is_never_more_than_a_multiple_of_what_it_leaves(
    taken: list[tuple[int, int]],
) -> None:
    whole = Budget(1000)
    shares = [whole.share() for _ in range(5)]
    for number, size in taken:
        share = shares[number]
        if share.take(size):
            assert share.used_bytes <= PARTS * (whole.max_bytes - whole.used_bytes)
    assert whole.used_bytes == sum(share.used_bytes for share in shares) < whole.max_bytes


def test_newcomer_finds_room_whatever_others_take() -> None:
    whole = Budget(1000)
    for _ in range(4):
        share = whole.share()
        while share.take(1):
            pass
    newcomer = whole.share()
    assert newcomer.take(2)
    newcomer.give_back(2)
    assert newcomer.used_bytes == 0
