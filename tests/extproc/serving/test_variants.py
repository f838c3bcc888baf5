"""Workers whose engines read a request differently are each told, and scored, in their own way."""

import json
from collections.abc import Mapping
from time import monotonic
from typing import Any

import pytest

from extproc.base.engine import SGLANG, VLLM, Engine, Release
from extproc.config.schema import Model
from extproc.observing.decisions import Timeline
from extproc.requests.dialect import NEWEST, ModelDialects, dialect_of
from extproc.requests.prompt import BILLING, CONVERSATION, CONVERTED, TOOLS
from extproc.requests.request import CHAT_PATH, Head, Models, RoutingRequest
from extproc.routing.inputs.query import Query, Variant
from extproc.serving.queries import Queries
from extproc.serving.variants import by_variant
from extproc.tokenizing.prompt_tokens import PromptTokens
from extproc.tokenizing.tokens import Tokenizer
from kvstate.overlap import Overlap, Prompt, Tokens
from kvtools.simulator.settings import TINY_MODEL

FOREIGN = dialect_of(Engine(SGLANG, Release(0, 5, 8)))
SGLANG_0_5_23 = dialect_of(Engine(SGLANG, Release(0, 5, 23)))
OLD = dialect_of(Engine(VLLM, Release(0, 31)))
SYSTEM = {"role": "system", "content": "x-anthropic-billing-header: cch=1\nbe brief"}
USER = {"role": "user", "content": "hello"}
OWN, OTHERS = Prompt("m", Tokens("I", [1])), Prompt("m", Tokens("I", [2, 3]))


async def query(spoken: ModelDialects, **fields: Any) -> Query:
    tokenizer = Tokenizer.load(Model("tiny", tokenizer=str(TINY_MODEL)))
    assert tokenizer is not None
    tokens = PromptTokens({"tiny": tokenizer}, 60.0)
    queries = Queries(Models([Model("tiny")]), tokens, lambda _: spoken)
    body = {"model": "tiny", "messages": [SYSTEM, USER], **fields}
    request = RoutingRequest(Head("POST", CHAT_PATH, None), json.dumps(body).encode())
    found = await queries.make_query(request, Timeline.begin(monotonic))
    tokens.close()
    return found


async def test_request_is_read_once_for_each_dialect_that_reads_it_otherwise() -> None:
    both = ModelDialects(NEWEST, ((OLD, frozenset(("w",))), (NEWEST, frozenset(("x",)))))
    found = await query(both)
    (variant,) = found.variants
    assert (variant.workers, variant.forms) == (frozenset(("w",)), CONVERSATION | BILLING)
    assert len(variant.prompts[0].tokens) > len(found.prompts[0].tokens)
    assert found.query_for("w").prompts == variant.prompts
    assert found.query_for("x") is found


@pytest.mark.parametrize("fields", [{}, {"prompt_logprobs": 1}])
async def test_worker_of_an_engine_of_unknown_rules_is_told_no_tokens(
    fields: dict[str, Any],
) -> None:
    found = await query(ModelDialects(NEWEST, ((FOREIGN, frozenset(("w",))),)), **fields)
    assert [one.prompts for one in found.variants] == ([] if fields else [()])


async def test_request_that_releases_of_one_engine_read_alike_is_read_anew_for_another() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    both = ModelDialects(NEWEST, ((SGLANG_0_5_23, frozenset(("s",))),), differs_by_engine=True)
    found = await query(both, messages=[USER], tools=tools)
    assert found.query_for("s").forms == CONVERSATION | TOOLS | CONVERTED


async def test_plain_request_has_no_variants() -> None:
    both = ModelDialects(NEWEST, ((OLD, frozenset(("w",))),))
    assert (await query(both, messages=[USER])).variants == ()


class Said:
    """What workers hold for requests of some forms; it stands for all proofs, too."""

    def __init__(self, forms: int = 0) -> None:
        self.forms = forms

    def trust_for(self, forms: int) -> "Said":
        return Said(forms)

    def overlaps(self, prompt: Prompt) -> Mapping[str, Overlap]:
        return {name: Overlap(len(prompt.tokens)) for name in ("old", "new")}

    def state(self, worker: str) -> str:
        return f"{worker} {self.forms}"


def test_each_worker_holds_what_its_own_engine_makes_of_the_request() -> None:
    variants = [
        Variant(frozenset(("old",)), [OTHERS], BILLING),
        Variant(frozenset(("silent",)), (), 0),
    ]
    asked = Query("m", [OWN], forms=CONVERSATION, variants=variants)
    trusted = Said(CONVERSATION)
    held = {**trusted.overlaps(OWN), "silent": Overlap(9)}
    (found,), trust = by_variant(asked, [held], trusted, Said())
    assert found == {"old": Overlap(2), "new": Overlap(1)}
    assert [trust.state(name) for name in ("old", "new")] == [
        f"old {BILLING}",
        f"new {CONVERSATION}",
    ]
    assert trust.overlaps(OWN) == trusted.overlaps(OWN)
