"""What changes stores waits while one is copied, and the other way round."""

from hypothesis import given
from hypothesis import strategies as st

from kvstate.index.store_gate import StoreGate
from kvstate.steps import Steps


class Work:
    """Changes and copies in steps, which note what is under way."""

    def __init__(self) -> None:
        self.gate = StoreGate()
        self.under_way: list[str] = []
        self.done: list[str] = []

    def steps(self, kind: str, count: int) -> Steps[str]:
        self.under_way.append(kind)
        try:
            for _ in range(count):
                yield
                copies = self.under_way.count("copy")
                assert copies == 0 or self.under_way == ["copy"]
        finally:
            self.under_way.remove(kind)
        self.done.append(kind)
        return kind

    def begin(self, kind: str, count: int) -> Steps[str]:
        gate = self.gate
        return (gate.copying if kind == "copy" else gate.changing)(self.steps(kind, count))


KINDS = st.tuples(st.sampled_from(["copy", "change"]), st.integers(0, 3))


@given(
    st.lists(KINDS, min_size=1, max_size=6), st.lists(st.tuples(st.integers(0, 5), st.booleans()))
)
def test_a_copy_is_never_under_way_beside_anything_else(
    kinds: list[tuple[str, int]], turns: list[tuple[int, bool]]
) -> None:
    work = Work()
    left = [work.begin(*each) for each in kinds]
    ended = 0
    for number, is_closed in turns:
        if number < len(left) and is_closed:
            left.pop(number).close()
            ended += 1
        elif number < len(left) and next(left[number], "end") is not None:
            left.pop(number)
    while left:
        left = [each for each in left if next(each, "end") is None]
    assert len(work.done) >= len(kinds) - ended
    assert work.under_way == []


def test_a_change_that_comes_during_a_copy_waits_for_its_end() -> None:
    work = Work()
    copy, change = work.begin("copy", 1), work.begin("change", 0)
    next(copy)
    next(change)
    assert work.done == []
    assert next(copy, "end") == next(change, "end") == "end"
    assert work.done == ["copy", "change"]
