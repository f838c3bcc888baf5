"""The engine's own arguments for templates hold where a request sets no others."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from extproc.config.schema import Model
from extproc.requests.dialect import NEWEST
from extproc.requests.prompt import Chat
from extproc.requests.request import parse
from extproc.tokenizing.tokens import Tokenizer
from tests.extproc.tokenizing.token_directories import write

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{{ '<a>' if thinking is defined and thinking else '<b>' }}"
    "{{ 'c' if deep is defined and deep.er }}"
)
USER = {"role": "user", "content": "ab"}
OFF, ON = [2, 4], [2, 8]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/messages": {"messages": [USER], "max_tokens": 1},
    "/v1/responses": {"input": "ab"},
}


def tokenizer_with(tmp_path: Path, **keywords: Any) -> Tokenizer:
    tokens = [{"content": text, "special": True, "normalized": False} for text in ("<b>", "<a>")]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    write(
        tmp_path / "m",
        {
            "tokenizer.json": [{**flags, **token} for token in tokens],
            "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
            "config.json": {},
        },
    )
    (tmp_path / "m" / "chat_template.jinja").write_text(TEMPLATE)
    model = Model("m", tokenizer=str(tmp_path / "m"), chat_template_kwargs=keywords or None)
    tokenizer = Tokenizer.load(model)
    assert tokenizer is not None
    return tokenizer


def ids(tokenizer: Tokenizer, path: str, body: Mapping[str, Any]) -> list[int]:
    (prompt,) = parse(path, json.dumps(body).encode(), lambda _: NEWEST).prompts
    assert isinstance(prompt, Chat)
    return tokenizer.encode(prompt).tolist()


@pytest.mark.parametrize("path", BODIES)
def test_every_api_of_conversations_gets_them(tmp_path: Path, path: str) -> None:
    assert ids(tokenizer_with(tmp_path, thinking=True), path, BODIES[path]) == ON


@pytest.mark.parametrize("path", BODIES)
def test_without_them_templates_get_none(tmp_path: Path, path: str) -> None:
    assert ids(tokenizer_with(tmp_path), path, BODIES[path]) == OFF


@pytest.mark.parametrize(("own", "expected"), [({"thinking": False}, OFF), ({"deep": {}}, ON)])
def test_arguments_of_a_request_win_one_by_one(
    tmp_path: Path, own: dict[str, Any], expected: list[int]
) -> None:
    tokenizer = tokenizer_with(tmp_path, thinking=True, deep={"er": True})
    chat = {"messages": [USER], "chat_template_kwargs": own}
    tail = [] if "deep" in own else [3]
    assert ids(tokenizer, "/v1/chat/completions", chat) == expected + tail


def test_embeddings_take_only_their_own(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, thinking=True)
    body = {"messages": [USER], "add_generation_prompt": True}
    assert ids(tokenizer, "/v1/embeddings", body) == OFF
    assert ids(tokenizer, "/v1/chat/completions", {"messages": [USER]}) == ON
