"""What engines change in a conversation before its template gets it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import RequestError
from extproc.requests.dialect import Reasoning
from extproc.templates.conversions import (
    merged_developers,
    merged_systems,
    with_reasoning,
    with_sorted_keys,
)

USER = {"role": "user", "content": "u"}


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_system_turns_are_joined_without_a_space_at_the_beginning() -> None:
    told = merged_systems([said("system", "a"), USER, said("system", "b")])
    assert told == [said("system", "ab"), USER]


def test_developer_before_all_others_becomes_a_system_turn() -> None:
    developer = {**said("developer", "d"), "tools": None}
    assert merged_developers([developer, USER]) == [said("system", "d"), USER]


@pytest.mark.parametrize("content", ["d", [{"type": "text", "text": "d"}]])
def test_later_developer_is_merged_with_all_system_turns_by_blank_lines(content: Any) -> None:
    turns = [said("system", "s"), USER, said("developer", content), said("system", None)]
    assert merged_developers(turns) == [said("system", "s\n\nd"), USER]


@pytest.mark.parametrize(
    ("rule", "reasoning", "content", "told"),
    [
        (Reasoning.IGNORED, "r", "c", None),
        (Reasoning.EITHER, "r", "c", "r"),
        (Reasoning.EITHER, "", "c", "c"),
        (Reasoning.ONLY_REASONING, None, "c", None),
        (Reasoning.ONLY_REASONING, "r", "c", "r"),
        (Reasoning.RENAMED, None, "c", "c"),
        (Reasoning.RENAMED, "", "c", ""),
    ],
)
def test_reasoning_is_told_under_both_keys(
    rule: Reasoning, reasoning: str | None, content: str | None, told: str | None
) -> None:
    given = {"reasoning": reasoning, "reasoning_content": content}
    turn = {**said("assistant", "a"), **{key: it for key, it in given.items() if it is not None}}
    expected = {} if told is None else {"reasoning": told, "reasoning_content": told}
    assert with_reasoning(turn, rule) == {**said("assistant", "a"), **expected}
    assert with_reasoning(USER, rule) is USER


@given(
    st.recursive(
        st.integers() | st.text(),
        lambda one: (
            st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=3), one, max_size=3)
        ),
        max_leaves=9,
    )
)
def test_sorted_keys_change_only_the_order(value: object) -> None:
    made = with_sorted_keys(value)
    assert made == value
    assert json.dumps(made) == json.dumps(value, sort_keys=True)


def test_value_that_is_nested_too_deeply_is_refused() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError, match="template_failed"):
        with_sorted_keys(deep)
