"""Prompts that vLLM 0.33's Rust front end made, without an engine, are made here as well.

vllm_0.33.0_prompts.jsonl: one body a line, with what `vllm-rs render` made of it, for each template
and each model that it renders in code; null where it refused. vllm_0.33.0_minijinja.json: snippets
of templates, with what it made of them; `not_keyed` are those that are refused here.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from extproc.base.engine import RUST, VLLM, Engine, Release
from extproc.base.errors import RequestError
from extproc.renderers.deepseek_v4 import DeepSeekV4, DeepSeekV41
from extproc.renderers.deepseek_v32 import DeepSeekV32
from extproc.renderers.renderer import Renderer
from extproc.requests import rust_chat
from extproc.requests.dialect import dialect_of
from extproc.requests.prompt import FRONT_END, Chat
from extproc.requests.request import CHAT_PATH, parse
from extproc.templates.bounds import Tick
from extproc.templates.rust_template import RustTemplate, of_file

HERE = Path(__file__).parent
ROWS = [json.loads(one) for one in (HERE / "vllm_0.33.0_prompts.jsonl").read_text().splitlines()]
SNIPPETS = json.loads((HERE / "vllm_0.33.0_minijinja.json").read_text())
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
DIALECT = dialect_of(Engine(VLLM, Release(0, 33), RUST))
IN_CODE: dict[str, Renderer] = {
    "deepseek_v32": DeepSeekV32(),
    "deepseek_v4": DeepSeekV4(),
    "deepseek_v41": DeepSeekV41(),
}

# Why a prompt that the front end makes is not known here.
NOT_KEYED = {
    "unsupported_client_template",
    "unsupported_template_kwargs",
    "unsupported_tool_arguments",
    "unsupported_tools",
}


@cache
def template(name: str) -> RustTemplate:
    return RustTemplate(of_file((HERE / f"{name}.jinja").read_text()), SPECIAL)


def read(body: dict[str, Any]) -> Chat:
    (chat,) = parse(CHAT_PATH, json.dumps(body).encode(), lambda _: DIALECT).prompts
    assert isinstance(chat, Chat)
    return chat


def prompt(body: dict[str, Any], name: str) -> str:
    chat = read(body)
    if name in IN_CODE:
        text, forms = IN_CODE[name].render(chat, budget_seconds=1)
    else:
        text, forms = template(name).render(chat, Tick(1))
    assert forms & FRONT_END
    return text


@pytest.mark.parametrize("name", ["text", "parts", *IN_CODE])
def test_prompt_is_the_front_end_s_own(name: str) -> None:
    kept, refused = 0, []
    for row in ROWS:
        try:
            told = prompt(row["body"], name)
        except RequestError as error:
            refused += [error.reason] if row[name] is not None else []
            continue
        if row[name] is not None:
            assert told == row[name], row["body"]
            kept += 1
    assert set(refused) <= NOT_KEYED
    assert kept > 0.9 * (kept + len(refused))


def rendered(source: str) -> str:
    body = {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}],
        "chat_template_kwargs": SNIPPETS["values"],
    }
    (chat,) = rust_chat.parse(json.dumps(body).encode(), DIALECT).prompts
    assert isinstance(chat, Chat)
    return RustTemplate(f"[{source}]", SPECIAL).render(chat, Tick(10))[0][1:-1]


def test_snippets_of_templates_write_what_minijinja_does() -> None:
    told = {source: rendered(source) for source in SNIPPETS["rendered"]}
    assert told == SNIPPETS["rendered"]


@pytest.mark.parametrize("source", SNIPPETS["not_keyed"])
def test_snippet_that_is_not_followed_is_refused(source: str) -> None:
    with pytest.raises(RequestError):
        rendered(source)
