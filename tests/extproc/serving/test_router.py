import contextlib
import json
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest

from extproc.config.reader import parse
from extproc.fleet.workers import Workers
from extproc.observing.metrics import Metrics
from extproc.requests.costly_json import INLINE_BYTES
from extproc.requests.prompt import Prompt
from extproc.requests.request import Head, RoutingRequest
from extproc.serving import queries
from extproc.serving.router import Router
from extproc.tokenizing.tokens import StartedPrompt, Tokenizer
from kvstate.fleet import FollowedWorkers
from kvtools.simulator.settings import TINY_MODEL
from tests.extproc.serving.routers import of
from tests.extproc.settled import at_once

CHAT = Head("POST", "/v1/chat/completions", None)
CONFIG = """
extproc: {{deadline_ms: {deadline_ms}}}
envoy: {{message_timeout_ms: 60001}}
models: [{{name: tiny, tokenizer: "{tokenizer}", lora: [adapter]}}, {{name: bare}}]
workers: [{{endpoint: "127.0.0.1:1", model: tiny}}, {{endpoint: "127.0.0.1:2", model: bare}}]
"""


@pytest.fixture
def deadline_ms() -> int:
    return 60_000


@contextlib.asynccontextmanager
async def routing(
    deadline_ms: int = 60_000,
    tokenizers: type[Tokenizer] = Tokenizer,
    metrics: type[Metrics] = Metrics,
) -> AsyncIterator[Router]:
    """A router; its tokenizer and its metrics may be of a kind that fails."""
    config = parse(CONFIG.format(deadline_ms=deadline_ms, tokenizer=TINY_MODEL), "c")
    tokenizer = tokenizers.load(config.models[0])
    assert tokenizer is not None
    workers = Workers(config, FollowedWorkers(12345678, lambda: 0.0), lambda _: [])
    await workers.start()
    one = Router(config, workers, {"tiny": tokenizer}, metrics(workers.states), Random(0))
    yield one
    one.close()
    await workers.close()


@pytest.fixture
async def router(deadline_ms: int) -> AsyncIterator[Router]:
    async with routing(deadline_ms) as one:
        yield one


def chat(text: str = "hello", **fields: Any) -> RoutingRequest:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}
    return RoutingRequest(CHAT, json.dumps(body).encode())


async def test_route_places_and_books_a_request_until_release(router: Router) -> None:
    decision, ticket = await router.route(chat())
    assert (decision.model, decision.pick, decision.reason) == (
        "tiny",
        ("127.0.0.1:1",),
        "nothing_cached",
    )
    assert decision.basis.prompt_tokens > 0
    assert ticket is not None
    assert router.in_flight("127.0.0.1:1") == 1
    router.release(ticket)
    assert router.in_flight("127.0.0.1:1") == 0


async def test_route_sends_an_adapter_to_the_workers_of_its_model(router: Router) -> None:
    decision, _ = await router.route(chat(model="adapter"))
    assert (decision.model, decision.pick) == ("tiny", ("127.0.0.1:1",))


async def test_route_tokenizes_a_long_prompt_beside_the_loop(router: Router) -> None:
    decision, _ = await router.route(chat("word " * INLINE_BYTES))
    assert decision.basis.prompt_tokens > INLINE_BYTES


@pytest.mark.parametrize("deadline_ms", [1])
async def test_route_places_a_slow_prompt_by_load(router: Router) -> None:
    decision, _ = await router.route(chat("word " * INLINE_BYTES))
    assert (decision.reason, decision.pick) == ("deadline", ("127.0.0.1:1",))


@pytest.mark.parametrize(
    ("unkeyable", "model", "reason"),
    [
        (chat(model="nobody"), None, "unknown_model"),
        (chat(model="bare"), "bare", "no_tokenizer"),
        (chat(messages=[]), "tiny", "empty_prompt"),
        (chat("\ud800"), "tiny", "odd_json"),
        (RoutingRequest(CHAT, b"{"), None, "bad_json"),
        (RoutingRequest(CHAT, None, "body_too_large"), None, "body_too_large"),
    ],
)
async def test_route_places_an_unkeyable_request_by_load(
    router: Router, unkeyable: RoutingRequest, model: str | None, reason: str
) -> None:
    decision, ticket = await router.route(unkeyable)
    assert (decision.model, decision.reason) == (model, reason)
    assert decision.pick
    assert ticket is not None


