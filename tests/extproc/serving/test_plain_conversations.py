"""Plain conversations go from the bytes of their body to the query that the decoder leads to."""

import json
import threading
from collections.abc import Sequence
from time import monotonic
from typing import Any

import pytest

from extproc.base.engine import SGLANG, VLLM, Engine, Release
from extproc.base.errors import RequestError
from extproc.config.schema import Model
from extproc.observing.decisions import Timeline
from extproc.requests.dialect import NEWEST, ModelDialects, dialect_of
from extproc.requests.prompt import REBUILT, Text
from extproc.requests.request import CHAT_PATH, Head, Models, RoutingRequest
from extproc.routing.inputs.query import Query
from extproc.serving.queries import Queries
from extproc.tokenizing.plain_turns import PlainTurns, TurnParts
from extproc.tokenizing.prompt_tokens import PromptTokens
from extproc.tokenizing.tokens import Tokenizer
from kvstate.overlap import Tokens
from kvtools.simulator.settings import TINY_MODEL

SGLANG_0_5_23 = dialect_of(Engine(SGLANG, Release(0, 5, 23)))
OLD = dialect_of(Engine(VLLM, Release(0, 31)))
SPOKEN = [
    ModelDialects(NEWEST),
    ModelDialects(NEWEST, ((OLD, frozenset(("w",))),)),
    ModelDialects(SGLANG_0_5_23),
    ModelDialects(NEWEST, ((SGLANG_0_5_23, frozenset(("w",))),), differs_by_engine=True),
]
LONG = "a long answer, of several words. " * 3_000  # takes a thread


class Counted(PlainTurns):
    """Turns that count what becomes of them. failing: what their tokenizing raises."""

    failing: Exception | None = None
    is_blocked = False

    def __init__(self, turns: PlainTurns, forms: int) -> None:
        self.turns, self.forms = turns, forms
        self.finished = 0
        self.may_end = threading.Event()

    def find(self, body: bytes, chat: Any) -> TurnParts | None:
        return self.turns.find(body, chat)

    def is_cheap(self, found: TurnParts) -> bool:
        return self.turns.is_cheap(found)

    def finish(self, found: TurnParts) -> Tokens:
        if self.failing is not None:
            raise self.failing
        if self.is_blocked:
            self.may_end.wait(20)
        self.finished += 1
        return self.turns.finish(found)


class Asked:
    """Queries of a model, with an answer that each conversation begins with."""

    def __init__(self, spoken: ModelDialects = SPOKEN[0], forms: int = 0) -> None:
        tokenizer = Tokenizer.load(Model("tiny", tokenizer=str(TINY_MODEL)))
        assert tokenizer is not None
        assert tokenizer.plain_turns is not None
        self.tokenizer = tokenizer
        self.turns = Counted(tokenizer.plain_turns, tokenizer.plain_turns.forms | forms)
        tokenizer.plain_turns = self.turns
        self.tokens = PromptTokens({"tiny": tokenizer}, 60.0)
        models = Models([Model("tiny", aliases=("other",), lora=("lora",))])
        self.queries = Queries(models, self.tokens, lambda _: spoken)

    async def query(self, *contents: str, **fields: Any) -> Query:
        messages = [{"role": "user", "content": one} for one in contents]
        body = json.dumps({"model": "tiny", "messages": messages, **fields}).encode()
        timeline = Timeline(monotonic, monotonic())
        found = await self.queries.make_query(
            RoutingRequest(Head("POST", CHAT_PATH, None), body), timeline
        )
        assert not found.prompts or timeline.tokenized_at >= timeline.parsed_at > 0.0
        return found


async def learned(*arguments: Any, counts: Sequence[int] = (1, 2)) -> Asked:
    asked = Asked(*arguments)
    for count in counts:
        await asked.query(*["hello"] * count)
    asked.turns.finished = 0
    return asked


@pytest.mark.parametrize(
    "fields",
    [{}, {"model": "other"}, {"model": "lora"}, {"stream": True}, {"cache_salt": "s"}, {"n": 1}],
)
async def test_query_is_the_same_as_the_decoders(fields: dict[str, Any]) -> None:
    asked, other = await learned(), Asked()
    other.tokenizer.plain_turns = None
    for contents in (("hello",), ("hello", LONG), ("hello", "you"), ("\ud800",)):
        found = await asked.query(*contents, **fields)
        assert found == await other.query(*contents, **fields)
    assert asked.turns.finished == 3  # a decoder refuses the lone surrogate


@pytest.mark.parametrize("fields", [{"n": 2}, {"model": "unknown"}, {"cache_salt": "\xe9"}])
async def test_other_fields_and_models_are_left_to_the_decoder(fields: dict[str, Any]) -> None:
    asked = await learned()
    await asked.query("hello", **fields)
    assert asked.turns.finished == 0


@pytest.mark.parametrize(
    ("spoken", "forms", "is_plain"),
    [
        (SPOKEN[0], REBUILT, True),
        (SPOKEN[1], 0, True),
        (SPOKEN[1], REBUILT, False),
        (SPOKEN[2], 0, False),
        (SPOKEN[3], 0, False),
    ],
)
async def test_conversation_is_plain_where_all_engines_read_it_alike(
    spoken: ModelDialects,
    forms: int,
    is_plain: bool,
) -> None:
    asked = await learned(spoken, forms)
    await asked.query("hello")
    assert asked.turns.finished == is_plain


async def test_long_new_turn_is_tokenized_by_a_thread_within_the_deadline() -> None:
    asked = await learned()
    asked.turns.is_blocked, asked.tokens.deadline_seconds = True, 0.05
    found = await asked.query("hello", LONG)
    assert (found.model, found.reason, found.prompts) == ("tiny", "deadline", ())
    assert found.outline is not None
    asked.turns.may_end.set()
    asked.tokens.deadline_seconds = 60.0
    known = await asked.query("hello", LONG)
    assert known.prompts[0].tokens == asked.tokenizer.encode(
        Text(asked.tokenizer.text_of(known.prompts[0].tokens), add_special_tokens=False)
    )


@pytest.mark.parametrize("content", ["hello", LONG])
async def test_conversation_that_fails_as_plain_is_decoded(content: str) -> None:
    asked = await learned()
    asked.turns.failing = RequestError("tokenizer_failed")
    assert len((await asked.query("hello", content)).prompts) == 1


@pytest.mark.parametrize("content", ["hello", LONG])
async def test_fault_in_the_fast_way_is_logged_and_hidden_by_no_other(
    content: str, caplog: pytest.LogCaptureFixture
) -> None:
    asked = await learned()
    asked.turns.failing = ValueError("a bug")
    found = await asked.query("hello", content)
    assert (found.reason, found.prompts) == ("internal_error", ())
    assert "decision failed with ValueError" in caplog.text
