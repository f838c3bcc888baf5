from extproc.checking.golden import GOLDEN, Told
from extproc.doctor.findings import About, Finding
from extproc.doctor.token_visit import judge_tokens
from kvstate.overlap import Tokens

ABOUT = About("worker")


def finding(theirs: list[int], ours: list[int]) -> Finding:
    same = Tokens("I", [1])
    told = [
        Told(GOLDEN[0], same, same),
        Told(GOLDEN[1], Tokens("I", ours), Tokens("I", theirs)),
    ]
    return judge_tokens(ABOUT, told, str)


def test_the_same_ids_are_right() -> None:
    assert finding([1, 2], [1, 2]).code == ""


def test_the_first_id_that_differs_is_named() -> None:
    found = finding([1, 5], [1, 6])
    assert found.code == "tokens-differ"
    assert "token 1 is 5 in the engine and 6 here, by /tokenize" in found.says


def test_one_more_id_is_a_difference() -> None:
    assert finding([1, 2, 3], [1, 2]).code == "tokens-differ"
