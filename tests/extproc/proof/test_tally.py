"""The tally of findings, which is raised while most of the last ones are bad."""

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


def test_one_proof_raises_it_at_once() -> None:
    tally = Tally(bad=3, good=1)
    tally.alarm()
    assert (tally.is_raised, tally.has_bad) == (True, True)
    tally.add(is_good=True)
    assert not tally.is_raised


def test_findings_before_the_last_ones_do_not_count() -> None:
    tally = Tally(bad=2, good=1)
    for is_good in (False, *[True] * LAST_FINDINGS, False):
        tally.add(is_good=is_good)
    assert (tally.is_raised, tally.has_bad) == (False, True)
