"""The header that says what the fleets of several models hold of a request's prompt."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from extproc.requests.grpc_request import PATHS
from extproc.requests.request import Head, Models, RoutingRequest
from extproc.serving.exchange import Exchange, Service
from extproc.serving.other_models import OtherModels
from tests.extproc.messages import answers_of, body, head
from tests.extproc.serving.routers import in_flight, of
from tests.extproc.settled import at_once

PATH, WARM = "/v1/completions", "x-kvsteer-warm"
IDS = list(range(4_096))
CONFIG = """
extproc: {deadline_ms: 200}
models: [{name: a}, {name: b, lora: [adapter]}]
workers:
- {endpoint: "10.0.0.1:1", model: a, engine: {name: vllm, version: "0.32.0"}}
- {endpoint: "10.0.0.2:1", model: b, engine: {name: vllm, version: "0.32.0"}, lora: [adapter]}
policy: {warm_models: [a, b]}
"""


def sent(model: str, **fields: Any) -> bytes:
    return json.dumps({"model": model, "prompt": IDS, **fields}).encode()


def opened(one: Service, path: str = PATH, **headers: str) -> Exchange:
    """A stream that has the request's head."""
    exchange = one.open()
    named = {f"x-{name}": value for name, value in headers.items()}
    step(one, exchange, head(path, headers={WARM: "a=1.00", **named}))
    return exchange


def step(one: Service, exchange: Exchange, message: Any) -> Any:
    return at_once(exchange.receive(one.decoder.decode(message.SerializeToString())))


def warm(one: Service, content: bytes, path: str = PATH, **headers: str) -> str | None:
    """The value of the header that a request gets; None if a client's own is removed."""
    exchange = opened(one, path, **headers)
    return said(step(one, exchange, body(content)))


def said(answers: object) -> str | None:
    (answer,) = answers_of(answers)
    mutation = answer.request_body.response.header_mutation
    found = [one.header for one in mutation.set_headers if one.header.key == WARM]
    assert len(found) + list(mutation.remove_headers).count(WARM) == 1
    return found[0].raw_value.decode() if found else None


def test_header_says_what_each_fleet_holds_and_replaces_a_clients_own() -> None:
    one = of(CONFIG)
    assert warm(one, sent("a")) == "a=0.00, b=0.00"
    assert warm(one, sent("a")) == "a=0.84, b=0.00"
    assert warm(one, sent("b")) == "a=0.84, b=0.00"
    assert warm(one, sent("b")) == "a=0.84, b=0.84"
    one.router.close()


def test_adapter_of_a_model_holds_nothing_of_the_base_model() -> None:
    one = of(CONFIG)
    warm(one, sent("b"))
    assert warm(one, sent("adapter")) == "a=0.00, b=0.00"
    one.router.close()


def test_asking_books_nothing_at_other_models() -> None:
    one = of(CONFIG)
    warm(one, sent("a"))
    assert [one.router.in_flight(f"10.0.0.{n}:1") for n in (1, 2)] == [1, 0]
    assert in_flight(one) == 1
    one.router.close()


def test_model_that_cannot_know_the_prompt_is_left_out() -> None:
    one = of(CONFIG)
    chat = b'{"model": "a", "messages": [{"role": "user", "content": "hello"}]}'
    assert warm(one, chat, "/v1/chat/completions") is None
    assert warm(one, b"no object") is None
    assert warm(one, sent("nobody")) == "a=0.00, b=0.00"
    one.router.close()


def test_calls_of_grpc_name_no_model_and_ask_none() -> None:
    one = of(CONFIG)
    request = RoutingRequest(Head("POST", next(iter(PATHS)), None), b"message")
    others = OtherModels(one.router, Models(one.config.models), ("a", "b"))
    assert at_once(others.shares(request, {})) == {}
    one.router.close()


async def test_long_body_is_renamed_beside_the_event_loop() -> None:
    one = of(CONFIG)
    exchange, content = opened(one), sent("a", user="x" * 300_000)
    receiving = exchange.receive(one.decoder.decode(body(content).SerializeToString()))
    assert said(await asyncio.wait_for(receiving, 60)) == "a=0.00, b=0.00"
    exchange.close()
    one.router.close()


@pytest.fixture
def tenants(tmp_path: Path) -> str:
    secret = tmp_path / "secret"
    secret.write_bytes(b"0123456789abcdef")
    rules = f"{{header: x-tenant, secret_file: '{secret}', share: [b]}}"
    return f"{CONFIG}\nisolation: {rules}"


def test_each_model_is_asked_with_the_salt_that_a_tenants_request_would_get(tenants: str) -> None:
    one = of(tenants)
    warm(one, sent("a"), tenant="x")
    warm(one, sent("b"), tenant="x")
    assert warm(one, sent("a"), tenant="x") == "a=0.84, b=0.84"
    assert warm(one, sent("b"), tenant="y") == "a=0.00, b=0.84"
    assert warm(one, sent("a"), tenant="y") == "a=0.00, b=0.84"
    one.router.close()


def test_without_models_nothing_is_asked_and_no_header_is_touched() -> None:
    one = of(CONFIG.replace("policy: {warm_models: [a, b]}", ""))
    exchange = one.open()
    step(one, exchange, head(PATH, headers={WARM: "a=1.00"}))
    (answer,) = answers_of(step(one, exchange, body(sent("a"))))
    assert WARM not in str(answer)
    assert (type(one), type(exchange), one.prepares) == (Service, Exchange, False)
    one.router.close()
