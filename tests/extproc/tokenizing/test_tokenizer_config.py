"""What tokenizer_config.json says about the special tokens around a text."""

from typing import Any

import pytest

from extproc.tokenizing.tokenizer_config import may_be_framed_otherwise
from extproc.tokenizing.tokenizer_layout import Frame

LLAMA = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
GEMMA = {**LLAMA, "tokenizer_class": "GemmaTokenizer"}
NEOX = {**LLAMA, "tokenizer_class": "GPTNeoXTokenizerFast"}
IDS = {"<s>": 1, "</s>": 2}


@pytest.mark.parametrize(
    ("settings", "frame", "expected"),
    [
        (LLAMA, Frame(), True),
        (LLAMA, Frame((1,)), False),
        (LLAMA, Frame((1,), (2,)), True),
        (LLAMA, None, True),
        ({**LLAMA, "add_eos_token": True}, Frame((1,), (2,)), False),
        ({**LLAMA, "add_bos_token": None}, Frame(), True),
        ({**LLAMA, "bos_token": None}, Frame(), False),
        ({**GEMMA, "add_bos_token": False}, Frame(), False),
        ({**GEMMA, "add_bos_token": False}, Frame((1,)), True),
        (NEOX, Frame(), False),
        (NEOX, Frame((1,)), True),
        ({**NEOX, "add_bos_token": True}, Frame(), True),
        ({**NEOX, "add_eos_token": True}, Frame(), True),
        ({"tokenizer_class": "LlamaTokenizer"}, Frame(), True),
        ({"tokenizer_class": "CohereTokenizer"}, Frame(), True),
        ({**LLAMA, "tokenizer_class": "Qwen2Tokenizer", "add_bos_token": True}, Frame(), False),
        ({}, Frame(), False),
    ],
)
def test_text_may_be_framed_otherwise_where_settings_and_tokenizer_disagree(
    settings: dict[str, Any], frame: Frame | None, expected: bool
) -> None:
    assert may_be_framed_otherwise(settings, frame, IDS.get) is expected
