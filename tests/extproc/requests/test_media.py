import base64
import json
from random import Random
from typing import Any

import pytest

from extproc.requests.chat_request import media_parts_of
from extproc.requests.media import ELIDED_BYTES, MAX_BEGINNINGS, MediaDigests, stand_ins_of
from extproc.requests.messages_request import parse as parse_messages
from extproc.requests.prompt import Chat

DIGESTS = MediaDigests(b"a key")


def data(seed: int, size: int = 2 * ELIDED_BYTES) -> str:
    return base64.b64encode(Random(seed).randbytes(size)).decode()


def image(seed: int, **others: Any) -> dict[str, Any]:
    url = "data:image/png;base64," + data(seed)
    return {"type": "image_url", "image_url": {"url": url}, **others}


def audio(seed: int) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data(seed), "format": "wav"}}


PARTS = [image(1), audio(2), {"type": "input_image", "image_url": image(3)["image_url"]["url"]}]


@pytest.mark.parametrize("part", PARTS)
def test_elided_body_has_the_same_item_in_a_few_bytes(part: dict[str, Any]) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode()
    short, count = DIGESTS.elided(body)
    (found,) = json.loads(short)["messages"][0]["content"]
    assert (count, stand_ins_of([found]), len(short) < 256) == (1, 1, True)
    assert DIGESTS.item(found, "image") == DIGESTS.item(part, "image")
    assert DIGESTS.item(found, "image") != DIGESTS.item(image(9), "image")


@pytest.mark.parametrize(
    "content",
    [
        f"data:{data(1)}",
        json.dumps(image(1)),
        [{"type": "text", "text": f'"url": "data:{data(1)}"'}],
        [{"type": "text", "text": f"data:{data(1)}"}],
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
        [{"type": "image_url", "image_url": {"url": f"data:x\\{data(1)}"}}],
    ],
)
def test_elided_body_keeps_texts_short_data_and_escapes(content: object) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    assert DIGESTS.elided(body) == (body, 0)


@pytest.mark.parametrize("body", [b'{"url": "data:' + b"A" * 9_000, b'"data"' * 9_000, b'"data":'])
def test_elided_body_may_be_anything(body: bytes) -> None:
    assert DIGESTS.elided(body) == (body, 0)


def test_elided_body_has_at_most_so_many_beginnings() -> None:
    body = b'"data:",' * MAX_BEGINNINGS + json.dumps(image(1)).encode()
    assert DIGESTS.elided(body) == (body, 0)


def test_elided_body_is_found_behind_megabytes_of_text() -> None:
    body = json.dumps(["x" * 3_000_000, image(1)]).encode()
    short, count = DIGESTS.elided(body)
    assert (count, len(body) - len(short) > ELIDED_BYTES) == (1, True)


@pytest.mark.parametrize(
    ("url", "is_exact"),
    [("data:image/png;base64,AAAA", True), ("https://a/b.png", False), ("HTTP://a/b.png", False)],
)
def test_item_of_a_url_is_not_exact(url: str, is_exact: bool) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    assert DIGESTS.item(part, "image").is_exact is is_exact


def test_item_with_a_name_is_known_by_it_alone() -> None:
    one, other = (
        DIGESTS.item(image(1, uuid="a"), "image"),
        DIGESTS.item(image(2, uuid="a"), "image"),
    )
    assert one == other
    assert one.digest != DIGESTS.item(image(1, uuid="b"), "image").digest
    assert DIGESTS.item({"uuid": "a", "image_url": {"url": "http://a"}}, "image").is_exact


def test_item_depends_on_the_other_fields_of_its_part_and_on_the_key() -> None:
    part = image(1)
    detailed = {**part, "image_url": {**part["image_url"], "detail": "low"}}
    digests = {
        DIGESTS.item(part, "image").digest,
        DIGESTS.item(detailed, "image").digest,
        MediaDigests(b"another key").item(part, "image").digest,
    }
    assert len(digests) == 3


def test_media_parts_keep_their_order() -> None:
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [image(1), {"type": "text", "text": "b"}, audio(2)]},
        {"role": "user", "content": [image(3)]},
    ]
    assert media_parts_of(messages) == (
        ("image", image(1)),
        ("audio", audio(2)),
        ("image", image(3)),
    )


def test_media_parts_of_messages_have_their_source() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    block = {"type": "image", "source": source}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    body = {
        "model": "m",
        "max_tokens": 1,
        "messages": [{"role": "user", "content": [result, block]}],
    }
    (chat,) = parse_messages(json.dumps(body).encode()).prompts
    assert isinstance(chat, Chat)
    assert [part["source"] for _, part in chat.media] == [source, source]
