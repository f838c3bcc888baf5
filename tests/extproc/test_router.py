import json
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest

from extproc.config.reader import parse
from extproc.observing.metrics import Metrics
from extproc.requests.costly_json import INLINE_BYTES
from extproc.requests.request import Ask, Head
from extproc.router import Router
from extproc.tokenizing.tokens import Tokenizer
from extproc.workers.workers import Workers
from kvstate.fleet import Fleet
from simulator.settings import TINY_MODEL
from tests.extproc.settled import at_once

CHAT = Head("POST", "/v1/chat/completions", None)
CONFIG = f"""
extproc: {{deadline_ms: 60000}}
envoy: {{message_timeout_ms: 60001}}
models: [{{name: tiny, tokenizer: "{TINY_MODEL}", lora: [adapter]}}, {{name: bare}}]
workers: [{{endpoint: "127.0.0.1:1", model: tiny}}, {{endpoint: "127.0.0.1:2", model: bare}}]
"""


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    config = parse(CONFIG, "c")
    tokenizer = Tokenizer.load(config.models[0])
    assert tokenizer is not None
    workers = Workers(config, Fleet(12345678, lambda: 0.0), lambda _: [])
    await workers.start()
    one = Router(config, workers, {"tiny": tokenizer}, Metrics(workers), Random(0))
    yield one
    one.close()
    await workers.close()


def chat(text: str = "hello", **fields: Any) -> Ask:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}
    return Ask(CHAT, json.dumps(body).encode())


async def test_a_request_is_placed_and_booked_until_it_is_released(router: Router) -> None:
    decision, booking = await router.route(chat())
    assert (decision.model, decision.pick, decision.reason) == (
        "tiny",
        ("127.0.0.1:1",),
        "nothing_cached",
    )
    assert decision.prompt_tokens > 0
    assert booking is not None
    assert router.in_flight("127.0.0.1:1") == 1
    router.release(booking)
    assert router.in_flight("127.0.0.1:1") == 0


async def test_an_adapter_is_served_by_its_models_workers(router: Router) -> None:
    decision, _ = await router.route(chat(model="adapter"))
    assert (decision.model, decision.pick) == ("tiny", ("127.0.0.1:1",))


async def test_a_long_prompt_is_tokenized_beside_the_loop(router: Router) -> None:
    decision, _ = await router.route(chat("word " * INLINE_BYTES))
    assert decision.prompt_tokens > INLINE_BYTES


async def test_a_prompt_that_takes_too_long_is_placed_by_load(router: Router) -> None:
    router._tokens._deadline_seconds = 0.0
    decision, _ = await router.route(chat("word " * INLINE_BYTES))
    assert (decision.reason, decision.pick) == ("deadline", ("127.0.0.1:1",))


@pytest.mark.parametrize(
    ("ask", "model", "reason"),
    [
        (chat(model="nobody"), None, "unknown_model"),
        (chat(model="bare"), "bare", "no_tokenizer"),
        (chat(messages=[]), "tiny", "empty_prompt"),
        (chat("\ud800"), None, "bad_json"),
        (Ask(CHAT, b"{"), None, "bad_json"),
        (Ask(CHAT, None, "body_too_large"), None, "body_too_large"),
    ],
)
async def test_what_cannot_be_keyed_is_placed_by_load(
    router: Router, ask: Ask, model: str | None, reason: str
) -> None:
    decision, booking = await router.route(ask)
    assert (decision.model, decision.reason) == (model, reason)
    assert decision.pick
    assert booking is not None


async def test_what_an_engine_takes_and_we_do_not_is_known_by_its_text(router: Router) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 90_000}}
    ask = chat(messages=[{"role": "user", "content": [image]}])
    first, _ = await router.route(ask)
    assert (first.reason, first.weighed_tokens) == ("unsupported_media", 2_048)
    second, _ = await router.route(ask)
    assert second.claims[second.worker].approximate > 1_500


async def test_what_engines_refuse_is_known_by_nothing(router: Router) -> None:
    decision, _ = await router.route(chat(messages=[], padding="A" * 9_000))
    assert (decision.reason, decision.weighed_tokens, decision.marks) == ("empty_prompt", 0, [])


@pytest.mark.parametrize(("finds_model", "picks"), [(True, 0), (False, 1)])
async def test_a_proxy_that_finds_the_model_places_what_we_have_not_read(
    router: Router,
    finds_model: bool,  # noqa: FBT001
    picks: int,
) -> None:
    ask = Ask(CHAT, None, "body_too_large", proxy_finds_model=finds_model)
    decision, booking = await router.route(ask)
    assert (decision.reason, len(decision.pick)) == ("body_too_large", picks)
    assert (booking is None) is finds_model


