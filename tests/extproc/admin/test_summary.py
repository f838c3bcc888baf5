from extproc.admin.observed import LEADING_TOKENS, Kept, prefixes, spread, summary
from kvstate.overlap import Overlap
from tests.extproc.admin.decisions import decided, prompt

HELD = Overlap(16, (1, 0, 0, 0), 0)


def test_a_summary_says_where_and_why_and_nothing_of_the_prompt() -> None:
    told = summary(Kept(3, 1.23456, decided({"b:1": HELD})))
    assert (told["id"], told["at"], told["worker"], told["reason"]) == (3, 1.235, "b:1", "overlap")
    assert (told["predicted_tokens"], told["prompt_tokens"], told["candidates"]) == (16, 32, 2)
    assert told["pick"] == ["b:1", "a:1"]


def test_a_decision_without_a_pick_is_told_too() -> None:
    told = summary(Kept(1, 0.0, decided(names=())))
    assert (told["pick"], told["worker"], told["verdict"]) == ([], "", "no_override")


def test_a_prefix_is_told_with_its_holders_the_fullest_first() -> None:
    (prefix,) = prefixes([prompt(range(32), salt="s")], 1, 1)
    overlaps = {"a": HELD, "b": Overlap(16, (1, 1, 0, 0), 0), "c": Overlap(16, uncertain=2)}
    told = spread(prefix, overlaps, workers=2)
    assert (told["tokens"], told["held_by"], told["salted"], told["cut"]) == (32, 3, True, False)
    assert [holder["name"] for holder in told["workers"]] == ["b", "a"]
    assert told["workers"][0]["blocks_by_tier"] == {"device": 1, "host": 1, "disk": 0, "remote": 0}


def test_a_prefix_that_may_go_on_says_so() -> None:
    (prefix,) = prefixes([prompt(range(LEADING_TOKENS))], 1, 1)
    assert spread(prefix, {}, workers=2)["cut"] is True
