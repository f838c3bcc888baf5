import json
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.requests.outline import (
    BEGINNING_BYTES,
    LONG_BYTES,
    MAX_BYTES,
    MAX_NAME_LETTERS,
    MEDIA_BYTES,
    MOST_BYTES,
    MOST_DIGESTS,
    Outline,
    beginning_of,
    outline_of,
)

Body = dict[str, Any]
WORDS = st.text("ab \n\u00e4", min_size=1, max_size=900)
MARK = {"cache_control": {"type": "ephemeral"}}


def outlined(body: object) -> Outline:
    return outline_of(json.dumps(body).encode())


def part(text: str) -> Body:
    return {"type": "text", "text": text}


def turn(role: str, text: str) -> list[Body]:
    """A turn of the user, or one of the model with the result of the tool that it called."""
    if role == "user":
        return [{"role": role, "content": [part(text)]}]
    call = {"type": "tool_use", "id": "t", "name": "read", "input": {"path": text, "limit": 9}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": text, "is_error": True}
    thought = {"type": "thinking", "thinking": text, "signature": "s"}
    return [{"role": role, "content": [thought, call]}, {"role": "user", "content": [result]}]


TURNS = st.lists(
    st.builds(turn, st.sampled_from(["user", "assistant"]), WORDS), min_size=1, max_size=12
)
TOOLS = st.lists(
    st.builds(
        lambda name, about: {
            "name": name,
            "description": about,
            "input_schema": {"type": "object", "properties": {"id": {}, "metadata": {}}},
        },
        WORDS,
        WORDS,
    ),
    max_size=3,
)


@st.composite
def messages(draw: st.DrawFn) -> Body:
    return {
        "model": "m",
        "messages": [one for turns in draw(TURNS) for one in turns],
        "system": [part(text) for text in draw(st.lists(WORDS, max_size=3))],
        "tools": draw(TOOLS),
    }


def mixed(thing: Any, rng: Random) -> Any:
    """The same, with the keys of every object in another order."""
    if isinstance(thing, dict):
        names = rng.sample(list(thing), len(thing))
        return {name: mixed(thing[name], rng) for name in names}
    return [mixed(one, rng) for one in thing] if isinstance(thing, list) else thing


def marked(body: Body, rng: Random) -> Body:
    """The same, with `cache_control` wherever chance puts it."""
    copy = json.loads(json.dumps(body))
    blocks = [*copy["system"], *copy["tools"]]
    for message in copy["messages"]:
        blocks += [message, *message["content"]]
    for block in blocks:
        if rng.random() < 0.5:
            block.update(MARK)
    return copy  # type: ignore[no-any-return]


@given(messages(), st.randoms())
def test_outline_ignores_the_order_of_keys_and_cache_control(body: Body, rng: Random) -> None:
    assert outlined(mixed(marked(body, rng), rng)) == outlined(body)


@given(messages(), TURNS)
def test_outline_of_a_longer_conversation_begins_with_the_shorter_one(
    body: Body, more: list[list[Body]]
) -> None:
    shorter = outlined(body)
    longer = outlined(
        {**body, "messages": [*body["messages"], *(one for each in more for one in each)]}
    )
    count = len(shorter.digests)
    assert longer.digests[:count] == shorter.digests
    assert longer.lengths[:count] == shorter.lengths
    assert longer.size > shorter.size


@given(messages(), WORDS)
def test_outline_of_another_conversation_differs_from_its_first_turn(body: Body, text: str) -> None:
    first = {**body, "messages": turn("user", "A" * 64 + text)}
    other = {**body, "messages": turn("user", "B" * 64 + text)}
    assert outlined(first).digests[-1] != outlined(other).digests[-1]
    assert outlined(first).size == outlined(other).size


@given(messages(), st.characters(categories=["L"]), st.characters(categories=["L"]))
def test_outline_covers_even_a_turn_of_one_letter(body: Body, one: str, other: str) -> None:
    first = {**body, "messages": turn("user", one)}
    second = {**body, "messages": turn("user", other)}
    assert (outlined(first).digests == outlined(second).digests) is (one == other)


@given(messages())
def test_outline_has_its_lengths_in_order_within_its_size(body: Body) -> None:
    made = outlined(body)
    assert all(one < later for one, later in pairwise((0, *made.lengths)))
    assert len(made.digests) == len(made.lengths)
    assert made.tokens * 4 == made.size >= max(made.lengths, default=0)


SAID = "word " * 40
OPENAI = {"messages": [{"role": "user", "content": SAID}]}
ITEMS = {"input": [{"type": "message", "role": "user", "content": SAID}]}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": SAID}}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (OPENAI, {"messages": [{"role": "user", "content": [part(SAID)]}]}),
        (OPENAI, {"input": SAID}),
        (OPENAI, {"messages": [{"role": "user", "content": SAID, "id": "x"} | MARK]}),
        (ITEMS, {"input": [{"role": "user", "content": [{"type": "input_text", "text": SAID}]}]}),
        (ITEMS | {"instructions": "be kind"}, ITEMS | {"system": [part("be kind")]}),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]},
            {"messages": [{"role": "assistant", "tool_calls": [CALL | {"id": "2"}]}]},
        ),
        (
            {"tools": [{"function": {"name": SAID}}]} | OPENAI,
            {"tools": [{"function": {"name": SAID} | MARK} | MARK]} | OPENAI,
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": SAID}]}]},
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "content": [part(SAID)]}]}
                ]
            },
        ),
        (OPENAI, OPENAI | {"metadata": {"user_id": [1]}, "client_metadata": {"a": 1}}),
        ({"prompt": SAID}, {"prompt": [SAID]}),
        ({"prompt": SAID}, {"text": SAID}),
    ],
)
def test_outline_is_the_same_for_what_engines_render_alike(one: Body, other: Body) -> None:
    assert outlined(one) == outlined(other) != Outline()


BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=%s;"


@pytest.mark.parametrize(
    "system",
    [
        lambda cch: [part(BILLING % cch), part(SAID)],
        lambda cch: f"{BILLING % cch}\n{SAID}",
        lambda cch: [part(SAID), part(BILLING % cch)],
    ],
)
def test_outline_leaves_the_billing_line_out(system: Callable[[str], object]) -> None:
    one, other = (outlined({"system": system(cch)} | OPENAI) for cch in ("1f", "ff9"))
    assert one == other


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (OPENAI, {"messages": [{"role": "assistant", "content": SAID}]}),
        ({"tools": [{"p": {"metadata": 1}, "q": SAID}]}, {"tools": [{"p": {}, "q": SAID}]}),
        ({"functions": [{"name": SAID}]}, {"functions": [{"name": SAID + "2"}]}),
        ({"functions": [SAID]}, {"functions": [SAID * 2]}),
        ({"input": [{"type": "reasoning", "summary": SAID}]}, {"input": [{"type": "reasoning"}]}),
        ({"input": [7, [SAID]]}, {"input": [8, [SAID]]}),
        (
            {"input": [{"type": "function_call_output", "output": SAID}]},
            {"input": [{"type": "function_call_output", "output": SAID * 2}]},
        ),
        (
            {"messages": [{"role": "assistant", "content": SAID, "tool_calls": [1]}]},
            {"messages": [{"role": "assistant", "content": SAID, "tool_calls": "2"}]},
        ),
    ],
)
def test_outline_differs_for_what_engines_render_differently(one: Body, other: Body) -> None:
    assert outlined(one) != outlined(other)


def test_image_weighs_a_thousand_tokens_whatever_its_size() -> None:
    def seen(data: str) -> Outline:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        return outlined({"messages": [{"role": "user", "content": [image]}]})

    assert seen("A").size == seen("A" * 100_000).size
    assert 0 < seen("A").size - MEDIA_BYTES < 64
    assert seen("A").digests != seen("B").digests
    both = {"content": [{"type": "tool_result", "content": [{"type": "image"}]}], "role": "user"}
    assert outlined({"messages": [both]}).size > MEDIA_BYTES


def test_long_text_is_cut_so_that_a_common_beginning_is_found() -> None:
    one, other = outlined({"prompt": "x" * 100_000 + "a"}), outlined({"prompt": "x" * 90_000 + "b"})
    same = [a for a, b in zip(one.digests, other.digests, strict=False) if a == b]
    assert one.lengths[len(same) - 1] > 90_000 * 15 / 16 - LONG_BYTES


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "x" * 64}] * 8_000},
        {"messages": [{"role": "user", "content": [{"type": "image"}] * 30_000}]},
        {"prompt": "x" * (MAX_BYTES - 100)},
    ],
    ids=["turns", "images", "text"],
)
def test_outline_of_megabytes_is_a_few_kibibytes(body: Body) -> None:
    made = outlined(body)
    assert made.size <= MOST_BYTES
    assert 100 < len(made.digests) < MOST_DIGESTS


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no JSON",
        b"[]",
        b"\xff",
        b'{"messages": ' + b"[" * 5_000,
        b'{"tools": [' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"]}",
        b'{"messages": [' + b"{}," * 70_000 + b"{}]}",
        b'{"system": ' + b" " * MAX_BYTES + b"1}",
        b'{"prompt": [' + b"1" * 400 + b"]}",
    ],
    ids=["empty", "text", "list", "bytes", "cut", "deep", "wide", "long", "number"],
)
def test_outline_of_any_body_is_made(body: bytes) -> None:
    made = outline_of(body)
    assert made.size <= max(BEGINNING_BYTES, len(body))
    assert outline_of(body) == made


