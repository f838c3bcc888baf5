"""What tokenizer_config.json adds to tokenizer.json."""

from typing import Any

import pytest

from extproc.tokenizing.tokenizer_config import (
    added_by_settings,
    may_begin_otherwise,
)


def test_special_tokens_that_only_the_settings_name_are_added_in_order() -> None:
    settings = {
        "mask_token": "<m>",
        "eos_token": {"content": "<e>", "lstrip": False},
        "bos_token": "<known>",
        "pad_token": "<e>",
        "unk_token": None,
        "additional_special_tokens": ["<x>", {"content": "<y>"}, 5],
        "extra_special_tokens": {"image": "<i>"},
    }
    assert added_by_settings(settings, {"<known>"}) == ["<e>", "<m>", "<x>", "<y>"]
    assert added_by_settings({}, ()) == []


@pytest.mark.parametrize(
    ("settings", "is_first", "expected"),
    [
        ({"tokenizer_class": "LlamaTokenizerFast"}, False, True),
        ({"tokenizer_class": "LlamaTokenizerFast"}, True, False),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": None}, False, True),
        ({"tokenizer_class": "GemmaTokenizer", "add_bos_token": False}, False, False),
        ({"tokenizer_class": "GemmaTokenizer", "add_bos_token": False}, True, True),
        ({"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": True}, False, False),
        ({}, False, False),
    ],
)
def test_text_may_begin_otherwise_where_settings_and_tokenizer_disagree(
    settings: dict[str, Any], is_first: bool, expected: bool
) -> None:
    assert may_begin_otherwise(settings, is_first=is_first) is expected
