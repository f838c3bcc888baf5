"""SGLang goes on with the model's last turn: its text is tokenized apart, behind the others."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from extproc.base.errors import RequestError
from extproc.config.schema import Model
from extproc.requests.prompt import CONVERTED, Chat, forms_of
from extproc.requests.request import CHAT_PATH, parse
from extproc.tokenizing.tokens import Tokenizer
from kvtools.simulator.settings import TINY_MODEL
from tests.extproc.sglang.test_recorded_prompts import dialect

USER = {"role": "user", "content": "Why is the sky blue?"}
ENDS_IN_A_WORD = "{% for m in messages %}{{ m.content }} {% endfor %}th"
BEGINS_WITH_ITS_TOKEN = "<|im_start|>{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"


def chat(content: object, user: dict[str, Any] = USER) -> Chat:
    messages = [user, {"role": "assistant", "content": content}]
    body = json.dumps({"messages": messages, "continue_final_message": True}).encode()
    (prompt,) = parse(CHAT_PATH, body, lambda _: dialect()).prompts
    assert isinstance(prompt, Chat)
    return prompt


def tokenizer(
    folder: Path, template: str | None = None, *, adds: str = "", config: str = ""
) -> Tokenizer:
    """Returns the tiny model, with a template, a token that it adds to texts, and a
    config.json, if given."""
    shutil.copytree(TINY_MODEL, folder / "m")
    if template is not None:
        (folder / "m/chat_template.jinja").write_text(template)
    if config:
        (folder / "m/config.json").write_text(config)
    if adds:
        file = folder / "m/tokenizer.json"
        read = json.loads(file.read_text())
        (number,) = [one["id"] for one in read["added_tokens"] if one["content"] == adds]
        added, text = (
            {"SpecialToken": {"id": adds, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        )
        read["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [added, text],
            "pair": [added, text, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {adds: {"id": adds, "ids": [number], "tokens": [adds]}},
        }
        file.write_text(json.dumps(read))
    loaded = Tokenizer.load(Model("m", tokenizer=str(folder / "m")))
    assert loaded is not None
    return loaded


@pytest.mark.parametrize("content", ["Because light", " is\n\nscattered", "", None])
def test_last_turn_is_behind_the_prompt_of_the_others(tmp_path: Path, content: str | None) -> None:
    one = tokenizer(tmp_path)
    continued = chat(content)
    assert forms_of(continued) & CONVERTED
    ids = one.encode(continued).tolist()
    before = json.dumps({"messages": [USER]}).encode()
    (others,) = parse(CHAT_PATH, before, lambda _: dialect()).prompts
    expected = one.encode(others).tolist()
    assert ids[: len(expected)] == expected
    assert one.text_of(ids[len(expected) :]) == (content or "")


def test_text_that_is_cut_otherwise_with_the_prompt_is_refused(tmp_path: Path) -> None:
    one = tokenizer(tmp_path, ENDS_IN_A_WORD)
    assert one.text_of(one.encode(chat(" of it"))).endswith(" th of it")
    with pytest.raises(RequestError, match="unsupported_continuation"):
        one.encode(chat("e"))


@pytest.mark.parametrize(
    ("template", "adds", "is_keyed"),
    [
        (BEGINS_WITH_ITS_TOKEN, "<|im_start|>", True),
        (BEGINS_WITH_ITS_TOKEN, "<|im_end|>", False),
        (ENDS_IN_A_WORD, "<|im_start|>", False),
    ],
)
def test_token_before_texts_has_to_be_that_of_the_prompt(
    tmp_path: Path, template: str, adds: str, is_keyed: bool
) -> None:
    one = tokenizer(tmp_path, template, adds=adds)
    if is_keyed:
        assert one.text_of(one.encode(chat("It is"))).endswith("<|im_end|>It is")
    else:
        with pytest.raises(RequestError, match="unsupported_continuation"):
            one.encode(chat(" is"))


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("content", "user"),
    [
        ([{"type": "text", "text": "a"}], USER),
        ("a", {"role": "user", "content": [IMAGE]}),
    ],
)
def test_parts_and_media_are_not_continued(content: object, user: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="unsupported_continuation"):
        chat(content, user)
