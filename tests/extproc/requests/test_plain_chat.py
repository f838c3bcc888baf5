"""The compiled reader of plain conversations finds what the decoder finds, or nothing."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import RequestError
from extproc.requests.chat_request import LIMITED_FIELDS, PATH
from extproc.requests.plain_chat import PlainChat, read_plain, roles_in
from extproc.requests.prompt import USUAL_VARIABLES, Chat
from extproc.requests.request import parse
from kvstate.undecodable import UNDECODABLE

USER = '{"role":"user","content":"hello"}'
LONG = "a long text, of several words" * 9

texts = st.lists(st.sampled_from([*' "\\/\n\x01é\ud800\U0001f600ab', LONG]), max_size=4).map(
    "".join
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
roles = st.sampled_from(["user", "assistant", "system", "tool", "developer"])
turns = st.tuples(
    roles, texts, st.sampled_from([("role", "content"), ("content", "role"), ("role", "name")])
).map(lambda turn: dict(zip(turn[2], turn[:2][:: 1 if turn[2][0] == "role" else -1], strict=True)))
usual = [json.loads(value) for values in LIMITED_FIELDS.values() for value in values]
others = st.fixed_dictionaries({"stream": values}) | st.dictionaries(
    st.sampled_from(["user", "stop", "é", "mod\\u0065l", "tools", *LIMITED_FIELDS]),
    values | st.sampled_from(usual),
    max_size=3,
)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """A body that is plain or nearly so, maybe with a byte taken out or put in."""
    members: list[tuple[str, Any]] = [("messages", draw(st.lists(turns, max_size=4)))]
    members += [("model", draw(texts))] * draw(st.integers(0, 2)) + [*draw(others).items()]
    members += [("cache_salt", draw(texts | st.none()))] * draw(st.integers(0, 2))
    colon, comma = draw(st.sampled_from([(":", ","), (": ", ", "), (" :\n", "\t,\r")]))
    written = [
        f'"{name}"{colon}'
        + json.dumps(value, separators=(comma, colon), ensure_ascii=draw(st.booleans()))
        for name, value in draw(st.permutations(members))
    ]
    body = ("{" + comma.join(written) + "}").encode("utf-8", "surrogatepass")
    at = draw(st.integers(0, len(body)))
    put = draw(
        st.sampled_from([b"", b"", b'"', b"\\", b",", b"{", b"]", b"}", b" ", b"0", b"\xff"])
    )
    return body[:at] + put + body[at + draw(st.sampled_from([0, 0, 0, 1])) :]


def contents_of(body: bytes, chat: PlainChat) -> list[str] | None:
    """The contents of a chat; None if the decoder refuses one."""
    numbers = memoryview(chat[3]).cast("Q")
    places = zip(numbers[::2], numbers[1::2], strict=True)
    try:
        return [msgspec.json.decode(body[at - 1 : end + 1], type=str) for at, end in places]
    except UNDECODABLE:
        return None


def check(body: bytes, chat: PlainChat) -> None:
    contents = contents_of(body, chat)
    if contents is None:
        with pytest.raises(RequestError):
            parse(PATH, body)
        return
    found = zip(roles_in(chat[2]), contents, strict=True)
    messages = [{"role": role, "content": content} for role, content in found]
    plain = {"model": chat[0], "cache_salt": chat[1], "messages": messages}
    request = parse(PATH, json.dumps(plain).encode())
    (prompt,) = request.prompts
    assert isinstance(prompt, Chat)
    assert (prompt.messages, prompt.variables) == (messages, USUAL_VARIABLES)
    assert parse(PATH, body) == request


@given(bodies())
def test_plain_chat_is_what_the_decoder_finds(body: bytes) -> None:
    chat = read_plain(body)
    if chat is not None:
        check(body, chat)


@pytest.mark.parametrize(
    "members",
    [
        "",
        ',"stream":true,"temperature":0.7,"max_tokens":-12,"top_p":1E-5,"user":null',
        ' ,\n"stop":["\\n\\n", "é"],"stream_options":{"include_usage":false,"a":{"b":[]}}\t',
        *[
            f',"{name}": {value.decode()}'
            for name, values in LIMITED_FIELDS.items()
            for value in values
        ],
    ],
)
def test_usual_members_are_plain(members: str) -> None:
    body = f'{{"model":"m","messages":[{USER},\n{USER}]{members}}} '.encode()
    chat = read_plain(body)
    assert chat is not None
    assert chat[:3] == ("m", None, b"uu")
    check(body, chat)


@pytest.mark.parametrize("mark", ['\\"', "\\\\", "\\n", "\x1f", "é", "\x7f", '"'])
def test_every_mark_is_found_at_every_place_of_a_text(mark: str) -> None:
    for at in range(40):
        text = "x" * at + mark + "y" * (40 - at)
        body = f'{{"messages":[{{"role":"user","content":"{text}"}}]}}'.encode()
        chat = read_plain(body)
        assert (chat is not None) is (mark not in ('"', "\x1f")), at
        if chat is not None:
            check(body, chat)


@pytest.mark.parametrize(
    ("members", "model", "salt"),
    [
        ('"model":null', None, None),
        ('"cache_salt":null,"model":""', "", None),
        ('"cache_salt":"","model":"m"', "m", ""),
        ('"cache_salt":"a b"', None, "a b"),
    ],
)
def test_plain_chat_has_the_model_and_the_salt(
    members: str, model: str | None, salt: str | None
) -> None:
    body = f'{{{members},"messages":[{{"content":"hello","role":"user"}}, {USER}]}}'.encode()
    chat = read_plain(body)
    assert chat is not None
    assert chat[:3] == (model, salt, b"uu")
    check(body, chat)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        "{}",
        '{"messages":[]}',
        '{"model":"m"}',
        f'{{"messages":[{USER}]',
        f'{{"messages":[{USER}]}}x',
        f'{{"messages":[{USER},]}}',
        f'{{"messages":[{USER}],}}',
        f'{{"messages":[{USER}],"messages":[{USER}]}}',
        f'{{"messages":[{USER}],"model":"a","model":"b"}}',
        f'{{"messages":[{USER}],"model":"\\u0061"}}',
        f'{{"messages":[{USER}],"model":null,"model":"a"}}',
        f'{{"messages":[{USER}],"model":nul}}',
        f'{{"messages":[{USER}],"model":1}}',
        f'{{"messages":[{USER}],"cache_salt":"a","cache_salt":"b"}}',
        f'{{"messages":[{USER}],"cache_salt":"é"}}',
        f'{{"messages":[{USER}],"cache_salt":1}}',
        f'{{"messages":[{USER}],"\\u006e":2}}',
        f'{{"messages":[{USER}],"a":"\\u0061"}}',
        f'{{"messages":[{USER}],"a":01}}',
        f'{{"messages":[{USER}],"a":{"[" * 17}{"]" * 17}}}',
        f'{{"messages":[{USER}],"a":{"1" * 21}}}',
        f'{{"messages":[{USER}],"a":nil}}',
        f'{{"messages":[{USER}],"a":[1}}]}}',
        '{"messages":[{"role":"user","role":"user"}]}',
        '{"messages":[{"content":"hello","content":"hello"}]}',
        '{"messages":[{"content":"hello"}]}',
        '{"messages":[{"role":"user","content":"hello","name":"a"}]}',
        '{"messages":[{"role":"tool","content":"hello"}]}',
        '{"messages":[{"role":"user","content":["hello"]}]}',
        f'{{"messages":[{",".join([USER] * 1025)}]}}',
        *[f'{{"messages":[{USER}],"{name}":0}}' for name in LIMITED_FIELDS],
        *[f'{{"messages":[{USER}],"{name}":[]}}' for name in LIMITED_FIELDS],
        *[f'{{"messages":[{USER}],"{name}":"{name}"}}' for name in LIMITED_FIELDS],
    ],
)
def test_other_bodies_are_not_plain(body: str) -> None:
    assert read_plain(body.encode()) is None
