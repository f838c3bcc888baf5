"""The doctor's faults of each kind of feed."""

from extproc.config.feed_kinds import KINDS
from kvtools.doctor.faults import FAULTS, OF_FEEDS


def test_every_kind_of_feed_has_its_faults() -> None:
    assert list(OF_FEEDS) == [kind.key for kind in KINDS]
    for kind in KINDS:
        faults = OF_FEEDS[kind.key]
        assert {*faults.of_nobody, *faults.of_answers} <= faults.faults.keys() <= FAULTS.keys()
        assert bool(faults.shared) is kind.is_consumed
        of_connection = {faults.refused, faults.unreachable, faults.shared} - {""}
        assert of_connection <= faults.faults.keys()
        has_ports_of_ranks = any(one.is_by_rank for one in kind.addresses)
        assert bool(faults.refused and faults.unreachable) is not has_ports_of_ranks


def test_each_fault_of_a_feed_is_one_kinds() -> None:
    codes = [code for one in OF_FEEDS.values() for code in one.faults]
    assert len(codes) == len(set(codes))
