from extproc.picking.policies import rank_header, rank_of
from kvstate.overlap import Overlap

FIRST = Overlap(16, (4, 0, 0, 0), rank=0)
SECOND = Overlap(16, (4, 0, 0, 0), rank=1)


def test_the_rank_that_holds_the_prompts_is_named() -> None:
    assert rank_of([SECOND, SECOND], [2, 4], 2, {}) == 1


def test_prompts_on_different_ranks_name_none() -> None:
    assert rank_of([FIRST, SECOND], [2, 2], 2, {}) is None
    assert rank_of([], [2, 2], 2, {}) is None


def test_a_rank_that_a_worker_does_not_have_or_that_is_its_only_one_is_not_named() -> None:
    assert rank_of([SECOND], [2, 1], 2, {}) is None
    assert rank_of([FIRST], [2, 0], 2, {}) is None
    assert rank_of([FIRST], [1, 1], 1, {}) is None


def test_what_the_rank_has_to_do_beyond_the_idlest_one_must_be_less_than_it_saves() -> None:
    assert rank_of([FIRST], [2, 2], 2, {0: 100.0, 1: 40.0}) == 0
    assert rank_of([FIRST], [2, 2], 2, {0: 100.0}) is None


def test_a_header_is_set_where_there_is_a_rank_to_name() -> None:
    assert rank_header("X-data-parallel-rank", 0) == ("x-data-parallel-rank", "0")
    assert rank_header("auto", 1) == ("x-data-parallel-rank", "1")
    assert rank_header(None, 0) is None
    assert rank_header("x", None) is None
