import json
from array import array
from typing import Any

import msgspec
import pytest

from extproc.base.errors import RequestError
from extproc.requests.prompt import (
    MAX_PROMPTS,
    Text,
    answers_in,
    ids_of,
    is_filled,
    is_given,
    prompts_of,
    token_ids,
    token_limit,
)


def json_of(value: object) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value).encode())


@pytest.mark.parametrize(
    ("raw", "prompts"),
    [
        ("text", [Text("text")]),
        (["a", "b"], [Text("a"), Text("b")]),
        ([1, 2, 3], [array("I", [1, 2, 3])]),
        ([[1], [2]], [array("I", [1]), array("I", [2])]),
    ],
)
def test_prompts_of_reads_texts_or_token_ids(raw: Any, prompts: list[object]) -> None:
    assert prompts_of(json_of(raw)) == prompts


def test_prompts_of_passes_special_tokens_on_to_texts() -> None:
    prompts = prompts_of(json_of(["a"]), add_special_tokens=False, special_tokens_vary=True)
    assert prompts == [Text("a", add_special_tokens=False, special_tokens_vary=True)]
    assert prompts_of(json_of("a"), add_special_tokens=False) == [
        Text("a", add_special_tokens=False)
    ]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ("", "empty_prompt"),
        ([], "empty_prompt"),
        ([[]], "empty_prompt"),
        (["a"] * (MAX_PROMPTS + 1), "too_many_prompts"),
        ([[1]] * (MAX_PROMPTS + 1), "too_many_prompts"),
        ([-1], "bad_request"),
        ([[2**32]], "bad_request"),
    ],
)
def test_prompts_of_names_the_reason_of_a_refusal(raw: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        prompts_of(json_of(raw))


@pytest.mark.parametrize(
    "raw", [None, {}, 1, [1, "a"], ["a", 1], [[1], "a"], [1.5], [True], "a" * 99_999]
)
def test_ids_of_refuses_other_than_a_list_of_token_ids(raw: object) -> None:
    with pytest.raises(msgspec.DecodeError):
        ids_of(json_of(raw))


@pytest.mark.parametrize("spaces", ["", " ", "\n" * 70_000])
@pytest.mark.parametrize("count", [1, 9_999, 20_000, 99_999])
def test_token_ids_reads_long_lists_whole(count: int, spaces: str) -> None:
    ids = [number % 1_000_003 for number in range(0, 7 * count, 7)]
    text = f"[{spaces}" + ",".join(map(str, ids)).replace(",", f",{spaces}", 2) + f"{spaces}]"
    assert token_ids(msgspec.Raw(text.encode())).tolist() == ids


@pytest.mark.parametrize(
    ("value", "given", "filled"),
    [
        ("a", True, True),
        ([1], True, True),
        (5, True, True),
        ("", True, False),
        ([], True, False),
        ({}, True, False),
        (0, True, False),
        (False, True, False),
        (None, False, False),
    ],
)
def test_is_given_and_is_filled_differ_for_empty_values(
    value: object,
    given: bool,
    filled: bool,
) -> None:
    assert is_given(json_of(value)) == given
    assert is_filled(json_of(value)) == filled


@pytest.mark.parametrize(
    ("count", "side", "kept"),
    [(None, None, None), (None, "right", None), (5, "left", 5), (1, None, 1)],
)
def test_truncated_prompt_keeps_its_last_tokens(
    count: int | None, side: object, kept: int | None
) -> None:
    assert token_limit(count, side) == kept


@pytest.mark.parametrize(("count", "side"), [(-1, None), (0, None), (5, "right"), (5, "middle")])
def test_token_limit_refuses_other_cuts(count: int, side: object) -> None:
    with pytest.raises(RequestError, match="unsupported_truncation"):
        token_limit(count, side)


@pytest.mark.parametrize(
    ("n", "answers"), [(None, 1), (1, 1), (3, 3), (0, 1), (-2, 1), (True, 1), ("3", 1)]
)
def test_answers_in_counts_as_engines_do(n: object, answers: int) -> None:
    assert answers_in(n) == answers
