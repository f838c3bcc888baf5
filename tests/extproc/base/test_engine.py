"""The releases that engines name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.engine import (
    Engine,
    PromptArguments,
    Release,
    changes_prompts,
    release_of,
)

numbers = st.integers(0, 999_999)


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.32.0", Release(0, 32, 0)),
        ("v0.5.9", Release(0, 5, 9)),
        ("0.32.1rc1.dev3+g1a2b3c4.cpu", Release(0, 32, 1)),
        ("1.2", Release(1, 2, 0)),
        ("0.24.0+cpu", Release(0, 24, 0)),
        ("", None),
        ("latest", None),
        ("7", None),
        ("0.1234567", None),
    ],
)
def test_release_is_read_from_a_version(version: str, release: Release | None) -> None:
    assert release_of(version) == release


@given(numbers, numbers, numbers)
def test_release_is_read_as_it_is_written(major: int, minor: int, patch: int) -> None:
    release = Release(major, minor, patch)
    assert release_of(str(release)) == release


@given(st.text())
def test_version_of_any_text_is_a_release_or_none(version: str) -> None:
    assert isinstance(release_of(version), Release | None)


def test_engine_is_written_with_its_release() -> None:
    assert str(Engine("vllm", Release(0, 32))) == "vllm 0.32.0"


@pytest.mark.parametrize(
    "arguments",
    [
        PromptArguments(chat_template="a.jinja"),
        PromptArguments(hf_chat_template_name="tool_use"),
    ],
)
def test_arguments_for_templates_change_prompts(arguments: PromptArguments) -> None:
    assert changes_prompts(arguments, is_given=False)


def test_arguments_that_the_router_knows_leave_prompts_as_they_are() -> None:
    parsers = PromptArguments(tool_call_parser="qwen", default_chat_template_kwargs='{"a":1}')
    assert not changes_prompts(None, is_given=False)
    assert not changes_prompts(parsers, is_given=False)
    assert not changes_prompts(PromptArguments(chat_template="a.jinja"), is_given=True)
