"""Forms that releases read differently are proved by the engine's own chat path."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest

from extproc.base.engine import SGLANG, VLLM, Engine, Release
from extproc.config.schema import Model
from extproc.proof.golden_forms import (
    QUESTIONS,
    FormQuestion,
    OwnPrompt,
    ids_there,
    own_prompts,
    verdicts,
)
from extproc.requests.dialect import NEWEST, Dialect, dialect_of
from extproc.requests.prompt import CONVERTED, INLINE_SYSTEM, ITEMS, NO_TOOLS, PARTS, Chat
from extproc.requests.request import CHAT_PATH
from extproc.tokenizing.tokens import Tokenizer
from kvstate.overlap import Tokens
from simulator.settings import TINY_MODEL

CHAT = QUESTIONS[0]
SGLANG_0_5_23 = dialect_of(Engine(SGLANG, Release(0, 5, 23)))
VLLM_0_24 = dialect_of(Engine(VLLM, Release(0, 24)))


@cache
def tokenizer() -> Tokenizer:
    loaded = Tokenizer.load(Model("tiny", tokenizer=str(TINY_MODEL)))
    assert loaded is not None
    return loaded


@pytest.mark.parametrize(
    ("dialect", "forms"),
    [(NEWEST, NO_TOOLS | INLINE_SYSTEM | ITEMS), (SGLANG_0_5_23, CONVERTED), (VLLM_0_24, NO_TOOLS)],
)
def test_every_form_that_the_model_knows_has_a_question(dialect: Dialect, forms: int) -> None:
    found = own_prompts(tokenizer(), dialect, 0)
    asked = 0
    for own in found:
        asked |= own.forms
    assert asked & forms == forms
    assert own_prompts(tokenizer(), dialect, asked) == []


class EngineAnswers:
    """An engine's answers by path, and what it was asked."""

    def __init__(self, answers: Mapping[str, tuple[int, Any]]) -> None:
        self._answers = answers
        self.asked: list[tuple[str, Mapping[str, Any]]] = []

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        self.asked.append((path, json.loads(body)))
        status, answer = self._answers.get(path, (404, {}))
        return status, json.dumps(answer).encode()


SHOWN: list[tuple[dict[str, tuple[int, Any]], list[int] | None]] = [
    ({f"{CHAT_PATH}/render": (200, {"token_ids": [1, 2]})}, [1, 2]),
    ({CHAT_PATH: (200, {"prompt_token_ids": [3], "choices": [{"token_ids": [9]}]})}, [3]),
    ({CHAT_PATH: (200, {"choices": [{"prompt_token_ids": [4]}]})}, [4]),
    ({CHAT_PATH: (200, {"choices": [{}]})}, None),
    ({CHAT_PATH: (200, {"prompt_token_ids": [-1]})}, None),
    ({CHAT_PATH: (200, {"prompt_token_ids": "x"})}, None),
    ({CHAT_PATH: (400, {"error": "x"})}, None),
    ({f"{CHAT_PATH}/render": (400, {}), CHAT_PATH: (200, {"prompt_token_ids": [1]})}, None),
]


@pytest.mark.parametrize(("answers", "ids"), SHOWN)
async def test_ids_are_those_of_the_chat_path(
    answers: dict[str, tuple[int, Any]], ids: list[int] | None
) -> None:
    engine = EngineAnswers(answers)
    found = await ids_there(engine.post, CHAT, "m")
    assert (None if found is None else list(found)) == ids
    path, body = engine.asked[-1]
    assert body["model"] == "m"
    assert body.get("max_tokens") == (None if path.endswith("/render") else 1)


async def test_other_apis_are_only_rendered() -> None:
    engine = EngineAnswers({})
    asked = FormQuestion("messages", "/v1/messages", {"messages": []})
    assert await ids_there(engine.post, asked, "m") is None
    assert [path for path, _ in engine.asked] == ["/v1/messages/render"]


def own(forms: int) -> OwnPrompt:
    return OwnPrompt(CHAT, Chat([], {}), forms, Tokens("I", [1, 2]))


def text_of(tokens: Sequence[int]) -> str:
    return "".join(map(str, tokens))


SAME, OTHER = Tokens("I", [1, 2]), Tokens("I", [1, 3])
RESULTS: list[tuple[list[tuple[OwnPrompt, Tokens | None]], int, dict[int, bool]]] = [
    ([(own(PARTS), SAME)], 0, {PARTS: True}),
    ([(own(PARTS), None)], 0, {}),
    ([(own(PARTS), OTHER), (own(ITEMS), SAME)], 0, {PARTS: False, ITEMS: True}),
    ([(own(PARTS | ITEMS), OTHER), (own(ITEMS), SAME)], 0, {PARTS: False, ITEMS: True}),
    ([(own(PARTS | ITEMS), OTHER)], ITEMS, {PARTS: False}),
    ([(own(PARTS), SAME), (own(PARTS), OTHER)], 0, {PARTS: False}),
]


@pytest.mark.parametrize(("told", "known", "expected"), RESULTS)
def test_difference_refutes_only_what_nothing_else_shows(
    told: list[tuple[OwnPrompt, Tokens | None]], known: int, expected: dict[int, bool]
) -> None:
    found = verdicts(told, text_of, known)
    assert {form: one.is_same for form, one in found.items()} == expected
    assert all(one.reason for one in found.values() if one.is_same is False)
