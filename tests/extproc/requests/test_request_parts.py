from array import array
from typing import Any

import pytest

from extproc.errors import RequestError
from extproc.requests.prompt import MAX_PROMPTS, Text
from extproc.requests.request_parts import answers_in, kept_tokens, prompts_of, token_ids


@pytest.mark.parametrize(
    ("raw", "prompts"),
    [
        ("text", [Text("text")]),
        (["a", "b"], [Text("a"), Text("b")]),
        ([1, 2, 3], [array("I", [1, 2, 3])]),
        ([[1], [2]], [array("I", [1]), array("I", [2])]),
    ],
)
def test_prompts_are_texts_or_token_ids(raw: Any, prompts: list[object]) -> None:
    assert prompts_of(raw) == prompts


def test_texts_know_about_special_tokens() -> None:
    prompts = prompts_of(["a"], add_special_tokens=False, special_tokens_vary=True)
    assert prompts == [Text("a", add_special_tokens=False, special_tokens_vary=True)]
    assert prompts_of("a", add_special_tokens=False) == [Text("a", add_special_tokens=False)]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ("", "empty_prompt"),
        ([], "empty_prompt"),
        ([[]], "empty_prompt"),
        (["a"] * (MAX_PROMPTS + 1), "too_many_prompts"),
        ([1, "a"], "bad_request"),
        (["a", 1], "empty_prompt"),
    ],
)
def test_prompts_that_are_none_say_why(raw: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        prompts_of(raw)


@pytest.mark.parametrize("ids", [[-1], [2**32], [1.5], ["a"]])
def test_what_is_no_token_id_is_refused(ids: object) -> None:
    with pytest.raises(RequestError, match="bad_request"):
        token_ids(ids)


@pytest.mark.parametrize(
    ("count", "side", "kept"),
    [(None, None, None), (None, "right", None), (5, "left", 5), (1, None, 1)],
)
def test_an_engine_keeps_the_last_tokens(count: int | None, side: object, kept: int | None) -> None:
    assert kept_tokens(count, side) == kept


@pytest.mark.parametrize(("count", "side"), [(-1, None), (0, None), (5, "right"), (5, "middle")])
def test_other_cuts_are_not_claimed(count: int, side: object) -> None:
    with pytest.raises(RequestError, match="unsupported_truncation"):
        kept_tokens(count, side)


@pytest.mark.parametrize(
    ("n", "answers"), [(None, 1), (1, 1), (3, 3), (0, 1), (-2, 1), (True, 1), ("3", 1)]
)
def test_answers_are_counted_as_engines_take_them(n: object, answers: int) -> None:
    assert answers_in(n) == answers
