"""Tokenizers that some releases of transformers rebuild, and cut texts otherwise."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from extproc.tokenizing.split_patterns import KIMI, QWEN2, QWEN3_5, TEKKEN
from extproc.tokenizing.tokenizer_classes import may_be_cut_otherwise
from extproc.tokenizing.tokenizer_layout import Layout, read
from tests.imports import ROOT

JUDGED = json.loads(Path(__file__).with_name("tokenizer_classes.json").read_text())
CASES = [
    (kind, name, found)
    for kind, by_found in JUDGED["found"].items()
    for found, names in by_found.items()
    for name in names
]
TINY = json.loads((ROOT / "kvtools/simulator/tiny_model/tokenizer.json").read_text())

WHOLE = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
MARKED = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
FIRST = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
NFC = {"type": "NFC"}


def by_pattern(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    rest = {**WHOLE, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [{**split, "invert": False}, rest]}


# How the files of known models cut texts: normalizer and pre-tokenizer.
FILES: Mapping[str, tuple[Any, Any]] = {
    "gpt2": (None, WHOLE),
    "gpt_neox": (NFC, WHOLE),
    "cohere": (
        NFC,
        {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, WHOLE],
        },
    ),
    "qwen2": (NFC, by_pattern(QWEN2)),
    "qwen3_5": (NFC, by_pattern(QWEN3_5)),
    "llama3": (None, by_pattern(QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|"))),
    "tekken": (None, by_pattern(TEKKEN)),
    "kimi": (None, by_pattern(KIMI)),
}
CLASSES = {
    "gpt2": "GPT2TokenizerFast",
    "gpt_neox": "GPTNeoXTokenizerFast",
    "cohere": "CohereTokenizerFast",
    "qwen2": "Qwen2Tokenizer",
    "qwen3_5": "Qwen3_5Tokenizer",
}


def file_of(normalizer: Any, cut: Any, **model: object) -> str:
    changed = {**TINY["model"], **model}
    return json.dumps({**TINY, "model": changed, "normalizer": normalizer, "pre_tokenizer": cut})


def layout_of(normalizer: Any, cut: Any, **model: object) -> Layout:
    return read(file_of(normalizer, cut, **model))


ALONE = layout_of(None, by_pattern("zebra"))  # cuts as no class does


@pytest.mark.parametrize(("kind", "name", "found"), CASES)
def test_file_is_doubted_wherever_a_release_rebuilds_it(
    kind: str, name: str | None, found: str
) -> None:
    settings = {} if name is None else {"tokenizer_class": name}
    if "r" in found:
        assert may_be_cut_otherwise(settings, {"model_type": kind}, ALONE)
    elif name == "PreTrainedTokenizerFast":
        assert not may_be_cut_otherwise(settings, {"model_type": kind}, ALONE)


@pytest.mark.parametrize(("kind", "name"), CLASSES.items())
def test_file_that_cuts_as_its_class_does_is_not_doubted(kind: str, name: str) -> None:
    config = {"model_type": "llama", "tokenizer_class": name}
    assert not may_be_cut_otherwise({}, config, layout_of(*FILES[kind]))
    others = [file for file in FILES if file != kind]
    assert all(may_be_cut_otherwise({}, config, layout_of(*FILES[one])) for one in others)
    assert may_be_cut_otherwise({}, config, layout_of(*FILES[kind], ignore_merges=True))


PAIRS = {"fuse_unk": True, "byte_fallback": True}
GEMMA = {"tokenizer_class": "GemmaTokenizerFast"}
LLAMA = {"tokenizer_class": "LlamaTokenizer"}
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}
AT_SPACES = {**SPLIT, "invert": False}


@pytest.mark.parametrize(
    ("settings", "layout", "expected"),
    [
        (GEMMA, layout_of(MARKED, AT_SPACES, unk_token="<unk>", **PAIRS), False),
        (GEMMA, layout_of(MARKED, None, unk_token="<unk>", **PAIRS), False),
        (GEMMA, layout_of(MARKED, None, unk_token="<u>", **PAIRS), True),
        ({**GEMMA, "unk_token": "<u>"}, layout_of(MARKED, None, unk_token="<u>", **PAIRS), False),
        (LLAMA, layout_of(None, FIRST, **PAIRS), False),
        ({**LLAMA, "legacy": True}, layout_of(None, FIRST, **PAIRS), True),
        ({**LLAMA, "add_prefix_space": True}, layout_of(None, FIRST, **PAIRS), True),
        (FAST, layout_of(None, {**WHOLE, "add_prefix_space": True}), True),
        ({**FAST, "add_prefix_space": True}, layout_of(None, WHOLE), True),
        ({**FAST, "auto_map": {"AutoTokenizer": ["a.B", None]}}, layout_of(None, WHOLE), True),
        ({**FAST, "auto_map": ["a.B", None]}, layout_of(None, WHOLE), True),
        ({**FAST, "auto_map": {"AutoProcessor": "a.B"}}, layout_of(None, WHOLE), False),
        ({"tokenizer_class": ["odd"]}, layout_of(None, WHOLE), True),
        (FAST, layout_of({"type": "Sequence", "normalizers": []}, WHOLE), False),
    ],
)
def test_settings_decide_with_the_file(
    settings: dict[str, Any], layout: Layout, expected: bool
) -> None:
    assert may_be_cut_otherwise(settings, {"model_type": "llama"}, layout) is expected


def test_file_without_any_settings_is_the_operators_own() -> None:
    assert not may_be_cut_otherwise({}, {}, layout_of(None, WHOLE))
    assert may_be_cut_otherwise({}, {"model_type": "qwen2"}, layout_of(None, WHOLE))
    assert not may_be_cut_otherwise({}, {"model_type": "qwen2"}, layout_of(*FILES["qwen2"]))
