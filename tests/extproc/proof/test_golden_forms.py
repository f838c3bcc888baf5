"""Forms that releases read differently are proved by the engine's own chat path."""

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from extproc.base.engine import SGLANG, VLLM, Engine, Release
from extproc.config.schema import Model
from extproc.proof.golden_forms import (
    QUESTIONS,
    FormQuestion,
    OwnAnswer,
    OwnPrompt,
    ids_there,
    is_answered,
    own_prompts,
    rival_shown,
    unseen,
    verdicts,
)
from extproc.requests.dialect import NEWEST, Dialect, dialect_of, rivals_of
from extproc.requests.prompt import (
    CONVERTED,
    GIVEN,
    INLINE_SYSTEM,
    ITEMS,
    NO_TOOLS,
    PARTS,
    PRINTED,
    Chat,
    Text,
)
from extproc.requests.request import CHAT_PATH
from extproc.tokenizing.tokens import Tokenizer
from kvstate.overlap import Tokens, shared_tokens
from kvtools.simulator.settings import TINY_MODEL
from tests.extproc.template_shapes import QWEN_TOOLS

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


def test_engine_that_renders_a_conversation_with_ids_is_told_so() -> None:
    (own,) = (one for one in own_prompts(tokenizer(), NEWEST, 0) if one.forms == GIVEN)
    assert verdicts([(own, own.tokens)], tokenizer().text_of, 0)[GIVEN].is_same
    rendered = tokenizer().encode(Text("hello", add_special_tokens=False))
    refuted = verdicts([(own, rendered)], tokenizer().text_of, 0)[GIVEN]
    assert refuted.is_same is False
    assert "ignores the token ids that come along" in refuted.reason


def test_request_that_a_release_refuses_is_not_asked() -> None:
    spoken = dialect_of(Engine(VLLM, Release(0, 10, 2)))
    asked = {own.question.path for own in own_prompts(tokenizer(), spoken, 0)}
    assert "/v1/messages" not in asked


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


def test_unseen_message_has_the_same_forms_and_blocks_of_its_own() -> None:
    (own,) = (one for one in own_prompts(tokenizer(), NEWEST, 0) if one.forms & INLINE_SYSTEM)
    one, other = (unseen(tokenizer(), NEWEST, own, 16, nonce) for nonce in (123, 124))
    assert one is not None
    assert other is not None
    assert one.forms == other.forms == own.forms
    shared = shared_tokens(one.tokens, other.tokens)
    assert len(own.tokens) - 8 < shared < len(own.tokens) + 8
    assert len(one.tokens) >= shared + 2 * 16


def test_only_messages_of_small_blocks_are_sent_to_be_stored() -> None:
    for own in own_prompts(tokenizer(), NEWEST, 0):
        assert (unseen(tokenizer(), NEWEST, own, 16, 1) is None) != (
            own.question.path == "/v1/messages"
        )
        assert unseen(tokenizer(), NEWEST, own, 4096, 1) is None


@pytest.mark.parametrize(("status", "expected"), [(200, True), (404, False), (500, False)])
async def test_message_is_answered_if_the_engine_says_so(status: int, *, expected: bool) -> None:
    engine = EngineAnswers({"/v1/messages": (status, {})})
    asked = FormQuestion("messages", "/v1/messages", {"max_tokens": 1, "messages": []})
    assert await is_answered(engine.post, asked, "m") is expected
    assert engine.asked == [("/v1/messages", {"model": "m", "max_tokens": 1, "messages": []})]


async def test_other_apis_are_only_rendered() -> None:
    engine = EngineAnswers({})
    asked = FormQuestion("messages", "/v1/messages", {"messages": []})
    assert await ids_there(engine.post, asked, "m") is None
    assert [path for path, _ in engine.asked] == ["/v1/messages/render"]


@pytest.mark.parametrize(
    ("shown", "ids"),
    [
        ([{"message": "x", "tokens": [7, 8], "type": "raw_message_tokens"}], [7, 8]),
        ([{"role": "user", "content": []}], None),  # of gpt-oss
        ([], None),
        (None, None),
    ],
)
async def test_response_of_one_token_shows_its_prompt(
    shown: list[Any] | None, ids: list[int] | None
) -> None:
    engine = EngineAnswers({"/v1/responses": (200, {"input_messages": shown})})
    asked = next(one for one in QUESTIONS if one.path == "/v1/responses")
    found = await ids_there(engine.post, asked, "m")
    assert (None if found is None else list(found)) == ids
    (_, (path, body)) = engine.asked
    assert path == "/v1/responses"
    assert (body["max_output_tokens"], body["enable_response_messages"]) == (1, True)


def with_tools(folder: Path) -> Tokenizer:
    """The tiny model with a template that prints tools."""
    shutil.copytree(TINY_MODEL, folder / "m")
    (folder / "m/chat_template.jinja").write_text(QWEN_TOOLS)
    loaded = Tokenizer.load(Model("m", tokenizer=str(folder / "m")))
    assert loaded is not None
    return loaded


@pytest.mark.parametrize("at", range(4))
def test_worker_shows_by_which_library_its_tools_are_printed(tmp_path: Path, at: int) -> None:
    encoder = with_tools(tmp_path)
    spoken = [VLLM_0_24, *rivals_of(VLLM_0_24)][at]
    answers = {own.question.name: own.tokens for own in own_prompts(encoder, spoken, 0)}
    asked = own_prompts(encoder, VLLM_0_24, 0)
    results: Sequence[OwnAnswer] = [(own, answers[own.question.name]) for own in asked]
    found = rival_shown(encoder, VLLM_0_24, results)
    assert (found is None) == (at == 0)
    if found is not None:
        assert found[0] == spoken
        results = found[1]
    known = verdicts(results, encoder.text_of, 0)
    assert known[PRINTED].is_same
    assert all(one.is_same for one in known.values())


def test_answer_of_no_library_is_a_difference(tmp_path: Path) -> None:
    encoder = with_tools(tmp_path)
    other = Tokens("I", [1])
    results = [(own, other) for own in own_prompts(encoder, VLLM_0_24, 0) if own.forms & PRINTED]
    assert rival_shown(encoder, VLLM_0_24, results) is None
    assert verdicts(results, encoder.text_of, 0)[PRINTED].is_same is False
    assert rival_shown(encoder, VLLM_0_24, [(own, None) for own, _ in results]) is None
    assert rival_shown(encoder, NEWEST, [(own, other) for own, _ in results]) is None


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


@pytest.mark.parametrize(("results", "known", "expected"), RESULTS)
def test_difference_refutes_only_what_nothing_else_shows(
    results: list[tuple[OwnPrompt, Tokens | None]], known: int, expected: dict[int, bool]
) -> None:
    found = verdicts(results, text_of, known)
    assert {form: one.is_same for form, one in found.items()} == expected
    assert all(one.reason for one in found.values() if one.is_same is False)
