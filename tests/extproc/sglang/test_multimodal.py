"""SGLang tokenizes a multimodal model's conversations as texts, with the tokens that these get."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from extproc.requests.dialect import Dialect
from extproc.requests.prompt import CONVERTED
from extproc.requests.request import CHAT_PATH, parse
from extproc.tokenizing.sglang_multimodal import is_multimodal
from extproc.tokenizing.tokens import Tokenizer
from tests.extproc.sglang.test_continuation import USER, tokenizer
from tests.extproc.sglang.test_recorded_prompts import dialect

FIRST = "<|im_start|>"
TEMPLATE = FIRST + "{% for m in messages %}{{ m.content }}{% endfor %}"
MISTRAL, GEMMA = "Mistral3ForConditionalGeneration", "Gemma3ForConditionalGeneration"


@pytest.mark.parametrize(
    ("config", "enabled", "expected"),
    [
        ({"architectures": [MISTRAL]}, None, True),
        ({"architectures": [MISTRAL]}, False, False),
        ({"architectures": [GEMMA]}, None, False),
        ({"architectures": [GEMMA]}, True, True),
        ({"architectures": [MISTRAL], "language_model_only": True}, True, False),
        ({"architectures": ["LlamaForCausalLM"]}, True, False),
        ({"architectures": [7]}, True, False),
        ({"architectures": []}, True, False),
        ({}, True, False),
    ],
)
def test_architecture_and_argument_say_what_is_multimodal(
    config: Mapping[str, Any], enabled: bool | None, expected: bool
) -> None:
    assert is_multimodal(config, enabled=enabled) is expected


def load(folder: Path, architecture: str, *, adds: str = FIRST) -> Tokenizer:
    config = json.dumps({"architectures": [architecture]})
    return tokenizer(folder, TEMPLATE, adds=adds, config=config)


def text_of(model: Tokenizer, rules: Dialect | None, path: str = CHAT_PATH, **body: Any) -> str:
    sent = json.dumps({"messages": [USER], **body}).encode()
    (prompt,) = parse(path, sent, lambda _: rules).prompts
    return model.text_of(model.encode(prompt))


@pytest.mark.parametrize("path", [CHAT_PATH, "/v1/messages"])
def test_text_of_a_multimodal_model_begins_with_two_first_tokens(tmp_path: Path, path: str) -> None:
    model = load(tmp_path, MISTRAL)
    assert text_of(model, dialect(), path) == FIRST + FIRST + USER["content"]
    assert text_of(model, None, path) == FIRST + USER["content"]
    off = dialect(enable_multimodal=False)
    assert text_of(model, off, path) == FIRST + USER["content"]


def test_gemma_3_is_multimodal_only_if_the_engine_was_told_so(tmp_path: Path) -> None:
    model = load(tmp_path, GEMMA)
    assert text_of(model, dialect()) == FIRST + USER["content"]
    enabled = dialect(enable_multimodal=True, reasoning_parser="qwen3")
    assert text_of(model, enabled) == FIRST + FIRST + USER["content"]


def test_tokens_that_are_added_need_proof(tmp_path: Path) -> None:
    model = load(tmp_path, MISTRAL)
    (prompt,) = parse(
        CHAT_PATH, json.dumps({"messages": [USER]}).encode(), lambda _: dialect()
    ).prompts
    assert model.start(prompt).forms & CONVERTED


def test_tokenizer_that_adds_none_writes_none(tmp_path: Path) -> None:
    model = load(tmp_path, MISTRAL, adds="")
    (prompt,) = parse(
        CHAT_PATH, json.dumps({"messages": [USER]}).encode(), lambda _: dialect()
    ).prompts
    assert model.start(prompt).forms == 0
    assert text_of(model, dialect()) == FIRST + USER["content"]


def test_text_that_is_continued_begins_with_two_first_tokens(tmp_path: Path) -> None:
    model, turn = load(tmp_path, MISTRAL), {"role": "assistant", "content": " Because"}
    text = text_of(model, dialect(), messages=[USER, turn], continue_final_message=True)
    assert text == FIRST + FIRST + USER["content"] + " Because"
