"""What changes a store, or copies it, passes its gate alone."""

from hypothesis import given
from hypothesis import strategies as st

from kvstate.index.store_gate import StoreGate
from kvstate.steps import Pace, Steps


class Work:
    """Several pieces of work in steps, which note what is under way and in which order it ends."""

    def __init__(self) -> None:
        self.gate = StoreGate()
        self.under_way: list[int] = []
        self.done: list[int] = []

    def steps(self, number: int, count: int) -> Steps[int]:
        self.under_way.append(number)
        try:
            for _ in range(count):
                yield
                assert self.under_way == [number]
        finally:
            self.under_way.remove(number)
        self.done.append(number)
        return number

    def begin(self, number: int, count: int) -> Steps[int]:
        return self.gate.passing(self.steps(number, count))


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 5), st.booleans())),
)
def test_nothing_is_ever_under_way_beside_what_passes(
    counts: list[int], turns: list[tuple[int, bool]]
) -> None:
    work = Work()
    left = [work.begin(*each) for each in enumerate(counts)]
    ended = 0
    for number, is_closed in turns:
        if number < len(left) and is_closed:
            left.pop(number).close()
            ended += 1
        elif number < len(left) and next(left[number], "end") == "end":
            left.pop(number)
    while left:
        left = [each for each in left if next(each, "end") != "end"]
    assert len(work.done) >= len(counts) - ended
    assert work.under_way == []


def test_work_passes_in_the_order_in_which_it_came() -> None:
    work = Work()
    first, second, third = (work.begin(number, 1) for number in range(3))
    assert [next(first), next(second), next(third)] == [Pace.HURRIES, Pace.WAITS, Pace.WAITS]
    assert next(first, "end") == "end"
    assert [next(third), next(second)] == [Pace.WAITS, Pace.HURRIES]
    assert next(second, "end") == "end"
    assert [next(third), next(third, "end")] == [Pace.HURRIES, "end"]
    assert work.done == [0, 1, 2]
