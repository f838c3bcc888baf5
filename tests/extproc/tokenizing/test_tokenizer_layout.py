import json
from typing import Any

import msgspec
import pytest

from extproc.tokenizing.tokenizer_layout import (
    MAX_ADDED_CHARACTERS,
    MAX_ADDED_TOKENS,
    AddedToken,
    Frame,
    Layout,
    frame,
    read,
    tokenizes_piecewise,
)

BPE: dict[str, Any] = {"type": "BPE", "dropout": None, "vocab": {"a": 0}, "merges": []}
TEMPLATE: dict[str, Any] = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "</s>", "type_id": 0}},
    ],
    "special_tokens": {
        "<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]},
        "</s>": {"id": "</s>", "ids": [2, 3], "tokens": ["</s>", "!"]},
    },
}


def layout(**parts: Any) -> Layout:
    return read(json.dumps({"model": BPE, **parts}))


def framed_by(step: Any) -> Frame | None:
    return frame(layout(post_processor=step))


def test_read_finds_added_tokens_with_their_flags() -> None:
    token = {"id": 7, "content": "<s>", "lstrip": True, "normalized": False, "special": True}
    expected = AddedToken(7, "<s>", lstrip=True, normalized=False, special=True)
    assert layout(added_tokens=[token]).added_tokens == [expected]


def test_read_refuses_other_files() -> None:
    with pytest.raises(msgspec.DecodeError):
        read("{}")


@pytest.mark.parametrize(
    ("count", "characters"), [(MAX_ADDED_TOKENS + 1, 1), (1, MAX_ADDED_CHARACTERS + 1)]
)
def test_read_refuses_too_many_and_too_long_added_tokens(count: int, characters: int) -> None:
    tokens = [{"id": 1, "content": "a" * characters}]
    with pytest.raises(ValueError, match="added token"):
        layout(added_tokens=tokens * count)
    assert layout(added_tokens=[{"id": 1, "content": "a" * (characters - 1)}] * (count - 1 or 1))


@pytest.mark.parametrize("name", ["Prepend", "Strip", "NFKC"])
def test_tokenizes_piecewise_is_true_for_known_normalizers(name: str) -> None:
    inner = {"type": "Sequence", "normalizers": [{"type": name}]}
    assert tokenizes_piecewise(layout(normalizer=inner, pre_tokenizer={"type": "Metaspace"}))


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Novel"}},
        {"pre_tokenizer": {"type": "Novel"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Novel"}]}},
        {"pre_tokenizer": {"type": "Sequence"}},
        {"model": {"type": "Novel"}},
        {"model": {"type": "BPE", "dropout": 0.1}},
    ],
)
def test_tokenizes_piecewise_is_false_for_unknown_steps(parts: dict[str, Any]) -> None:
    assert not tokenizes_piecewise(layout(**parts))


def test_frame_is_empty_without_a_post_processor() -> None:
    assert frame(layout()) == Frame()
    assert framed_by({"type": "ByteLevel"}) == Frame()


def test_frame_of_a_template_names_both_sides() -> None:
    assert framed_by(TEMPLATE) == Frame((1,), (2, 3))
    sequence = {"type": "Sequence", "processors": [{"type": "ByteLevel"}, TEMPLATE]}
    assert framed_by(sequence) == Frame((1,), (2, 3))


@pytest.mark.parametrize("name", ["RobertaProcessing", "BertProcessing"])
def test_frame_of_an_older_processor_names_both_sides(name: str) -> None:
    assert framed_by({"type": name, "cls": ["[CLS]", 5], "sep": ["[SEP]", 6]}) == Frame((5,), (6,))


@pytest.mark.parametrize(
    "step",
    [
        {"type": "Novel"},
        {"type": "Sequence"},
        {"type": "Sequence", "processors": [TEMPLATE, TEMPLATE]},
        {"type": "Sequence", "processors": [{"type": "Novel"}]},
        {**TEMPLATE, "single": TEMPLATE["single"][1:] * 2},
        {**TEMPLATE, "single": TEMPLATE["single"][:1]},
        {**TEMPLATE, "special_tokens": {}},
    ],
)
def test_frame_of_an_unknown_step_is_none(step: dict[str, Any]) -> None:
    assert framed_by(step) is None