async def test_token_ids_need_no_tokenizer(router: Router) -> None:
    body = json.dumps({"model": "bare", "prompt": [1, 2, 3]}).encode()
    decision, _ = await router.route(Ask(Head("POST", "/v1/completions", None), body))
    assert (decision.reason, decision.prompt_tokens) == ("nothing_cached", 3)


async def test_a_fault_of_ours_is_no_fault_of_the_request(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr("extproc.router.parse", broken)
    decision, _ = await router.route(chat())
    assert (decision.reason, decision.pick) == ("internal_error", ("127.0.0.1:1",))
    assert (await router.explain(CHAT, b"{}"))["reason"] == "internal_error"


async def test_what_an_exception_quotes_is_not_logged(
    router: Router, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def quoting(_: str, content: bytes) -> None:
        raise KeyError(content)

    monkeypatch.setattr("extproc.router.parse", quoting)
    await router.route(chat("a secret"))
    assert "decision failed with KeyError" in caplog.text
    assert "in quoting" in caplog.text
    assert "secret" not in caplog.text


async def test_a_decision_that_cannot_be_counted_leaves_no_load(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(Metrics, "observe_decision", broken)
    with pytest.raises(RuntimeError):
        await router.route(chat())
    assert router.in_flight("127.0.0.1:1") == 0


async def test_long_tools_are_tokenized_beside_the_loop_as_well(router: Router) -> None:
    router._tokens._deadline_seconds = 0.0
    function = {"name": "f", "description": "d" * INLINE_BYTES, "parameters": {}}
    decision, _ = await router.route(chat(tools=[{"type": "function", "function": function}]))
    assert decision.reason == "deadline"


async def test_each_model_has_its_own_turns() -> None:
    workers = "".join(
        f"- {{endpoint: '127.0.0.1:{n}', model: {m}}}\n" for n, m in enumerate("aabb", 1)
    )
    models = "models: [{name: a}, {name: b}]\npolicy: {name: round_robin}\n"
    config = parse(f"{models}workers:\n{workers}", "c")
    fleet = Workers(config, Fleet(12345678, lambda: 0.0), lambda _: [])
    router = Router(config, fleet, {}, Metrics(fleet), Random(0))
    picked = [(await router.route(chat(model=model)))[0].pick[0][-1] for model in "abab"]
    router.close()
    assert picked == ["1", "3", "2", "4"]


async def test_explaining_books_nothing(router: Router) -> None:
    decision = await router.explain(CHAT, chat().body or b"")
    assert decision["pick"] == ["127.0.0.1:1"]
    assert router.in_flight("127.0.0.1:1") == 0
    assert (await router.explain(Head("GET", "/", None), b""))["reason"] == "not_inference"


async def test_a_request_that_reads_no_cache_is_booked_with_its_whole_prompt(
    router: Router,
) -> None:
    before, _ = await router.route(chat("word " * 500))
    same, _ = await router.route(chat("word " * 500))
    anew, booking = await router.route(chat("word " * 500, prompt_logprobs=1))
    assert same.uncached_tokens < before.uncached_tokens == before.prompt_tokens
    assert (anew.reason, anew.prompt_tokens) == ("reads_no_cache", before.prompt_tokens)
    assert booking is not None
    assert booking.uncached_tokens == anew.uncached_tokens == anew.prompt_tokens


@pytest.mark.parametrize("refused", [{}, {"chat_template": "x"}])
async def test_a_prompt_known_by_its_text_is_apart_from_those_with_another_salt(
    router: Router, refused: dict[str, Any]
) -> None:
    def expected(**fields: Any) -> float:
        decision, _ = at_once(router.route(chat("word " * 500, model="bare", **fields)))
        return decision.weighed_tokens - decision.uncached_tokens

    assert expected(**refused) == 0
    assert expected(**refused) > 0
    assert expected(**refused, cache_salt="a") == 0
    assert expected(**refused, cache_salt="b") == 0
    again = expected(**refused, cache_salt="a")
    assert again == 0 if refused else again > 0


async def test_a_prompt_known_by_its_text_is_apart_from_other_adapters(router: Router) -> None:
    def expected(model: str) -> float:
        asked = chat("word " * 500, model=model, chat_template="x")
        decision, _ = at_once(router.route(asked))
        assert decision.reason == "unsupported_client_template"
        return decision.weighed_tokens - decision.uncached_tokens

    assert expected("tiny") == expected("adapter") == 0
    assert expected("tiny") > 0
    assert expected("adapter") > 0


async def test_a_body_that_holds_too_much_is_placed_by_load(router: Router) -> None:
    decision, booking = await router.route(chat(other=[[]] * 100_000))
    assert (decision.model, decision.reason) == ("tiny", "too_many_parts")
    assert (decision.pick, booking is not None) == (("127.0.0.1:1",), True)
    assert decision.weighed_tokens > 0
