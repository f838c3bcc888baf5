"""Mistral's conversations: what vLLM 0.32 makes of them, read back from its ids."""

import base64
import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import msgspec
import pytest

from extproc.base.engine import Engine, Release
from extproc.base.errors import RequestError
from extproc.renderers.mistral import Mistral
from extproc.renderers.segments import ControlMarks, Segment
from extproc.requests.dialect import NEWEST, Effort, dialect_of
from extproc.requests.prompt import DISABLED, Chat
from extproc.requests.request import parse
from tests.extproc.small_models import CONTROLS, EFFORTS, JUDGED, RANKS, tekken

BYTES = [base64.b64decode(line.split(" ")[0]) for line in RANKS.splitlines()]
VERSIONS = ["v3", "v7", "v11", "v13", "v15"]
CHATS = [n for n, one in enumerate(JUDGED["requests"]) if one["path"] != "/v1/completions"]
USER = {"role": "user", "content": "x"}
CALL = {"id": "aaaaaaaa1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
RESULT = {"role": "tool", "tool_call_id": "aaaaaaaa1", "content": "[1"}


def renderer(version: str, **settings: Any) -> Mistral:
    named = tekken("v15")["special_tokens"]
    controls = {one["token_str"]: one["rank"] for one in named}
    given = {"reasoning_effort": EFFORTS, **settings}
    return Mistral(version, controls, ControlMarks(controls.values()), given)


def chat_of(number: int) -> Chat:
    one = JUDGED["requests"][number]
    (chat,) = parse(one["path"], json.dumps(one["body"]).encode(), lambda _: NEWEST).prompts
    assert isinstance(chat, Chat)
    return chat


def segments(version: str, chat: Chat) -> list[Segment]:
    """The control tokens of a conversation, and the texts between them."""
    found = renderer(version)
    assert found.marks is not None
    split = found.marks.split(found.render(chat, budget_seconds=1.0)[0])
    return list(_joined(split))


def _joined(split: list[Segment]) -> Iterator[Segment]:
    for is_text, group in groupby(split, key=lambda one: isinstance(one, str)):
        if is_text:
            yield "".join(map(str, group))
        else:
            yield from group


def judged(ids: list[int]) -> list[Segment]:
    found: list[Segment] = []
    for is_text, group in groupby(ids, key=lambda one: one >= CONTROLS):
        if is_text:
            found.append(b"".join(BYTES[one - CONTROLS] for one in group).decode())
        else:
            found += group
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("number", CHATS)
def test_conversation_is_written_as_the_engine_does(version: str, number: int) -> None:
    ids = JUDGED["ids"][f"mistral-{version}"][number]
    if ids is not None:
        assert segments(version, chat_of(number)) == judged(ids[0])


def chat(*messages: dict[str, Any], **variables: Any) -> Chat:
    options = {"add_generation_prompt": True, "continue_final_message": False, **variables}
    return Chat(list(messages), options, dialect=NEWEST)


@pytest.mark.parametrize(
    ("version", "messages"),
    [
        ("v13", [USER, {"role": "assistant", "content": "x"}]),
        ("v13", [{"role": "critic", "content": "x"}]),
        ("v13", [{"role": "user", "content": None}]),
        ("v13", [{"role": "user", "content": [{"type": "tool_reference", "name": "f"}]}]),
        ("v13", [USER, {"role": "assistant", "content": ""}, USER]),
        ("v13", [USER, {"role": "assistant", "content": "", "reasoning": 5}, USER]),
        ("v13", [USER, {"role": "assistant", "tool_calls": [{**CALL, "id": None}]}, RESULT]),
        ("v11", [USER, {"role": "assistant", "content": "a", "reasoning": "b"}, USER]),
        ("v3", [USER, {"role": "assistant", "content": "a", "tool_calls": [CALL]}, RESULT]),
        (
            "v3",
            [
                USER,
                {"role": "assistant", "content": "a"},
                {"role": "assistant", "tool_calls": [CALL]},
                RESULT,
            ],
        ),
        ("v3", [{"role": "tool", "tool_call_id": "aaaaaaaa1", "content": "9" * 5_000}]),
    ],
)
def test_conversation_that_the_library_refuses_is_refused(
    version: str, messages: list[dict[str, Any]]
) -> None:
    with pytest.raises(RequestError, match="template_failed"):
        segments(version, chat(*messages))


@pytest.mark.parametrize(
    "engine", [Engine("vllm", Release(0, 13)), Engine("sglang", Release(0, 5, 23))]
)
def test_other_engines_are_not_known_to_use_the_library(engine: Engine) -> None:
    dialect = dialect_of(engine)
    with pytest.raises(RequestError, match="unsupported_by_engine"):
        segments("v13", Chat([USER], {}, dialect=dialect))


def test_efforts_are_those_that_the_model_has() -> None:
    unset = {**EFFORTS, "default": None, "accepts_none": False}
    strict = renderer("v15", reasoning_effort=unset)
    with pytest.raises(RequestError, match="template_failed"):
        strict.render(chat(USER), budget_seconds=1.0)
    none = renderer("v15", reasoning_effort={**EFFORTS, "default": None})
    assert none.render(chat(USER), budget_seconds=1.0)[0].endswith("x" + _mark(none, "[/INST]"))


def test_switched_off_thinking_is_no_effort() -> None:
    off = chat(USER)
    off = msgspec.structs.replace(off, effort=DISABLED, effort_rule=Effort.SWITCHES)
    assert segments("v15", off)[2] == '{"reasoning_effort": "none"}'
    with pytest.raises(RequestError, match="template_failed"):
        segments("v15", msgspec.structs.replace(off, effort="low"))


def test_template_arguments_are_refused() -> None:
    with pytest.raises(RequestError, match="template_failed"):
        segments("v13", chat(USER, enable_thinking=True))


def test_thought_stays_between_the_answers_that_it_is_between() -> None:
    answers = [{"role": "assistant", "content": one, "reasoning": two} for one, two in ("ab", "cd")]
    found = segments("v13", chat(USER, *answers, USER))
    assert [one for one in found if isinstance(one, str)] == ["x", "b", "a", "d", "c", "x"]


def _mark(found: Mistral, name: str) -> str:
    assert found.marks is not None
    named = {one["token_str"]: one["rank"] for one in tekken("v15")["special_tokens"]}
    return found.marks.joined([named[name]])


@pytest.mark.parametrize(
    ("version", "missing", "settings", "reason"),
    [
        ("v99", "", {}, "version v99 are not known"),
        ("v13", "[ARGS]", {}, r"no control tokens \[ARGS\]"),
        ("v15", "", {"json_schema": {}}, "settings are not known"),
    ],
)
def test_model_of_another_kind_is_refused(
    version: str, missing: str, settings: dict[str, Any], reason: str
) -> None:
    named = {one["token_str"]: one["rank"] for one in tekken("v15")["special_tokens"]}
    named.pop(missing, None)
    with pytest.raises(ValueError, match=reason):
        Mistral(
            version, named, ControlMarks(named.values()), {"reasoning_effort": EFFORTS, **settings}
        )


def test_thoughts_need_their_control_tokens() -> None:
    named = {one["token_str"]: one["rank"] for one in tekken("v13")["special_tokens"]}
    del named["[THINK]"]
    found = Mistral("v13", named, ControlMarks(named.values()))
    answer = {"role": "assistant", "content": "a", "reasoning": "b"}
    with pytest.raises(RequestError, match="template_failed"):
        found.render(chat(USER, answer, USER), budget_seconds=1.0)


def test_results_are_in_the_order_of_their_calls() -> None:
    calls = [{**CALL, "id": name} for name in ("one", "two")]
    results = [
        {**RESULT, "tool_call_id": name, "content": name} for name in ("two", "other", "one")
    ]
    found = segments("v13", chat(USER, {"role": "assistant", "tool_calls": calls}, *results))
    assert [one for one in found if one in ("one", "two", "other")] == ["one", "two", "other"]


def test_version_three_puts_system_turns_before_the_last_question() -> None:
    system = {"role": "system", "content": "s"}
    answer = {"role": "assistant", "content": "a"}
    assert segments("v3", chat(system, USER, answer, system, USER))[-2] == "s\n\ns\n\nx"
    assert segments("v3", chat(answer, USER))[:4] == [1, 3, 4, "a"]