@given(st.binary(max_size=300))
def test_beginning_is_followed_as_it_is_written(body: bytes) -> None:
    made = beginning_of(body)
    assert made.size == len(body)
    longer = beginning_of(body + b"more" * 30)
    assert longer.digests[: len(made.digests)][:-1] == made.digests[:-1]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "tool_calls", "id", "function"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(
    st.dictionaries(
        st.sampled_from(["tools", "system", "messages", "input", "prompt", "metadata"]), VALUES
    )
)
def test_outline_of_any_json_is_made(body: Body) -> None:
    assert outlined(body).size >= 0


CLAUDE_CODE = {"user_id": json.dumps({"device_id": "d", "session_id": "s7"})}


@pytest.mark.parametrize(
    ("body", "session"),
    [
        ({"prompt_cache_key": "k"}, "k"),
        ({"metadata": CLAUDE_CODE}, "s7"),
        ({"metadata": {"user_id": "user_1"}}, "user_1"),
        ({"metadata": {"user_id": "{user"}}, "{user"),
        ({"metadata": {"user_id": "{}"}}, "{}"),
        ({"metadata": {"user_id": 7}}, ""),
        ({"metadata": [], "prompt_cache_key": "x" * (MAX_NAME_LETTERS + 1)}, ""),
        ({"conversation": "conv_1", "prompt_cache_key": "k"}, "conv_1"),
        ({"conversation": {"id": "conv_2"}}, "conv_2"),
    ],
)
def test_body_names_its_session(body: Body, session: str) -> None:
    assert outlined(body).session == session


def test_body_names_the_response_that_it_continues() -> None:
    assert outlined({"previous_response_id": "resp_1", "input": "go on"}).previous == "resp_1"
    assert outlined({"previous_response_id": 7}).previous == ""


def image(seed: int) -> Body:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{seed:0200}"}}


def shots(count: int) -> Body:
    """A conversation with a screenshot in each turn."""
    return {
        "messages": [
            {"role": "user", "content": [part(f"look {n}"), image(n)]} for n in range(count)
        ]
    }


@pytest.mark.parametrize("tokens", [16.0, 300.0, 1_024.0, 9_000.0])
def test_measured_outline_counts_media_by_their_tokens(tokens: float) -> None:
    outline, longer = outlined(shots(40)), outlined(shots(41))
    measured = outline.measured(lambda _: tokens)
    texts = outline.size - 40 * MEDIA_BYTES
    assert measured.tokens == pytest.approx(texts / 4 + 40 * tokens, abs=1)
    assert all(one < other for one, other in pairwise(measured.lengths))
    assert [kind for _, kind in outline.media] == ["image"] * 40
    assert measured.digests == longer.measured(lambda _: tokens).digests[: len(measured.digests)]


def test_measured_outline_has_no_marks_beyond_the_last_length() -> None:
    measured = outlined(shots(40)).measured(lambda _: 1e6)
    assert measured.lengths[-1] <= MOST_BYTES < measured.size
    assert len(measured.lengths) == len(measured.digests)


def test_measured_outline_of_texts_is_the_same() -> None:
    outline = outlined({"messages": turn("user", "hello there, again")})
    assert outline.measured(lambda _: 1.0) is outline
    assert outline.tokens_from(0, lambda _: 1.0) == 0


def test_tokens_from_an_item_are_those_of_it_and_all_behind() -> None:
    outline = outlined(shots(3))
    behind = [outline.tokens_from(n, lambda _: 500.0) for n in range(4)]
    assert behind[3] == 0
    assert behind[2] == 500
    assert 1_000 < behind[1] < behind[0] - 500


def test_outline_has_a_digest_of_an_item_that_depends_on_all_of_it() -> None:
    def of(seed: int) -> Outline:
        return outlined({"messages": [{"role": "user", "content": [image(seed)]}]})

    assert of(1) == of(1)
    assert of(1).digests != of(2).digests


@given(st.integers(1, 3), st.integers(0, 2_000))
def test_measured_outline_of_texts_behind_media_keeps_its_order(count: int, letters: int) -> None:
    body = shots(count)
    body["messages"].append({"role": "user", "content": [part("b" * letters)]})
    measured = outlined(body).measured(lambda _: 300.0)
    assert list(measured.lengths) == sorted(measured.lengths)
    assert measured.lengths[-1:] <= (measured.size,)
