"""Templates of well-known shapes render as the transformers library renders them."""

import contextlib
import functools
import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import RequestError
from extproc.requests.prompt import Chat
from extproc.templates.chat_template import ChatTemplate
from tests.extproc.template_shapes import GEMMA, SHAPES, SPECIAL_TOKENS

TOOL = {
    "type": "function",
    "function": {"name": "f", "description": None, "parameters": {"type": "object", "a": "é<&"}},
}
CALL = {"id": "abcdefghi", "function": {"arguments": {"x": [1, 2.0]}, "name": "f"}}

texts = st.text(max_size=8) | st.sampled_from(["", " a ", "a\n", "</think>b", "{{ x }}", "é🙂"])
roles = st.sampled_from(["user", "assistant", "system", "tool", "note"])
turns = st.builds(lambda role, text: {"role": role, "content": text}, roles, texts)
calls = st.just({"role": "assistant", "content": "", "tool_calls": [CALL]})
conversations = st.lists(turns | calls, min_size=1, max_size=6)
variables = st.fixed_dictionaries(
    {"add_generation_prompt": st.booleans()},
    optional={
        "tools": st.just([TOOL]),
        "documents": st.just([{"title": "t", "text": "d"}]),
        "date_string": st.just("1 Jan 2026"),
        "thinking_off": st.booleans(),
    },
)

COMPILED = {name: ChatTemplate(source, SPECIAL_TOKENS) for name, source in SHAPES.items()}


@functools.cache
def reference() -> Any:
    """Returns the library to compare with; its import takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(
            "transformers.utils.chat_template_utils",
            reason="needs transformers (dependency group `parity`), the library to compare with",
        )


def theirs(source: str, messages: list[dict[str, Any]], given: dict[str, Any]) -> str | None:
    """Returns what transformers renders of a conversation; None if it or the template refuses."""
    library = reference()
    try:
        rendered, _ = library.render_jinja_template(
            [messages], chat_template=source, **SPECIAL_TOKENS, **given
        )
    except Exception:  # noqa: BLE001 - a template may fail in any way
        return None
    return str(rendered[0])


def ours(name: str, messages: list[dict[str, Any]], given: dict[str, Any]) -> str | None:
    with contextlib.suppress(RequestError):
        return COMPILED[name].render(Chat(messages, given))[0]
    return None


def as_engine_shapes(name: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if SHAPES[name] is not GEMMA:
        return messages
    return [
        message
        if message["role"] == "tool"
        else {**message, "content": [{"type": "text", "text": message["content"]}]}
        for message in messages
    ]


@pytest.mark.parametrize("name", SHAPES)
@given(conversations, variables)
def test_render_equals_transformers(
    name: str, messages: list[dict[str, Any]], given: dict[str, Any]
) -> None:
    shaped = as_engine_shapes(name, messages)
    assert ours(name, messages, given) == theirs(SHAPES[name], shaped, given)


@pytest.mark.parametrize("name", ["chatml", "llama3", "deepseek", "gemma", "generation"])
@given(texts, texts)
def test_continued_message_ends_as_in_transformers_or_is_refused(
    name: str, asked: str, begun: str
) -> None:
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": begun}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    text = ours(name, messages, options)
    assert text in (None, theirs(SHAPES[name], as_engine_shapes(name, messages), options))


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_accept_the_conversations_of_their_models(name: str) -> None:
    asked = {"role": "user", "content": "q"}
    messages = [asked, {"role": "assistant", "content": "a"}, asked]
    assert ours(name, messages, {"add_generation_prompt": True, "date_string": "d"})


def test_continued_messages_are_accepted_by_most_shapes() -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "so it is "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    chat = Chat(messages, options)
    claimed = {name: COMPILED[name].render(chat)[0] for name in ("chatml", "llama3")}
    assert claimed["chatml"].endswith("so it is ")
    assert claimed["llama3"].endswith("so it is")
