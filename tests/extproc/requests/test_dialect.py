"""One table says how each release turns bodies into prompts."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.engine import PYTHON, RUST, SGLANG, TRTLLM, VLLM, Engine, Release
from extproc.base.errors import RequestError
from extproc.requests.dialect import (
    _RANGES,
    NEWEST,
    Dialect,
    Effort,
    Format,
    InlineSystem,
    ModelDialects,
    Reasoning,
    dialect_of,
    model_dialects,
)
from extproc.requests.prompt import EMPTIED, Chat
from extproc.requests.request import CHAT_PATH, parse

DIALECTS = [one.dialect for one in _RANGES if not one.dialect.is_foreign]
VLLMS = [one for one in DIALECTS if one.is_vllms]


def vllm(minor: int, patch: int = 0) -> Engine:
    return Engine(VLLM, Release(0, minor, patch))


def dialect_at(minor: int) -> Dialect:
    return dialect_of(vllm(minor))


def test_ranges_of_an_engine_begin_with_its_first_release_and_rise() -> None:
    since = [one.since for one in _RANGES if one.engine == VLLM and one.front_end == PYTHON]
    assert since == sorted(set(since))
    assert since[0] == Release(0, 0)


@pytest.mark.parametrize("minor", [10, 33, 99])
def test_rust_front_end_has_a_dialect_of_its_own_whatever_the_release(minor: int) -> None:
    found = dialect_of(vllm(minor)._replace(front_end=RUST))
    assert (found.name, found.is_rust, found.is_vllms) == ("vLLM 0.33, Rust front end", True, False)
    assert not dialect_of(vllm(minor)).is_rust


def test_rust_front_end_of_sglang_is_not_read() -> None:
    found = dialect_of(Engine(SGLANG, Release(0, 5, 23), RUST))
    assert found.is_rust
    assert found.is_foreign


def test_front_ends_of_one_engine_differ_as_engines_do() -> None:
    dialects = model_dialects({"python": vllm(33), "rust": vllm(33)._replace(front_end=RUST)})
    assert dialects.differs_by_engine
    assert dialects.first == dialect_of(vllm(33))
    assert [workers for _, workers in dialects.rest] == [frozenset({"rust"})]


@pytest.mark.parametrize(
    ("minor", "inline", "reasoning", "effort", "content"),
    [
        (10, InlineSystem.REFUSED, Reasoning.IGNORED, Effort.IGNORED, Format.OLDEST),
        (14, InlineSystem.REFUSED, Reasoning.EITHER, Effort.PASSED, Format.OLDEST),
        (19, InlineSystem.REFUSED, Reasoning.ONLY_REASONING, Effort.PASSED, Format.OLDEST),
        (24, InlineSystem.MERGED, Reasoning.RENAMED, Effort.SWITCHES, Format.NEWER),
        (28, InlineSystem.MERGED, Reasoning.RENAMED, Effort.SWITCHES, Format.NEWER),
        (30, InlineSystem.MERGED, Reasoning.RENAMED, Effort.SWITCHES, Format.RECENT),
        (31, InlineSystem.PROBED, Reasoning.RENAMED, Effort.SWITCHES, Format.RECENT),
        (32, InlineSystem.PROBED, Reasoning.RENAMED, Effort.SWITCHES, Format.RECENT),
        (33, InlineSystem.PROBED, Reasoning.RENAMED, Effort.SWITCHES, Format.NEWEST),
    ],
)
def test_release_has_the_rules_of_its_range(
    minor: int, inline: InlineSystem, reasoning: Reasoning, effort: Effort, content: Format
) -> None:
    rules = dialect_at(minor)
    assert rules.inline_system is inline
    assert (rules.reasoning, rules.effort, rules.format) == (reasoning, effort, content)
    assert dialect_of(vllm(minor, 7)) is rules


def test_unknown_and_newer_engines_speak_the_newest_dialect() -> None:
    assert dialect_of(None) is dialect_of(vllm(99)) is NEWEST
    assert dialect_of(Engine("other", Release(1, 0))) is NEWEST


def test_workers_of_one_dialect_have_no_others() -> None:
    assert model_dialects({}) == ModelDialects(NEWEST)
    assert model_dialects({"a": vllm(27), "b": vllm(28)}) == ModelDialects(dialect_at(27))


def test_newest_dialect_of_a_models_workers_is_first() -> None:
    foreign = dialect_of(Engine(SGLANG, Release(0, 5, 23)))
    engines = {"old": vllm(19), "s": Engine(SGLANG, Release(0, 5, 23)), "other": vllm(20)}
    both = frozenset(("old", "other"))
    assert model_dialects({**engines, "unknown": None}) == ModelDialects(
        NEWEST, ((dialect_at(19), both), (foreign, frozenset(("s",)))), differs_by_engine=True
    )


SGLANG_TURNS = [
    [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    [{"role": "assistant", "content": "a", "reasoning": "r"}, {"role": "user", "content": "b"}],
]


@pytest.mark.parametrize(
    "engine", [Engine(SGLANG, Release(0, 5, 8)), Engine(TRTLLM, Release(1, 2))]
)
def test_other_engines_are_told_only_what_all_read_alike(engine: Engine) -> None:
    foreign, user = dialect_of(engine), {"role": "user", "content": "a"}
    for path in (CHAT_PATH, "/v1/messages"):
        parsed = read({"messages": [user]}, foreign, path)
        assert isinstance(parsed, Chat)
        assert (parsed.messages, parsed.dialect) == ([user], None)
    blocks = [{"type": "text", "text": "a"}]
    bodies: list[tuple[str, dict[str, Any]]] = [
        *((CHAT_PATH, {"messages": turns}) for turns in SGLANG_TURNS),
        (CHAT_PATH, {"messages": [user], "tools": [{"function": {"name": "f"}}]}),
        (CHAT_PATH, {"messages": [user], "reasoning_effort": "high"}),
        (CHAT_PATH, {"messages": []}),
        ("/v1/messages", {"messages": [user], "system": blocks}),
        ("/v1/responses", {"input": "a"}),
    ]
    for path, body in bodies:
        assert read(body, foreign, path) == "unsupported_by_engine"


@pytest.mark.parametrize("arguments", ["{", "[]", "5", "null", "NaN", '{"a": 1} x'])
def test_broken_arguments_are_emptied_from_the_release_on_that_does_so(arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    body = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    parsed = read(body, dialect_at(29))
    assert isinstance(parsed, Chat)
    assert parsed.forms == EMPTIED
    assert parsed.messages[0]["tool_calls"][0]["function"]["arguments"] == {}
    for older in (dialect_at(28), None):
        assert read(body, older) == "unsupported_tool_arguments"


def test_worker_with_a_template_of_its_own_is_told_no_conversation() -> None:
    engine = Engine(SGLANG, Release(0, 5, 23))
    speakers = model_dialects({"own": engine, "other": engine}, {"own"})
    ((own, workers),) = speakers.rest
    assert (speakers.first, workers) == (dialect_of(engine), frozenset(("own",)))
    body = {"messages": [{"role": "user", "content": "a"}]}
    assert isinstance(read(body, speakers.first), Chat)
    for path in (CHAT_PATH, "/v1/messages"):
        assert read(body, own, path) == "unsupported_engine_arguments"


def read(body: dict[str, Any], dialect: Dialect | None, path: str = CHAT_PATH) -> Chat | str:
    try:
        (prompt,) = parse(path, json.dumps(body).encode(), lambda _: dialect).prompts
    except RequestError as error:
        return error.reason
    assert isinstance(prompt, Chat)
    return prompt


PLAIN = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]), "content": st.text()}
    ),
    min_size=1,
    max_size=4,
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
KEYS = (
    "role",
    "content",
    "type",
    "text",
    "reasoning",
    "reasoning_content",
    "tool_calls",
    "name",
    "thinking",
    "input",
    "output",
    "call_id",
    "arguments",
    "summary",
    "encrypted_content",
    "namespace",
    "status",
    "tool_use_id",
)
KINDS = (
    "text",
    "thinking",
    "tool_use",
    "tool_result",
    "message",
    "function_call",
    "reasoning",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "output_text",
    "input_text",
    "user",
    "assistant",
    "system",
)
PIECES = st.dictionaries(
    st.sampled_from(KEYS), st.sampled_from(KINDS) | VALUES, min_size=1, max_size=5
)
TURNS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "developer", "tool"])},
        optional={
            "content": st.lists(PIECES, max_size=3) | VALUES,
            "reasoning": VALUES,
            "type": st.sampled_from(KINDS),
            "tool_calls": VALUES,
        },
    )
    | PIECES,
    max_size=4,
)


@given(PLAIN, st.sampled_from(VLLMS))
def test_request_without_any_form_of_releases_is_the_same_in_all_dialects(
    messages: list[dict[str, Any]], dialect: Dialect
) -> None:
    body = {"messages": messages}
    parsed, plain = read(body, dialect), read(body, None)
    if isinstance(parsed, Chat) and not parsed.forms:
        assert msgspec.structs.replace(parsed, dialect=None, effort_rule=None) == plain
    else:
        assert any(one["content"].startswith("x-anthropic") for one in messages)


@given(PLAIN, st.sampled_from([one for one in DIALECTS if one.sglang is not None]))
def test_sglang_reads_plain_texts_as_all_engines_do(
    messages: list[dict[str, Any]], dialect: Dialect
) -> None:
    parsed = read({"messages": messages}, dialect)
    assert isinstance(parsed, Chat)
    assert parsed.messages == messages


@given(TURNS, st.sampled_from([*DIALECTS, None]), st.dictionaries(st.text(max_size=8), VALUES))
def test_conversion_by_a_dialect_raises_nothing_but_refusals(
    turns: list[dict[str, Any]], dialect: Dialect | None, more: dict[str, Any]
) -> None:
    tools = [one for one in turns if "type" in one]
    for path, body in (
        (CHAT_PATH, {"messages": turns}),
        ("/v1/messages", {"messages": turns, "system": more.get("a")}),
        ("/v1/responses", {"input": turns, "tools": tools, "tool_choice": "none"}),
    ):
        assert read({**more, **body}, dialect, path)
