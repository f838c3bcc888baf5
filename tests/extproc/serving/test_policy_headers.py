"""A policy gets the value of the request's header that its entry of POLICIES says it reads."""

import json
from typing import cast

import pytest

from extproc.config.policies import POLICIES, Order, PolicyInput, Ranking
from extproc.requests.request import Head
from extproc.serving.exchange import Service
from tests.extproc.messages import body, head
from tests.extproc.serving.routers import FIRST, SECOND, seen, service
from tests.extproc.settled import at_once

PROMPT = json.dumps({"model": "m", "prompt": [1, 2]}).encode()
PLACES = {b"one": FIRST, b"two": SECOND}


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> list[PolicyInput]:
    """What a policy gets that reads `policy.header`, which names a worker."""
    given: list[PolicyInput] = []

    def by_header(columns: PolicyInput) -> Order:
        given.append(columns)
        place = PLACES.get(columns.header)
        return [0.0 if endpoint == place else 1.0 for endpoint in columns.endpoints()]

    ranking = Ranking(by_header, reads_header="header")
    monkeypatch.setitem(cast("dict[str, Ranking]", POLICIES), "random", ranking)
    return given


def serving(policy: str = "random") -> Service:
    return service(f"policy: {{name: {policy}, header: X-User, session_header: x-s}}")


def picked(one: Service, *users: str, session: str = "") -> str:
    """The first pick for a request with these values of the header."""
    exchange = one.open()
    first = head("/v1/completions", headers={"x-s": session})
    for user in users:
        first.request_headers.headers.headers.add(key="x-user", raw_value=user.encode())
    for message in (first, body(PROMPT)):
        at_once(exchange.receive(one.decoder.decode(message.SerializeToString())))
    exchange.close()
    return seen(one).decisions[-1].pick[0]


def test_value_of_the_header_reaches_the_policy(inputs: list[PolicyInput]) -> None:
    one = serving()
    assert [picked(one, name) for name in ("one", "two", "one")] == [FIRST, SECOND, FIRST]
    picked(one, "one", "two", session="s7")
    picked(one)
    assert [given.header for given in inputs[3:]] == [b"one,two", b""]
    assert [given.session for given in inputs[3:]] == ["s7", ""]
    assert inputs[0].rules == one.config.policy
    one.router.close()


async def test_explained_request_gives_the_policy_the_same(inputs: list[PolicyInput]) -> None:
    one = serving()
    assert one.router.preparation.headers == ["x-user"]
    where = Head("POST", "/v1/completions", None)
    told = [await one.router.explain(where, PROMPT, {"x-user": [name]}) for name in PLACES]
    assert [shown["pick"][0] for shown in told] == [FIRST, SECOND]
    assert [given.header for given in inputs] == [*PLACES]
    one.router.close()


def test_policy_that_reads_no_header_gets_none(inputs: list[PolicyInput]) -> None:
    one = serving("least_request")
    assert {picked(one, "one") for _ in range(50)} == {FIRST, SECOND}
    assert not inputs
    one.router.close()


def test_no_header_is_taken_in_where_no_policy_reads_one() -> None:
    one = serving()
    assert not one.prepares
    assert one.router.preparation.headers == []
    one.router.close()
