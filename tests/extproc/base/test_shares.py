from hypothesis import given
from hypothesis import strategies as st

from extproc.base.shares import PARTS, Shares

NAMES = st.sampled_from([b"", b"a", b"b", b"c", None])


@given(st.lists(st.tuples(NAMES, st.booleans(), st.integers(0, 400)), max_size=60))
def test_nobody_holds_more_than_his_share_of_what_is_left(
    actions: list[tuple[bytes | None, bool, int]],
) -> None:
    shares, held = Shares(1000), dict[bytes | None, list[int]]()
    for whose, takes, amount in actions:
        own = held.setdefault(whose, [])
        if not takes and own:
            shares.give_back(whose, own.pop())
        elif takes and shares.take(whose, amount):
            own.append(amount)
            left = shares.most - shares.used
            assert left >= 0
            assert whose is None or sum(own) <= PARTS * left
        assert shares.used == sum(map(sum, held.values()))


def test_two_that_take_turns_get_three_sevenths_each() -> None:
    shares, held = Shares(700), {b"a": 0, b"b": 0}
    for _ in range(700):
        for whose in held:
            held[whose] += shares.take(whose, 1)
    assert held == {b"a": 300, b"b": 300}


def test_share_is_as_large_again_once_it_was_given_back() -> None:
    shares = Shares(100)
    assert shares.take(b"a", 75)
    assert not shares.take(b"a", 1)
    assert shares.take(b"b", 18)
    shares.give_back(b"a", 75)
    shares.give_back(b"b", 18)
    assert shares.take(b"a", 75)


def test_all_together_may_take_all_where_nobody_is_told_apart() -> None:
    shares = Shares(100)
    assert shares.take(None, 100)
    assert not shares.take(None, 1)
    shares.give_back(None, 100)
    assert shares.used == 0