async def test_route_compares_an_unkeyable_request_by_its_text(router: Router) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 90_000}}
    request = chat(messages=[{"role": "user", "content": [image]}])
    first, _ = await router.route(request)
    assert (first.reason, first.basis.weighed_tokens) == ("unsupported_media", 1_004)
    second, _ = await router.route(request)
    assert second.basis.claims[second.worker].approximate > 900


async def test_route_compares_a_refusable_request_by_nothing(router: Router) -> None:
    decision, _ = await router.route(chat(messages=[], padding="A" * 9_000))
    assert (decision.reason, decision.basis.weighed_tokens, decision.marks) == (
        "empty_prompt",
        0,
        [],
    )


@pytest.mark.parametrize(("finds_model", "picks"), [(True, 0), (False, 1)])
async def test_route_leaves_an_unread_body_to_a_proxy_that_finds_its_model(
    router: Router,
    finds_model: bool,
    picks: int,
) -> None:
    request = RoutingRequest(CHAT, None, "body_too_large", proxy_finds_model=finds_model)
    decision, ticket = await router.route(request)
    assert (decision.reason, len(decision.pick)) == ("body_too_large", picks)
    assert (ticket is None) is finds_model


async def test_route_of_token_ids_needs_no_tokenizer(router: Router) -> None:
    body = json.dumps({"model": "bare", "prompt": [1, 2, 3]}).encode()
    decision, _ = await router.route(RoutingRequest(Head("POST", "/v1/completions", None), body))
    assert (decision.reason, decision.basis.prompt_tokens) == ("nothing_cached", 3)


class Quoting(Tokenizer):
    """Fails, and quotes the prompt."""

    def start(self, prompt: Prompt, *_: Any, **__: Any) -> StartedPrompt:
        raise KeyError(prompt)


async def test_route_places_a_request_despite_an_internal_fault_and_logs_no_text_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with routing(tokenizers=Quoting) as router:
        decision, _ = await router.route(chat("a secret"))
        assert (decision.reason, decision.pick) == ("internal_error", ("127.0.0.1:1",))
        told = await router.explain(CHAT, chat("a secret").body or b"")
        assert told["reason"] == "internal_error"
    assert "decision failed with KeyError" in caplog.text
    assert "in start" in caplog.text
    assert "secret" not in caplog.text


async def test_request_is_placed_even_if_its_model_cannot_be_read_after_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queries, "model_of", fail)
    async with routing(tokenizers=Quoting) as router:
        decision, ticket = await router.route(chat())
        assert (decision.reason, ticket is not None) == ("internal_error", True)


class Uncountable(Metrics):
    """Fails to count a decision."""

    def observe_decision(self, *_: object) -> None:
        raise RuntimeError


async def test_decision_that_cannot_be_counted_is_carried_out() -> None:
    async with routing(metrics=Uncountable) as router:
        decision, ticket = await router.route(chat())
        assert ticket is not None
        assert router.in_flight(decision.worker) == 1
        router.release(ticket)


@pytest.mark.parametrize("deadline_ms", [1])
async def test_route_tokenizes_long_tools_beside_the_loop(router: Router) -> None:
    function = {"name": "f", "description": "d" * INLINE_BYTES, "parameters": {}}
    decision, _ = await router.route(chat(tools=[{"type": "function", "function": function}]))
    assert decision.reason == "deadline"


async def test_round_robin_has_turns_for_each_model() -> None:
    workers = "".join(
        f"- {{endpoint: '127.0.0.1:{n}', model: {m}}}\n" for n, m in enumerate("aabb", 1)
    )
    models = "models: [{name: a}, {name: b}]\npolicy: {name: round_robin}\n"
    config = parse(f"{models}workers:\n{workers}", "c")
    fleet = Workers(config, FollowedWorkers(12345678, lambda: 0.0), lambda _: [])
    router = Router(config, fleet, {}, Metrics(fleet.states), Random(0))
    picked = [(await router.route(chat(model=model)))[0].pick[0][-1] for model in "abab"]
    router.close()
    assert picked == ["1", "3", "2", "4"]


