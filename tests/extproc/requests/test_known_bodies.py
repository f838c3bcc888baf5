import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.errors import RequestError
from extproc.requests import chat_request
from extproc.requests.chat_request import messages_of
from extproc.requests.known_bodies import MIN_BYTES, KnownBodies, Shaped
from extproc.requests.prompt import InferenceRequest
from extproc.requests.request import CHAT_PATH, parse

LONG = {"role": "user", "content": "x" * MIN_BYTES}


def said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def body(*messages: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


def remembered(bodies: KnownBodies, *messages: dict[str, Any], **fields: Any) -> None:
    content = body(*messages, **fields)
    bodies.remember(content, bodies.find(content), ([*messages], False))


def known(bodies: KnownBodies, content: bytes) -> list[dict[str, Any]]:
    found = bodies.find(content)
    return found.shaped[0] if found else []


def test_a_body_that_goes_on_is_known_up_to_its_last_message() -> None:
    bodies = KnownBodies(1 << 20)
    remembered(bodies, LONG, said("a"))
    found = bodies.find(body(LONG, said("a"), said("b"), user="u"))
    assert found is not None
    assert found.shaped == ([LONG, said("a")], False)
    expected = {"model": "m", "messages": [{}, said("b")], "user": "u"}
    assert json.loads(found.text) == expected


def test_a_repeated_body_is_known_whatever_comes_behind_its_messages() -> None:
    bodies = KnownBodies(1 << 20)
    remembered(bodies, LONG, tools=[{"type": "function"}])
    assert known(bodies, body(LONG, tools=[{"type": "function"}])) == [LONG]
    assert known(bodies, body(LONG, temperature=1)) == [LONG]


def test_a_body_takes_the_place_of_the_one_it_continues() -> None:
    bodies = KnownBodies(1 << 20)
    remembered(bodies, LONG)
    remembered(bodies, LONG, said("a"))
    remembered(bodies, LONG, said("a"))
    assert len(bodies) == 1
    assert known(bodies, body(LONG, said("a"), said("b"))) == [LONG, said("a")]


def test_bodies_that_differ_in_a_known_message_are_not_known() -> None:
    bodies = KnownBodies(1 << 20)
    remembered(bodies, LONG, said("a" * 100))
    assert not known(bodies, body(LONG, said("b" * 100)))
    assert not known(bodies, body(LONG))
    assert not known(bodies, body(said("y" * MIN_BYTES), said("a" * 100)))
    assert not known(bodies, b"x" * MIN_BYTES)


def test_forks_of_a_conversation_are_known_apart() -> None:
    bodies = KnownBodies(1 << 20)
    forks = [[LONG, said(letter * 100)] for letter in "abc"]
    for fork in forks:
        remembered(bodies, *fork)
    for fork in forks:
        assert known(bodies, body(*fork, said("next"))) == fork


def test_of_two_bodies_with_the_same_end_at_the_same_place_the_latest_is_known() -> None:
    bodies = KnownBodies(1 << 20)
    for letter in "ab":
        remembered(bodies, said(letter + LONG["content"]))
    assert len(bodies) == 1
    assert not known(bodies, body(said("a" + LONG["content"]), said("next")))
    assert known(bodies, body(said("b" + LONG["content"]), said("next")))


def test_short_bodies_and_bodies_without_messages_are_not_kept() -> None:
    bodies = KnownBodies(1 << 20)
    remembered(bodies, said("a"))
    for content in (b'{"messages": [1', b'{"messages": []}', b'{"x": "\xff"}'):
        bodies.remember(content + b" " * MIN_BYTES, None, ([LONG], False))
    assert len(bodies) == 0


@pytest.mark.parametrize(
    "content",
    [
        b'{"x": [{}], "messages": [{} , %s]}',  # the first message stands elsewhere as well
        b'{"x": {\t \t}, "messages": [%s]}',
        b'{"messages": [%s,{"role": "user"}, {"role": "user"}]}',
    ],
)
def test_a_body_whose_messages_are_not_plain_to_see_is_not_kept(content: bytes) -> None:
    bodies = KnownBodies(1 << 20)
    bodies.remember(content % json.dumps(LONG).encode(), None, ([LONG], False))
    assert len(bodies) == 0


@pytest.mark.parametrize(
    "rest",
    [
        b"",
        b"]",
        b",]}",
        b"{}]}",
        b',{"role": "user"},\n{"role": "user"}]}',
        b'], "x": {\t \t}}',
        b'], "messages": []}',
        b'], "messages": [{}]}',
        b'], "\\u006dessages": [{}, {}]}',
        b', {"role": "\xff"}], "messages": 1}',
        b"," + b"[" * 100_000,
    ],
)
def test_a_rest_that_is_not_plain_leaves_nothing_known(rest: bytes) -> None:
    bodies = KnownBodies(1 << 20)
    remembered(bodies, LONG)
    beginning = body(LONG).removesuffix(b"]}")
    assert known(bodies, beginning + b"]}")
    assert not known(bodies, beginning + rest)


def test_the_body_asked_for_least_recently_goes_first() -> None:
    bodies = KnownBodies(200_000)
    conversations = {letter: said(letter * MIN_BYTES) for letter in "abcdef"}
    for letter in "abcde":
        remembered(bodies, conversations[letter])
    bodies.find(body(conversations["a"]))
    remembered(bodies, conversations["f"])
    kept = [letter for letter, one in conversations.items() if known(bodies, body(one))]
    assert kept == ["a", "c", "d", "e", "f"]


def test_a_body_too_large_for_its_share_is_not_kept() -> None:
    bodies = KnownBodies(100_000)
    remembered(bodies, LONG)
    assert len(bodies) == 0


def test_a_body_that_ends_after_its_predecessor_was_forgotten_is_kept() -> None:
    bodies = KnownBodies(150_000)
    remembered(bodies, LONG)
    content = body(LONG, said("a"))
    found = bodies.find(content)
    for letter in "abcd":
        remembered(bodies, said(letter * MIN_BYTES))
    bodies.remember(content, found, ([LONG, said("a")], False))
    assert known(bodies, content) == [LONG, said("a")]


def test_what_messages_hold_besides_text_counts() -> None:
    plain, nested = KnownBodies(1 << 24), KnownBodies(1 << 24)
    remembered(plain, LONG)
    part = {"type": "text", "text": "x" * MIN_BYTES, "other": [[]] * 1_000}
    remembered(nested, {"role": "user", "content": [part], "name": "n"})
    assert nested.size_bytes - plain.size_bytes > 50 * 1_000


def test_messages_of_too_many_parts_to_measure_are_not_kept() -> None:
    bodies = KnownBodies(1 << 24)
    remembered(bodies, {"role": "user", "content": [{"type": "text", "text": ""}] * 4_000})
    assert len(bodies) == 0


class Meeting(bytes):
    """A body during whose search something else happens."""

    meanwhile: Any

    def rfind(self, *arguments: Any) -> int:
        self.meanwhile()
        return super().rfind(*arguments)


def test_a_thread_that_comes_meanwhile_does_not_wait() -> None:
    bodies = KnownBodies(1 << 20)
    remembered(bodies, LONG)
    content = body(LONG, said("a"))
    seen: list[object] = []

    def another_thread() -> None:
        seen.append(bodies.find(content))
        bodies.remember(content, None, ([LONG, said("a")], False))

    meeting = Meeting(content)
    meeting.meanwhile = another_thread
    assert known(bodies, meeting) == [LONG]
    assert seen[0] is None
    assert len(bodies) == 1
    assert known(bodies, content) == [LONG]


def outcome(content: bytes) -> InferenceRequest | str:
    try:
        return parse(CHAT_PATH, content)
    except RequestError as error:
        return error.reason


def with_memory(bodies: KnownBodies, content: bytes) -> InferenceRequest | str:
    with mock.patch.object(chat_request, "_known_bodies", bodies):
        return outcome(content)


def test_parsing_in_several_threads_gives_what_parsing_alone_gives() -> None:
    turns = [body(LONG, *map(said, "abcdefgh"[:count])) for count in range(8)] * 20
    alone = [with_memory(KnownBodies(0), content) for content in turns]
    bodies = KnownBodies(1 << 20)
    with mock.patch.object(chat_request, "_known_bodies", bodies), ThreadPoolExecutor(4) as pool:
        assert list(pool.map(outcome, turns)) == alone
    assert bodies.size_bytes <= 1 << 20


HEADS = (
    '{"messages":[',
    '{ "model" : "a",\n "messages" : [ ',
    '{"messages":[{"role":"user","content":"old"}],"messages":[',
    '{"x":{"messages":[{"role":"user"}]},"messages":[',
    '{"x\\"messages":[{"role":"user","content":"a"}],"messages":[',
    '{"\\u006dessages":[',
    '{"x":[{"messages":[',
    '{"messages":{"messages":[',
    '{"echo":true,"x":"\\"messages\\":[","messages":[',
)
FIRST = (json.dumps(LONG), json.dumps({"content": "]},{" * 4_200, "role": "system"}))
MESSAGES = (
    '{"role":"user","content":"a"}',
    '{"role":"user","content":"\\u00e9\\"}]}, {\\ud83d\\ude00"}',
    '{"role":"assistant","content":null,"tool_calls":[{"function":{"arguments":"{}"}}]}',
    '{"role":"user","content":[{"type":"text","text":"t","messages":[{}]}]}',
    '{"role":"user","content":[{"type":"image_url","image_url":{}}]}',
    '{"role":"user","content":"a","role":"system"}',
    '{"role":"user","content":"{\t \t}"}',
    "{\t \t}",
    "{}",
    "1",
    "]",
    "",
)
BETWEEN = (",", ", ", " ,\n", "", "],[")
TAILS = (
    "]}",
    " ] } ",
    ']}"',
    "]",
    "",
    "]}]}",
    '],"model":"b"}',
    '],"model":null,"cache_salt":"s"}',
    '],"model":1}',
    '],"messages":[{"role":"user","content":"other"}]}',
    '],"messages":[]}',
    '],"messages":[{}]}',
    '],"messages":[{\t \t}]}',
    '],"\\u006dessages":[{"role":"user","content":"a"}]}',
    '],"x":{"messages":[{"role":"user"}]}}',
    '],"truncate_prompt_tokens":3,"x":"\\ud800"}',
    '],"add_generation_prompt":false,"tools":[]}',
    '],"chat_template":"x",}',
)


@st.composite
def rests(draw: st.DrawFn) -> bytes:
    """What may come behind a message, and what has a byte or two too many, too few or changed."""
    messages = draw(st.lists(st.sampled_from(MESSAGES), max_size=2))
    text = "".join(draw(st.sampled_from(BETWEEN)) + message for message in messages)
    rest = (text + draw(st.sampled_from(TAILS))).encode()
    if draw(st.booleans()):
        return rest
    at = draw(st.integers(0, len(rest)))
    return rest[:at] + draw(st.binary(max_size=2)) + rest[at + draw(st.integers(0, 2)) :]


def agree(sequence: list[bytes]) -> None:
    bodies = KnownBodies(1 << 18)
    for content in sequence:
        alone = with_memory(KnownBodies(0), content)
        assert with_memory(bodies, content) == alone
        assert bodies.size_bytes <= 1 << 18
    assert (bodies.size_bytes == 0) == (len(bodies) == 0)


@given(
    st.sampled_from(HEADS),
    st.sampled_from(FIRST),
    st.sampled_from(MESSAGES[:6]),
    st.lists(rests(), max_size=6),
)
@settings(max_examples=150, deadline=None)
def test_whatever_comes_behind_a_known_beginning_a_body_says_the_same(
    head: str, first: str, second: str, following: list[bytes]
) -> None:
    beginning = f"{head}{first}, {second}".encode()
    agree([beginning + b"]}", *(beginning + rest for rest in following)])


@given(
    st.sampled_from(HEADS),
    st.sampled_from(BETWEEN[:3]),
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.lists(st.sampled_from(MESSAGES), max_size=2),
            st.sampled_from(TAILS),
        ),
        max_size=8,
    ),
)
@settings(max_examples=150, deadline=None)
def test_a_conversation_that_grows_forks_and_shrinks_says_the_same(
    head: str, between: str, steps: list[tuple[int, list[str], str]]
) -> None:
    messages, sequence = [FIRST[0]], []
    for dropped, added, tail in steps:
        sequence.append((head + between.join(messages) + "]}").encode())
        messages = [*messages[: max(1, len(messages) - dropped)], *added]
        sequence.append((head + between.join(messages) + tail).encode())
    agree(sequence)


def test_a_known_beginning_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = KnownBodies(1 << 20)
    with_memory(bodies, body(LONG))
    parsed: list[Shaped] = []

    def noting(messages: list[dict[str, Any]], **options: Any) -> Shaped:
        parsed.append((messages, False))
        return messages_of(messages, **options)

    monkeypatch.setattr("extproc.requests.chat_request.messages_of", noting)
    with_memory(bodies, body(LONG, said("a")))
    assert parsed == [([said("a")], False)]
