from extproc.routing.ranks import rank_header, rank_of
from kvstate.overlap import Overlap

FIRST = Overlap(16, (4, 0, 0, 0), rank=0)
SECOND = Overlap(16, (4, 0, 0, 0), rank=1)


def test_rank_of_names_the_rank_that_holds_the_prompts() -> None:
    assert rank_of([SECOND, SECOND], [2, 4], 2, {}) == 1


def test_rank_of_names_none_for_prompts_on_different_ranks() -> None:
    assert rank_of([FIRST, SECOND], [2, 2], 2, {}) is None
    assert rank_of([], [2, 2], 2, {}) is None


def test_rank_of_names_none_that_a_worker_lacks_or_that_is_its_only_one() -> None:
    assert rank_of([SECOND], [2, 1], 2, {}) is None
    assert rank_of([FIRST], [2, 0], 2, {}) is None
    assert rank_of([FIRST], [1, 1], 1, {}) is None


def test_rank_of_names_none_whose_extra_work_exceeds_its_saving() -> None:
    assert rank_of([FIRST], [2, 2], 2, {0: 100.0, 1: 40.0}) == 0
    assert rank_of([FIRST], [2, 2], 2, {0: 100.0}) is None


def test_rank_header_is_set_where_a_rank_is_named() -> None:
    assert rank_header("X-data-parallel-rank", 0) == ("x-data-parallel-rank", "0")
    assert rank_header("auto", 1) == ("x-data-parallel-rank", "1")
    assert rank_header(None, 0) is None
    assert rank_header("x", None) is None