async def test_explain_books_nothing(router: Router) -> None:
    decision = await router.explain(CHAT, chat().body or b"")
    assert decision["pick"] == ["127.0.0.1:1"]
    assert router.in_flight("127.0.0.1:1") == 0
    assert (await router.explain(Head("GET", "/", None), b""))["reason"] == "not_inference"


async def test_route_books_a_request_that_reads_no_cache_with_its_whole_prompt(
    router: Router,
) -> None:
    before, _ = await router.route(chat("word " * 500))
    same, _ = await router.route(chat("word " * 500))
    anew, ticket = await router.route(chat("word " * 500, prompt_logprobs=1))
    assert same.uncached_tokens < before.uncached_tokens == before.basis.prompt_tokens
    assert (anew.reason, anew.basis.prompt_tokens) == ("reads_no_cache", before.basis.prompt_tokens)
    assert ticket is not None
    assert ticket.uncached_tokens == anew.uncached_tokens == anew.basis.prompt_tokens


@pytest.mark.parametrize("refused", [{}, {"chat_template": "x"}])
async def test_route_separates_texts_by_salt(router: Router, refused: dict[str, Any]) -> None:
    def expected(**fields: Any) -> float:
        decision, _ = at_once(router.route(chat("word " * 500, model="bare", **fields)))
        return decision.basis.weighed_tokens - decision.uncached_tokens

    assert expected(**refused) == 0
    assert expected(**refused) > 0
    assert expected(**refused, cache_salt="a") == 0
    assert expected(**refused, cache_salt="b") == 0
    again = expected(**refused, cache_salt="a")
    assert again == 0 if refused else again > 0


async def test_route_separates_texts_by_adapter(router: Router) -> None:
    def expected(model: str) -> float:
        asked = chat("word " * 500, model=model, chat_template="x")
        decision, _ = at_once(router.route(asked))
        assert decision.reason == "unsupported_client_template"
        return decision.basis.weighed_tokens - decision.uncached_tokens

    assert expected("tiny") == expected("adapter") == 0
    assert expected("tiny") > 0
    assert expected("adapter") > 0


async def test_route_places_an_overfull_body_by_load(router: Router) -> None:
    decision, ticket = await router.route(chat(other=[[]] * 100_000))
    assert (decision.model, decision.reason) == ("tiny", "too_many_parts")
    assert (decision.pick, ticket is not None) == (("127.0.0.1:1",), True)
    assert decision.basis.weighed_tokens > 0


def fail(*_: object, **__: object) -> Any:
    raise RuntimeError


@pytest.mark.parametrize("hook", ["terms", "dress", "begin", "note_server"])
async def test_hook_that_fails_loses_no_request(router: Router, hook: str) -> None:
    setattr(router.hooks, hook, [fail])
    decision, ticket = await router.route(chat())
    assert ticket is not None
    router.note_server(decision, ticket, decision.pick[0])
    assert router.in_flight(decision.pick[0]) == 1
    router.release(ticket)
    assert router.in_flight(decision.pick[0]) == 0


async def test_request_whose_decision_fails_stays_with_its_model() -> None:
    workers = "[{endpoint: '10.0.0.1:1', model: a}, {endpoint: '10.0.0.2:1', model: b}]"
    router = of(f"models: [{{name: a}}, {{name: b}}]\nworkers: {workers}\n").router
    router.hooks.terms = [fail]
    body = json.dumps({"model": "b", "prompt": [1, 2]}).encode()
    decision, ticket = await router.route(
        RoutingRequest(Head("POST", "/v1/completions", None), body)
    )
    assert ticket is not None
    assert (decision.worker, decision.reason) == ("10.0.0.2:1", "internal_error")
    router.release(ticket)
    router.close()


async def test_claim_that_fails_leaves_no_load(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router.ledger, "_claim", fail)
    with pytest.raises(RuntimeError):
        await router.route(chat())
    assert router.in_flight("127.0.0.1:1") == 0


async def test_watch_that_fails_leaves_a_ticket_to_be_released(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router.watched, "begin", fail)
    decision, ticket = await router.route(chat())
    assert ticket is not None
    router.release(ticket)
    assert router.in_flight(decision.pick[0]) == 0
