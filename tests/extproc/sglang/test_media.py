"""Media parts as SGLang reads them: what templates get, and what tells items apart."""

from typing import Any

import msgspec
import pytest

from extproc.base.errors import RequestError
from extproc.config.schema import Model
from extproc.requests.media import MediaDigests
from extproc.requests.prompt import Chat
from extproc.requests.request import parse
from extproc.templates.chat_template import ChatTemplate
from extproc.tokenizing.tokens import Tokenizer
from tests.extproc.media.replaying import HERE
from tests.extproc.sglang.test_recorded_prompts import dialect

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
DATA = "data:image/png;base64,QUJD"
TEXT = {"type": "text", "text": "see"}
IMAGE = {"type": "image_url", "image_url": {"url": DATA}}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "QUJD"}
ASKED = {"role": "user", "content": [TEXT, IMAGE]}
INPUT = {"type": "input_image", "image_url": DATA}
SPOKEN = {"role": "user", "content": [TEXT, {"type": "image", "source": SOURCE}]}
ITEM = {"role": "user", "content": [{"type": "input_text", "text": "see"}, INPUT]}
PATCHED = {"type": "image_url", "image_url": {"url": DATA, "max_dynamic_patch": 4}}


def chat_of(path: str, **body: Any) -> Chat:
    content = msgspec.json.encode({"max_tokens": 9, **body})
    (chat,) = parse(path, content, lambda _: dialect()).prompts
    assert isinstance(chat, Chat)
    return chat


def identity(chat: Chat) -> object:
    """Returns what an item is known by."""
    ((kind, part),) = chat.media
    return kind, MediaDigests(b"k").item(part, kind), msgspec.json.encode(chat.processor_arguments)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [ASKED]}),
        (MESSAGES, {"messages": [SPOKEN]}),
        (RESPONSES, {"input": [ITEM]}),
    ],
)
def test_templates_get_the_kind_of_a_media_part(path: str, body: dict[str, Any]) -> None:
    chat = chat_of(path, **body)
    assert chat.messages == [{"role": "user", "content": [TEXT, {"type": "image"}]}]
    assert [kind for kind, _ in chat.media] == ["image"]


def test_image_of_a_message_is_read_only_where_its_source_names_something() -> None:
    at = {"type": "image", "source": {"type": "url", "url": "data:image/png;base64,QUJD"}}
    bare: tuple[Any, ...] = ({"type": "url", "url": ""}, {"type": "base64", "data": ""}, {}, "x")
    parts = [TEXT, at, *({"type": "image", "source": one} for one in bare)]
    chat = chat_of(MESSAGES, messages=[{"role": "user", "content": parts}])
    assert [part["type"] for part in chat.messages[0]["content"]] == ["text", "image"]


@pytest.mark.parametrize("kind", ["input_audio", "audio_url", "video_url"])
def test_audio_and_video_are_parts_of_their_kind(kind: str) -> None:
    part = {"type": kind, kind: {"url": "data:x;base64,QUJD"}}
    chat = chat_of(CHAT, messages=[{"role": "user", "content": [part]}])
    expected = "video" if kind == "video_url" else "audio"
    assert chat.messages[0]["content"] == [{"type": expected}]
    assert chat.media == ((expected, part),)


def test_image_in_the_result_of_a_tool_stays_a_part_there() -> None:
    content = [{"type": "text", "text": ""}, {"type": "image", "source": SOURCE}]
    result = {"type": "tool_result", "tool_use_id": "t", "content": content}
    chat = chat_of(MESSAGES, messages=[{"role": "user", "content": [result]}])
    assert chat.messages == [{"role": "tool", "tool_call_id": "t", "content": [{"type": "image"}]}]


SAME: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [ASKED]}),
    (CHAT, {"messages": [{"role": "user", "content": [{**IMAGE, "uuid": "mine"}]}]}),
    (RESPONSES, {"input": [{"role": "user", "content": [INPUT]}]}),
]


def test_item_is_the_same_by_chat_and_responses_whatever_the_caller_calls_it() -> None:
    assert len({identity(chat_of(path, **body)) for path, body in SAME}) == 1


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [ASKED], "mm_processor_kwargs": {"max_pixels": 9}},
        {"messages": [ASKED], "images_config": {"a": 1}},
        {"messages": [{"role": "user", "content": [{**IMAGE, "max_dynamic_patch": 4}]}]},
        {"messages": [{"role": "user", "content": [PATCHED]}]},
        {"messages": [{"role": "user", "content": [{**IMAGE, "detail": "low"}]}]},
    ],
)
def test_item_that_is_read_otherwise_is_another(body: dict[str, Any]) -> None:
    assert identity(chat_of(CHAT, **body)) != identity(chat_of(CHAT, messages=[ASKED]))


def test_one_items_patches_are_those_of_all() -> None:
    other = {**IMAGE, "image_url": {"url": DATA + "RA==", "max_dynamic_patch": 4}}
    both = chat_of(CHAT, messages=[{"role": "user", "content": [IMAGE, other]}])
    alone = chat_of(CHAT, messages=[ASKED])
    assert both.media[0] == alone.media[0]
    assert both.processor_arguments != alone.processor_arguments


def test_template_that_takes_texts_gets_no_media() -> None:
    chat = chat_of(CHAT, messages=[ASKED])
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    with pytest.raises(RequestError) as raised:
        template.render_with_media(chat)
    assert raised.value.reason == "unsupported_media"


PLAIN = (
    "{% for m in messages %}{% for p in m.content %}"
    "{% if p.type == 'image' %}[image]{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
)


def test_text_before_an_item_without_a_token_is_certain() -> None:
    chat = chat_of(CHAT, messages=[ASKED])
    assert ChatTemplate(PLAIN, {}).render_until_media(chat, added_tokens=())[0] == "see"


def test_recorded_model_has_a_token_for_each_item() -> None:
    tokenizer = Tokenizer.load(Model("tiny", tokenizer=str(HERE / "qwen2vl")))
    assert tokenizer is not None
    assert [list(ids) for ids in tokenizer.start(chat_of(CHAT, messages=[ASKED])).added] == [
        [8192, 8194, 8193]
    ]
