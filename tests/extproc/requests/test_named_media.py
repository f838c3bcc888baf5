"""Which requests name media instead of sending them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import UnclearError
from extproc.requests import named_media
from extproc.requests.edits import Duties, drafted
from extproc.requests.named_media import MAX_DEPTH, TOKENS_PATH

CHAT = "/v1/chat/completions"
PARTS = st.recursive(
    st.fixed_dictionaries({}, optional={"text": st.text(max_size=4), "uuid": st.none()}),
    lambda inner: st.fixed_dictionaries(
        {"content": st.lists(inner, min_size=1, max_size=3)},
        optional={"input": st.just({"uuid": "of a tool"}), "role": st.just("user")},
    ),
    max_leaves=6,
)


def names_media(path: str, body: bytes) -> bool:
    return named_media.names_media(drafted(body, path, Duties(tenants=True)))


def named_in(part: Any, rng: st.DataObject) -> None:
    """Names an item in some part of a part."""
    while "content" in part and rng.draw(st.booleans()):
        part = rng.draw(st.sampled_from(part["content"]))
    part["uuid"] = "u"


@given(st.sampled_from(["messages", "input"]), st.lists(PARTS, min_size=1, max_size=3), st.data())
def test_part_with_a_uuid_is_found_wherever_it_is(
    member: str, parts: list[Any], data: st.DataObject
) -> None:
    assert not names_media(CHAT, json.dumps({member: parts, "uuid": "u"}).encode())
    named_in(data.draw(st.sampled_from(parts)), data)
    assert names_media(CHAT, json.dumps({member: parts}).encode())


@pytest.mark.parametrize(
    ("path", "body", "is_named"),
    [
        (CHAT, b'{"messages":[{"content":"uuid"}]}', False),
        (CHAT, b'{"messages":"uuid"}', False),
        (CHAT, b'{"messages":[{"\\u0075uid":1}]}', True),
        (CHAT, b'{"messages":[{"content":NaN,"a":"uuid"}]}', False),
        (CHAT, b'{"messages":[{"uuid":"u","uuid":null}]}', True),
        (CHAT, b'{"messages":[{"output":[{"uuid":"u"}]}]}', True),
        (
            CHAT,
            b'{"messages":%buuid%b}' % (b"[" * MAX_DEPTH + b'"', b'"' + b"]" * MAX_DEPTH),
            False,
        ),
        (CHAT, b'{"messages":%b"uuid"%b}' % (b"[" * 9, b"]" * 9), True),
        (TOKENS_PATH, b'{"token_ids":[1]}', False),
        (TOKENS_PATH, b'{"token_ids":[1],"features":{}}', True),
    ],
)
def test_names_media_where_an_engine_might_find_a_name(
    path: str, body: bytes, is_named: bool
) -> None:
    assert names_media(path, body) is is_named


@pytest.mark.parametrize("messages", [b"[1", b'[{"uuid"}]', b'[{"uuid":1]', b"[1}"])
def test_media_in_what_is_no_json_are_not_looked_for(messages: bytes) -> None:
    with pytest.raises(UnclearError, match="no_object"):
        names_media(CHAT, b'{"messages":%b}' % messages)
