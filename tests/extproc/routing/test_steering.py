import json
import struct
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.pb.kvsteer_generate_pb2 import VllmRequest
from extproc.requests.request import MAX_BYTES
from extproc.routing.steering import (
    BEGINNING_CHARACTERS,
    BEGINNING_IDS,
    Steering,
    beginning_of,
    hash_of,
)

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
COMPLETIONS, GENERATE = "/v1/completions", "/generate"
GRPC = "/vllm.grpc.engine.VllmEngine/Generate"


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def first_turn(text: str) -> list[dict[str, Any]]:
    return [said("system", "You help."), said("user", text)]


def later_turn(text: str) -> list[dict[str, Any]]:
    return [*first_turn(text), said("assistant", "Indeed."), said("user", "And then?")]


@pytest.mark.parametrize("percent", [0.5, 5.0, 50.0, 97.5])
def test_steers_takes_the_configured_share_of_conversations(percent: float) -> None:
    steering = Steering(percent)
    count = 20_000
    steered = sum(
        steering.steers(
            hash_of(beginning_of(CHAT, body(messages=first_turn(f"question {n}")))), 0.0
        )
        for n in range(count)
    )
    # six standard deviations
    deviation = (count * percent / 100 * (1 - percent / 100)) ** 0.5
    assert abs(steered - count * percent / 100) < 6 * deviation


@given(st.binary(min_size=1), st.floats(0, 100), st.floats(0, 100))
def test_steers_keeps_conversations_when_the_share_is_raised(
    beginning: bytes, one: float, other: float
) -> None:
    low, high = sorted((one, other))
    assert Steering(low).steers(hash_of(beginning), 0.5) <= Steering(high).steers(
        hash_of(beginning), 0.5
    )


@given(st.binary(), st.floats(0, 1, exclude_max=True))
def test_steers_takes_none_at_0_percent_and_all_at_100(beginning: bytes, chance: float) -> None:
    assert not Steering(0).steers(hash_of(beginning), chance)
    assert Steering(100).steers(hash_of(beginning), chance)
    assert (Steering(0).is_partial, Steering(100).is_partial) == (True, False)


def test_steers_decides_alike_in_every_router_and_version() -> None:
    conversation = hash_of(beginning_of(CHAT, body(messages=first_turn("question"))))
    # the same in every router and version: a rolling upgrade must not move conversations either
    assert [Steering(percent).steers(conversation, 0.0) for percent in (15, 20)] == [False, True]


@pytest.mark.parametrize(("chance", "is_steered"), [(0.0, True), (0.24, True), (0.25, False)])
def test_steers_splits_unknown_conversations_by_chance(chance: float, *, is_steered: bool) -> None:
    assert Steering(25).steers(hash_of(b""), chance) is is_steered


def test_change_sets_the_share_at_runtime() -> None:
    steering = Steering(100, "X-Test")
    steering.change(0)
    assert (steering.percent, steering.is_partial, steering.headers) == (0, True, ("x-test",))
    assert not steering.steers(hash_of(b"any"), 0.0)


CACHED = {"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(
    ("path", "first", "later"),
    [
        (CHAT, {"messages": first_turn("a")}, {"messages": later_turn("a"), "seed": 1}),
        (
            # cache markers move from turn to turn
            MESSAGES,
            {"system": [CACHED], "messages": [said("user", "a")]},
            {"system": "You help.", "messages": later_turn("a")[1:]},
        ),
        (
            MESSAGES,
            {"system": [{"text": "x-anthropic-billing-header: 1"}, {"text": "You help."}]}
            | {"messages": [said("user", [{"type": "text", "text": "a"}])]},
            {"system": [{"text": "x-anthropic-billing-header: 2"}, {"text": "You help."}]}
            | {"messages": later_turn("a")[1:]},
        ),
        (RESPONSES, {"input": first_turn("a")}, {"input": later_turn("a"), "tools": []}),
        (
            COMPLETIONS,
            {"prompt": "a" * BEGINNING_CHARACTERS},
            {"prompt": "a" * BEGINNING_CHARACTERS + "b", "n": 2},
        ),
        (
            COMPLETIONS,
            {"prompt": list(range(BEGINNING_IDS + 1))},
            {"prompt": list(range(2 * BEGINNING_IDS))},
        ),
        (GENERATE, {"text": "a"}, {"text": "a", "sampling_params": {}}),
        (GENERATE, {"input_ids": [1, 2]}, {"input_ids": [1, 2], "stream": True}),
        (
            CHAT,
            {"messages": [said("tool", "a")]},
            {"messages": [said("tool", "a"), said("b", "c")]},
        ),
    ],
)
def test_beginning_of_is_equal_for_all_turns_of_a_conversation(
    path: str, first: dict[str, Any], later: dict[str, Any]
) -> None:
    assert beginning_of(path, body(**first)) == beginning_of(path, body(**later)) != b""


@pytest.mark.parametrize(
    ("path", "one", "other"),
    [
        (CHAT, {"messages": first_turn("a")}, {"messages": first_turn("b")}),
        (MESSAGES, {"system": "a"}, {"system": "b"}),
        (RESPONSES, {"input": "a"}, {"input": "b"}),
        (RESPONSES, {"instructions": "a"}, {"instructions": "b"}),
        (COMPLETIONS, {"prompt": [1, 2]}, {"prompt": [1, 3]}),
        (COMPLETIONS, {"prompt": ["a", "b"]}, {"prompt": ["a", "c"]}),
        (GENERATE, {"text": "a"}, {"text": "b"}),
    ],
)
def test_beginning_of_differs_for_conversations_that_begin_differently(
    path: str, one: dict[str, Any], other: dict[str, Any]
) -> None:
    common = {"messages": [said("user", "same")]} if path == MESSAGES else {}
    if "instructions" in one:
        common = {"input": [said("user", "same")]}
    assert beginning_of(path, body(**common, **one)) != beginning_of(path, body(**common, **other))


def test_beginning_of_token_ids_over_grpc_is_their_first_ids() -> None:
    def framed(count: int) -> bytes:
        request = VllmRequest()
        request.tokenized.input_ids.extend(range(count))
        message = request.SerializeToString()
        return struct.pack(">BI", 0, len(message)) + message

    assert beginning_of(GRPC, framed(3)) == array("I", range(3)).tobytes()
    assert beginning_of(GRPC, framed(2000)) == array("I", range(BEGINNING_IDS)).tobytes()
    assert beginning_of(GRPC, b"nothing of the kind") == b""


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[1, 2]",
        b'{"messages": [1]}',
        b'{"messages": [{"role": "user", "content": [{"text": 1}]}]}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": {}}'[:-1],
        b'{"prompt": null}',
        b'{"messages": [' + b"{}," * 100_000 + b"{}]}",
        b'{"prompt": "' + b"a" * MAX_BYTES + b'"}',
    ],
)
def test_beginning_of_an_unreadable_body_is_empty(content: bytes) -> None:
    assert beginning_of(COMPLETIONS, content) == b""


@given(st.binary(max_size=200))
def test_beginning_of_accepts_any_bytes(content: bytes) -> None:
    assert isinstance(beginning_of(CHAT, content), bytes)
