from extproc.doctor.findings import About
from extproc.doctor.token_visit import judge_tokens
from kvstate.overlap import Tokens

ABOUT = About("worker")


def code_of(theirs: list[int], ours: list[int]) -> str:
    claims = [
        ("a", Tokens("I", [1]), Tokens("I", [1])),
        ("b", Tokens("I", theirs), Tokens("I", ours)),
    ]
    return judge_tokens(ABOUT, claims, "/tokenize").code


def test_the_same_ids_are_right() -> None:
    assert code_of([1, 2], [1, 2]) == ""


def test_the_first_id_that_differs_is_named() -> None:
    finding = judge_tokens(ABOUT, [("b", Tokens("I", [1, 5]), Tokens("I", [1, 6]))], "/tokenize")
    assert finding.code == "tokens-differ"
    assert "token 1 is 5 in the engine and 6 here" in finding.says


def test_one_more_id_is_a_difference() -> None:
    assert code_of([1, 2, 3], [1, 2]) == "tokens-differ"
