"""An empty list of tools, which vLLM's messages pass on to the template, and others do not."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from extproc.base.engine import VLLM, Engine, Release
from extproc.base.errors import RequestError
from extproc.proof.golden_forms import own_prompts
from extproc.requests.dialect import NEWEST, Dialect, dialect_of
from extproc.requests.prompt import EMPTY_TOOLS, Chat, forms_of
from extproc.requests.request import CHAT_PATH, parse
from extproc.tokenizing.kimi_chat import as_kimis
from extproc.tokenizing.kimi_code import KimiCode
from extproc.tokenizing.tokens import Tokenizer
from tests.extproc.sglang.test_continuation import USER, tokenizer
from tests.extproc.sglang.test_recorded_prompts import dialect

MESSAGES = "/v1/messages"
BODY: dict[str, Any] = {"max_tokens": 9, "messages": [USER]}
READS_TOOLS = "{% if tools %}tools{% endif %}{{ messages[0].content }}"
COUNTS_TOOLS = "{% if tools is not none %}tools{% endif %}{{ messages[0].content }}"
FAILS_WITHOUT = "{{ tools | length }}{{ messages[0].content }}"


def chat(rules: Dialect | None = NEWEST, **fields: Any) -> Chat:
    body = json.dumps({**BODY, "tools": [], **fields}).encode()
    (prompt,) = parse(MESSAGES, body, lambda _: rules).prompts
    assert isinstance(prompt, Chat)
    return prompt


def shown(model: Tokenizer, prompt: Chat) -> tuple[str, int]:
    started = model.start(prompt)
    return model.text_of(started.finish()), started.forms


@pytest.mark.parametrize(
    ("template", "text", "forms"),
    [
        (READS_TOOLS, USER["content"], 0),
        (COUNTS_TOOLS, "tools" + USER["content"], EMPTY_TOOLS),
        (FAILS_WITHOUT, "0" + USER["content"], EMPTY_TOOLS),
    ],
)
def test_list_that_changes_a_prompt_needs_proof(
    tmp_path: Path, template: str, text: str, forms: int
) -> None:
    model = tokenizer(tmp_path, template)
    assert shown(model, chat()) == (text, forms)
    assert shown(model, chat(tool_choice={"type": "auto"})) == (text, forms)


@pytest.mark.parametrize(("template", "number"), [(READS_TOOLS, 0), (COUNTS_TOOLS, 1)])
def test_list_is_asked_for_where_it_needs_proof(tmp_path: Path, template: str, number: int) -> None:
    own = own_prompts(tokenizer(tmp_path, template), NEWEST, 0)
    assert [one.forms for one in own].count(EMPTY_TOOLS) == number


@pytest.mark.parametrize("minor", [19, 24, 27, 32])
def test_list_reaches_the_template_in_all_releases(minor: int) -> None:
    assert chat(dialect_of(Engine(VLLM, Release(0, minor)))).variables["tools"] == []


def test_list_is_left_out_by_sglang() -> None:
    assert "tools" not in chat(dialect()).variables
    assert not forms_of(chat(dialect())) & EMPTY_TOOLS


@pytest.mark.parametrize("choice", ["none", "any", "tool"])
def test_list_of_whose_use_something_is_said_is_refused(choice: str) -> None:
    with pytest.raises(RequestError, match="unsupported_tools"):
        chat(tool_choice={"type": choice, "name": "f"})


def test_list_is_refused_where_nothing_is_known_of_the_engine() -> None:
    with pytest.raises(RequestError, match="unsupported_tools"):
        chat(None)


def test_list_is_refused_in_chat_completions() -> None:
    body = json.dumps({**BODY, "tools": []}).encode()
    with pytest.raises(RequestError, match="unsupported_tools"):
        parse(CHAT_PATH, body, lambda _: NEWEST)


def test_list_is_refused_where_code_would_read_it() -> None:
    code = KimiCode("", 0, sorts_tools=False, writes_tools=True, switches={})
    with pytest.raises(RequestError, match="unsupported_tools"):
        as_kimis(chat(), code)


def test_list_is_refused_with_media(tmp_path: Path) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    turn = {"role": "user", "content": [{"type": "image", "source": source}]}
    prompt = chat(messages=[turn])
    assert prompt.has_media
    with pytest.raises(RequestError, match="unsupported_tools"):
        tokenizer(tmp_path, READS_TOOLS).start(prompt)


def test_list_is_refused_by_models_rendered_in_code(tmp_path: Path) -> None:
    model = tokenizer(tmp_path, config=json.dumps({"architectures": ["DeepseekV32ForCausalLM"]}))
    assert model.renders_in_code
    model.start(msgspec.structs.replace(chat(), variables={"add_generation_prompt": True}))
    with pytest.raises(RequestError, match="unsupported_tools"):
        model.start(chat())
