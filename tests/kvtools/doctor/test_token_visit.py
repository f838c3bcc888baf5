from extproc.proof.golden import GOLDEN, GoldenTokens
from kvstate.overlap import Tokens
from kvtools.doctor.findings import Finding, Subject
from kvtools.doctor.token_visit import judge_tokens

ABOUT = Subject("worker")


def finding(theirs: list[int], ours: list[int]) -> Finding:
    same = Tokens("I", [1])
    shown = [
        GoldenTokens(GOLDEN[0], same, same),
        GoldenTokens(GOLDEN[1], Tokens("I", ours), Tokens("I", theirs)),
    ]
    return judge_tokens(ABOUT, shown, str)


def test_judge_tokens_accepts_equal_ids() -> None:
    assert finding([1, 2], [1, 2]).code == ""


def test_judge_tokens_names_the_first_different_id() -> None:
    found = finding([1, 5], [1, 6])
    assert found.code == "tokens-differ"
    assert "token 1 is 5 in the engine and 6 here, by /tokenize" in found.says


def test_judge_tokens_takes_an_additional_id_for_a_difference() -> None:
    assert finding([1, 2, 3], [1, 2]).code == "tokens-differ"
