"""Bodies that Python's json reads and stricter decoders refuse."""

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import RequestError
from extproc.requests.odd_json import (
    Form,
    decoded,
    encoded,
    ends_in_utf8,
    form_of,
    object_in,
    restored,
    rewritten,
)
from extproc.requests.prompt import Chat, InferenceRequest, Text

NUMBERS = st.floats() | st.integers()
TEXTS = st.text(max_size=6)
HALVES = st.text(st.characters(codec=None, min_codepoint=0xD7FE, max_codepoint=0xE001), max_size=4)


def values(texts: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.none() | st.booleans() | NUMBERS | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=10,
    )


def objects(texts: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(texts, values(texts), max_size=4)


ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le")


def sent(members: object, encoding: str, *, is_ascii: bool) -> bytes:
    return json.dumps(members, ensure_ascii=is_ascii).encode(encoding, "surrogatepass")


def same(one: object, other: object) -> bool:
    """Whether two values are equal, NaN with NaN and 0.0 not with -0.0."""
    return repr(one) == repr(other)


def reason_of(body: bytes) -> str:
    with pytest.raises(RequestError) as refused:
        rewritten(body)
    return refused.value.reason


@given(objects(TEXTS | HALVES), st.sampled_from(ENCODINGS), st.booleans())
def test_body_is_decoded_as_pythons_json_decodes_it(
    members: dict[str, Any], encoding: str, is_ascii: bool
) -> None:
    body = sent(members, encoding, is_ascii=is_ascii)
    assert same(decoded(body), json.loads(body))


@given(st.binary(max_size=12) | st.text('{}[]",:ud8NaI0e- \\', max_size=24).map(str.encode))
def test_any_bytes_are_read_or_refused_as_pythons_json_does(body: bytes) -> None:
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    try:
        assert same(decoded(body), found)
    except RequestError:
        assert not isinstance(found, dict)


@given(objects(TEXTS | HALVES))
def test_encoded_object_is_the_same_for_pythons_json(members: dict[str, Any]) -> None:
    assert same(json.loads(encoded(members)), members)


@given(objects(TEXTS), st.sampled_from(ENCODINGS), st.booleans())
def test_rewritten_body_holds_for_any_decoder_what_pythons_json_read(
    members: dict[str, Any], encoding: str, is_ascii: bool
) -> None:
    body = rewritten(sent(members, encoding, is_ascii=is_ascii))
    assert same(restored(msgspec.json.decode(body)), members)


@given(objects(HALVES))
def test_half_of_a_surrogate_pair_is_refused_where_it_is_in_a_prompt(
    members: dict[str, Any],
) -> None:
    body = rewritten(encoded(members))
    has_half = any(0xD800 <= ord(one) < 0xE000 for one in json.dumps(members, ensure_ascii=False))
    if has_half:
        with pytest.raises(RequestError, match="odd_json"):
            restored(msgspec.json.decode(body))
    else:
        assert same(restored(msgspec.json.decode(body)), members)


def test_later_of_two_equal_names_counts_whatever_the_earlier_was() -> None:
    body = b'{"model": 5, "model": "m", "n": {"a": NaN, "a": 1}}'
    assert rewritten(body) == b'{"model":"m","n":{"a":1}}'


def test_numbers_out_of_range_are_infinite() -> None:
    body = rewritten(b'{"a": [1e400, -1e400, 1e-400, -Infinity]}')
    assert restored(msgspec.json.decode(body)) == {"a": [math.inf, -math.inf, 0.0, -math.inf]}


def test_number_in_a_text_of_a_prompt_is_written_as_pythons_json_writes_it() -> None:
    (arguments,) = msgspec.json.decode(rewritten(b'{"x": [NaN, -Infinity]}')).values()
    chat = Chat([{"role": "assistant", "content": json.dumps(arguments)}], {"a": arguments[:1]})
    request = restored(InferenceRequest("m", [chat, Text("{}")]))
    (found, text) = request.prompts
    assert isinstance(found, Chat)
    assert found.messages == [{"role": "assistant", "content": "[NaN, -Infinity]"}]
    assert same(found.variables, {"a": [math.nan]})
    assert text is chat or text == Text("{}")


def test_what_has_no_stand_in_stays_the_same_object() -> None:
    request = InferenceRequest("m", [Chat([{"a": (1.5, "b")}], {}, roles=("user",))])
    assert restored(request) is request


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "bad_json"),
        (b"{", "bad_json"),
        (b'{"a": "\xff"}', "bad_json"),
        (b'{"a": "\x01"}', "bad_json"),
        (b'{"a": %b}' % (b"1" * 5000), "bad_json"),
        (b"[NaN]", "bad_request"),
        (b'{"a": %b}' % (b"[" * 9000 + b"]" * 9000), "odd_json"),
        ('{"a": "\\ud800 \U0010f000"}'.encode(), "odd_json"),
        (b" " * (4 * 1024 * 1024) + b"{}", "too_many_bytes"),
        (b'{"a": [%b0]}' % (b"0," * 200_000), "too_many_parts"),
    ],
)
def test_body_that_is_not_read_has_a_reason(body: bytes, reason: str) -> None:
    assert reason_of(body) == reason


@pytest.mark.parametrize(
    ("body", "form"),
    [
        (b'{"a": 1, "a": {"b": 1e400}}', Form.PLAIN),
        (b'{"a": "\xed\xa0\x80"}', Form.PLAIN),
        (b'{"a": NaN}', Form.ODD),
        (b'{"a": "\\ud800"}', Form.ODD),
        ('{"a": 1}'.encode("utf-8-sig"), Form.ODD),
        ('{"a": 1}'.encode("utf-16"), Form.ODD),
        (b"[]", Form.UNREAD),
        (b"\x1f\x8b\x08", Form.UNREAD),
    ],
)
def test_body_has_a_form(body: bytes, form: Form) -> None:
    assert form_of(body) is form


@pytest.mark.parametrize("text", ["{", "[]", '"\\ud83d"', "NaN", "\ufeff{}", ""])
def test_text_that_is_no_object_has_none(text: str) -> None:
    assert object_in(text) is None


def test_object_within_a_text_is_read_as_pythons_json_reads_it() -> None:
    assert same(object_in('{"a": NaN, "a": 1e400}'), {"a": math.inf})
    for text in ('{"a": "\\ud83d"}', '{"a": %s}' % ("[" * 5000 + "]" * 5000)):
        with pytest.raises(RequestError, match="odd_json"):
            object_in(text)
    with pytest.raises(ValueError, match="digits"):
        object_in('{"a": ' + "1" * 5000 + "}")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_ends_of_a_body_are_found_in_utf8(encoding: str) -> None:
    body = json.dumps({"a": "\u00e9" * 100}, ensure_ascii=False).encode(encoding)
    start, end = ends_in_utf8(body[:64], body[-64:])
    assert '{"a": "\u00e9'.encode() in start
    assert '\u00e9"}'.encode() in end


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth):
        found = {"a": found}
    return found


def test_object_that_is_nested_too_deeply_is_not_written_or_restored() -> None:
    for work in (encoded, restored):
        with pytest.raises(RequestError, match="odd_json"):
            work(nested(5000))
