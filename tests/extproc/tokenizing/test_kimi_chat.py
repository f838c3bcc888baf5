"""What Kimi's code does to a conversation before its template gets it."""

import json
from pathlib import Path
from typing import Any

import pytest

from extproc.base.errors import RequestError
from extproc.config.schema import Model
from extproc.requests.dialect import NEWEST
from extproc.requests.prompt import IN_CODE, Chat
from extproc.requests.request import CHAT_PATH, parse
from extproc.tokenizing.kimi_chat import as_kimis
from extproc.tokenizing.kimi_code import KimiCode, read_code
from extproc.tokenizing.tokens import Tokenizer
from tests.extproc.small_models import KIMI_CODE, write_model

K2 = KimiCode("", 1, sorts_tools=True, writes_tools=False)
K25 = KimiCode("", 1, sorts_tools=True, writes_tools=True, switches={"thinking": True})
PLAIN = KimiCode("", 1, sorts_tools=False, writes_tools=False)

PARAMETERS = {"type": "object", "properties": {"word": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
UNTYPED = {"properties": {"word": {"description": "any"}}}
UNKNOWN = {"properties": {"word": {"type": 5}}}

CODE = """
    def apply_chat_template(self, conversation, tools=None, tokenize: bool = False,
                            add_generation_prompt: bool = True, thinking: bool = True,
                            preserve_thinking: bool = False, top: int = 5):
        return encode_tools_to_typescript_style(deep_sort_dict(tools))
"""
TEMPLATE = (
    "{% if tools %}{{ tools_ts_str or tools | tojson }}{% endif %}"
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text or '<|im_middle|>' }}{% endfor %}"
    "{% endif %}{% endfor %}{% if thinking %}<think>{% endif %}"
)


def tools_with(parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {**TOOL["function"], "parameters": parameters}}]  # type: ignore[dict-item]


def variables(code: KimiCode, **given: Any) -> dict[str, Any]:
    return as_kimis(Chat([], given), code)[0].variables


def test_tools_are_sorted_or_written_as_the_code_says() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "d"}}]
    assert json.dumps(variables(PLAIN, tools=tools)["tools"]) == json.dumps(tools)
    assert list(variables(K2, tools=tools)["tools"][0]["function"]) == ["description", "name"]
    assert variables(K25, tools=tools)["tools_ts_str"].endswith("type f = (_: {}) => any;\n}\n")
    assert "tools_ts_str" not in variables(K25, tools=tools_with(UNTYPED))
    with pytest.raises(RequestError, match="unsupported_tools"):
        variables(K25, tools=tools_with(UNKNOWN))


@pytest.mark.parametrize(
    ("code", "given", "form"),
    [(K2, {"tools": [TOOL]}, 0), (K25, {"tools": [TOOL]}, IN_CODE), (K25, {}, 0)],
)
def test_tools_that_the_code_writes_need_a_proof(
    code: KimiCode, given: dict[str, Any], form: int
) -> None:
    assert as_kimis(Chat([], given), code)[1] == form


def test_requests_own_switch_counts() -> None:
    assert variables(K25) == {"thinking": True}
    assert variables(K25, thinking=False) == {"thinking": False}


def test_switches_are_read_of_the_code() -> None:
    code = read_code((KIMI_CODE.partition("    def apply_chat_template")[0] + CODE).encode())
    assert code.switches == {"thinking": True, "preserve_thinking": False}
    assert (code.sorts_tools, code.writes_tools) == (True, True)


def test_tools_stand_before_images_as_they_do_without_them(tmp_path: Path) -> None:
    write_model("kimi-k2", tmp_path)
    code = KIMI_CODE.partition("    def apply_chat_template")[0] + CODE
    (tmp_path / "tokenization_kimi.py").write_text(code)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer.load(Model("m", tokenizer=str(tmp_path)))
    assert tokenizer is not None
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for content in ("look", [{"type": "text", "text": "look"}, url]):
        body = {"messages": [{"role": "user", "content": content}], "tools": [TOOL]}
        (chat,) = parse(CHAT_PATH, json.dumps(body).encode(), lambda _: NEWEST).prompts
        text = tokenizer.text_of(tokenizer.encode(chat))
        assert "type f = (_: {\n  word?: string\n}) => any;\n}\nlook" in text
    assert text.endswith("<|im_middle|><think>")
