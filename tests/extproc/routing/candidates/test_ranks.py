from extproc.routing.candidates.pins import NO_CHOICE, Pin, RankChoice
from extproc.routing.candidates.ranks import Ranks, rank_of
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


def test_overlap_is_certain_only_on_workers_that_obey() -> None:
    choices = {"sure": RankChoice(Pin("x"), True), "unsure": RankChoice(Pin("x"), False)}
    ranks = Ranks(
        lambda name: 1 if name == "single" else 2,
        lambda *_: {},
        lambda name: choices.get(name, NO_CHOICE),
        "/v1/chat/completions",
    )
    names = ("sure", "unsure", "ignores", "single")
    held = ranks.held(dict.fromkeys(names, FIRST))
    assert {name: one.certain_tokens for name, one in held.items()} == {
        "sure": 64,
        "unsure": 0,
        "ignores": 0,
        "single": 64,
    }
    assert held["ignores"].uncertain_tokens == 64
    assert ranks.held({"sure": FIRST}) == {"sure": FIRST}
