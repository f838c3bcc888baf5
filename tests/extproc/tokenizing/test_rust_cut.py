"""Texts for which vLLM's Rust front end has other ids than the library."""

import json
from typing import Any

import pytest

from extproc.tokenizing.rust_cut import may_be_cut_otherwise
from extproc.tokenizing.tokenizer_layout import read

GPT2 = {"type": "ByteLevel", "add_prefix_space": False}
SPLIT = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}


def may_differ(pre_tokenizer: Any, text: str) -> bool:
    layout = {"model": {"type": "BPE"}, "pre_tokenizer": pre_tokenizer}
    return may_be_cut_otherwise(read(json.dumps(layout)), text)


@pytest.mark.parametrize(
    ("text", "differs"),
    [
        ("it isn't so", False),
        ("IT ISN'T SO", True),
        ("'SO'", True),
        ("we'll, WE'LL", True),
        ("a'x", False),
        ("no mark", False),
    ],
)
def test_contraction_of_large_letters_differs_where_gpt2_s_rule_cuts(
    text: str, differs: bool
) -> None:
    assert may_differ(GPT2, text) is differs
    assert may_differ({"type": "Sequence", "pretokenizers": [SPLIT, GPT2]}, text) is differs
    assert not may_differ(SPLIT, text)
    assert not may_differ(None, text)
