import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import RequestError
from extproc.requests.messages_request import BILLING_LINE
from extproc.requests.parts import MAX_BYTES, Part, Place, parts_of


def of(**body: Any) -> list[tuple[str, int, str, tuple[str, ...]]]:
    parts = parts_of(json.dumps(body).encode()).parts
    return [(one.place.value, one.index, one.role, one.texts) for one in parts]


def test_parts_of_a_chat_are_its_tools_its_system_and_its_turns() -> None:
    call = {"id": "c", "function": {"name": "Read", "arguments": '{"path": "a"}'}}
    assert of(
        messages=[
            {"role": "system", "content": "Help."},
            {"role": "developer", "content": [{"type": "text", "text": "Well."}]},
            {"role": "user", "content": "Look."},
            {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [call]},
            {"role": "tool", "content": "It says no."},
            {"role": "system", "content": "A late one."},
        ],
        tools=[{"type": "function", "function": {"name": "Read", "description": "Reads."}}],
    ) == [
        ("tools", 0, "", ("Read", '{"description":"Reads."}')),
        ("system", 0, "system", ("Help.",)),
        ("system", 1, "system", ("Well.",)),
        ("turn", 0, "user", ("Look.",)),
        ("turn", 1, "assistant", ("Hm.", "Read", '{"path": "a"}')),
        ("turn", 2, "tool", ("It says no.",)),
        ("turn", 3, "system", ("A late one.",)),
    ]


def test_parts_of_anthropic_messages_leave_out_what_is_not_rendered() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    blocks = [{"type": "text", "text": f"{BILLING_LINE} 1\nHelp."}, {"type": "text", "text": "x"}]
    use = {"type": "tool_use", "id": "t", "name": "Read", "input": {"path": "a", "n": 1}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "b"}]}
    assert of(
        system=blocks,
        tools=[{"name": "Read", "input_schema": {}, **cached}, "odd"],
        messages=[
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, use]},
            {"role": "user", "content": [{**result, **cached}]},
        ],
    ) == [
        ("tools", 0, "", ("Read", '{"input_schema":{}}')),
        ("tools", 1, "", ()),
        ("system", 0, "system", ("Help.",)),
        ("system", 1, "system", ("x",)),
        ("turn", 0, "assistant", ("Hm.", "Read", "a")),
        ("turn", 1, "user", ("b",)),
    ]


def test_parts_of_a_response_request_are_its_items() -> None:
    assert of(
        instructions="Help.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "Look."}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
            {"type": "function_call", "name": "Read", "arguments": "{}"},
            {"type": "function_call_output", "output": "no"},
        ],
    ) == [
        ("system", 0, "system", ("Help.",)),
        ("turn", 0, "user", ("Look.",)),
        ("turn", 1, "reasoning", ("Hm.",)),
        ("turn", 2, "function_call", ("Read", "{}")),
        ("turn", 3, "function_call_output", ("no",)),
    ]


def test_parts_of_odd_requests_are_what_can_be_read() -> None:
    assert of(prompt="Once", functions=[{"name": 3}]) == [
        ("tools", 0, "", ("", "{}")),
        ("turn", 0, "user", ("Once",)),
    ]
    odd = [{"role": 3, "content": 4, "tool_calls": [5, {"function": 6}]}, 7, None]
    assert of(messages=odd, system=8) == [("turn", 0, "other", ())]
    assert of(messages=[{"role": "a canary"}]) == [("turn", 0, "other", ())]
    assert of(prompt=[1, 2, 3]) == []
    assert of(messages=[{"role": "tool", "name": 3, "content": None}]) == [("turn", 0, "tool", ())]


def test_session_is_what_the_client_names() -> None:
    assert parts_of(b'{"prompt_cache_key": "s"}').session == "s"
    assert parts_of(b'{"metadata": {"user_id": "u"}}').session == "u"
    assert parts_of(b"{}").session == ""


@pytest.mark.parametrize(
    ("body", "why"),
    [(b"{", "bad_json"), (b'{"messages": [\xff]}', "bad_json"), (b" " * (MAX_BYTES + 1), "body")],
)
def test_bodies_that_cannot_be_read_are_refused(body: bytes, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        parts_of(body)


def test_digest_tells_parts_apart_by_their_texts_and_roles() -> None:
    parts = [
        Part(Place.TURN, 0, ("a", "b"), "user"),
        Part(Place.TURN, 0, ("ab",), "user"),
        Part(Place.TURN, 0, ("a", "b"), "tool"),
        Part(Place.SYSTEM, 0, ("a", "b"), "user"),
    ]
    assert len({one.digest for one in parts}) == 4
    assert parts[0].digest == Part(Place.TURN, 9, ("a", "b"), "user").digest


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "text", "name", "tool_calls", "function", "input"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
FIELDS = st.sampled_from(["tools", "functions", "system", "instructions", "messages", "input"])


@given(st.dictionaries(FIELDS, JSON))
def test_any_json_has_parts(body: dict[str, Any]) -> None:
    for part in parts_of(json.dumps(body).encode()).parts:
        assert all(isinstance(text, str) for text in part.texts)
        assert part.digest >= 0
