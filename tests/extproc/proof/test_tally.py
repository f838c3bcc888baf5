"""The tally of findings, which is raised while most of the last ones are bad."""

from hypothesis import given
from hypothesis import strategies as st

from extproc.proof.tally import LAST_FINDINGS, Tally


def test_tally_is_raised_by_bad_findings_and_ended_by_good_ones_in_a_row() -> None:
    tally = Tally(bad=3, good=2)
    for is_good in (False, True, False, True):
        tally.add(is_good=is_good)
    assert (tally.is_raised, tally.has_bad) == (False, True)
    tally.add(is_good=False)
    assert tally.is_raised
    for is_good in (True, False, True):
        tally.add(is_good=is_good)
    assert tally.is_raised
    tally.add(is_good=True)
    assert (tally.is_raised, tally.has_bad) == (False, False)


@given(st.lists(st.booleans(), max_size=3 * LAST_FINDINGS))
def test_good_findings_alone_never_raise_it(findings: list[bool]) -> None:
    tally = Tally(bad=LAST_FINDINGS, good=1)
    for is_good in [True, *findings]:
        tally.add(is_good=is_good)
    last = [True, *findings][-LAST_FINDINGS:]
    if all(last):
        assert not tally.is_raised
