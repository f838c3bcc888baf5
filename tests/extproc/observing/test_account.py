from array import array

import msgspec
import pytest

from extproc.observing.outcomes import Account
from extproc.observing.usage import UNKNOWN, Usage
from extproc.requests.prompt import TEXT
from kvstate.overlap import Prompt
from tests.extproc.observing.decisions import decided

BODY = b'{"usage": {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 48}}}'


def account(prompts: int = 1) -> Account:
    sole = Prompt("m", array("I", range(100))) if prompts == 1 else None
    compared = None if sole is None else (sole, TEXT)
    return Account(decided(prompts), compared, began_at=10.0)


def test_outcome_without_a_response_has_no_status() -> None:
    outcome = account().outcome()
    assert (outcome.status, outcome.ttft_seconds, outcome.reported) == (None, None, UNKNOWN)
    assert (outcome.model, outcome.worker, outcome.is_moved) == ("m", "first", False)
    assert (outcome.prompt_tokens, outcome.predicted_tokens) == (100, 64)


def test_outcome_names_the_picked_worker_that_answers() -> None:
    one = account()
    assert one.respond(200, "10.0.0.1:1", 10.5) is None
    outcome = one.outcome()
    assert (outcome.worker, outcome.is_moved, outcome.ttft_seconds) == ("first", False, 0.5)


def test_outcome_names_the_pick_where_the_proxy_names_no_served_endpoint() -> None:
    one = account()
    assert one.respond(200, "", 10.5) is None
    assert one.outcome().worker == "first"


def test_outcome_predicts_for_the_serving_worker() -> None:
    one = account()
    assert one.respond(200, "10.0.0.2:1", 10.5) == "10.0.0.2:1"
    assert one.worker_at("10.0.0.2:1") == "second"
    outcome = one.outcome()
    assert (outcome.worker, outcome.is_moved, outcome.predicted_tokens) == ("second", True, 16)


def test_outcome_of_a_served_endpoint_outside_the_fleet_names_no_worker() -> None:
    one = account()
    assert one.respond(200, "10.9.9.9:9", 10.5) == "10.9.9.9:9"
    outcome = one.outcome()
    assert (outcome.worker, outcome.is_moved, outcome.predicted_tokens) == ("", True, 0)


def test_read_finds_usage_and_the_time_of_the_first_byte() -> None:
    one = account()
    one.respond(200, "", 10.5)
    one.read(b"", 10.6)
    one.read(BODY[:50], 11.0)
    one.read(BODY[50:], 12.0)
    outcome = one.outcome()
    assert outcome.reported == Usage(100, 48, "prompt")
    assert (outcome.ttft_seconds, outcome.error_tokens) == (1.0, 16)


@pytest.mark.parametrize(
    ("status", "failed"), [(None, False), (200, False), (400, True), (503, True)]
)
def test_error_status_shows_an_uncomputed_prompt(status: int | None, *, failed: bool) -> None:
    one = account()
    one.respond(status, "", 10.5)
    assert one.has_failed is failed
    assert one.outcome().is_comparable is not failed


def test_usage_over_several_prompts_is_not_compared() -> None:
    one = account(prompts=2)
    one.read(BODY, 11.0)
    assert one.outcome().error_tokens is None


def test_outcome_is_whole_after_the_last_piece() -> None:
    one = account()
    one.read(BODY[:50], 11.0)
    assert not one.outcome().is_whole
    one.read(BODY[50:], 12.0, is_last=True)
    assert one.outcome().is_whole


@pytest.mark.parametrize(
    ("served", "delivery"),
    [("10.0.0.1:1", "delivered"), ("10.0.0.2:1", "elsewhere"), ("", "unknown")],
)
def test_steered_request_is_delivered_where_the_picked_worker_answers(
    served: str, delivery: str
) -> None:
    one = account()
    one.respond(200, served, 10.5)
    outcome = one.outcome()
    assert (outcome.is_steered, outcome.delivery) == (True, delivery)


def test_outcome_of_an_unsteered_request_predicts_for_the_worker_that_answered() -> None:
    sole = Prompt("m", array("I", range(100)))
    decision = msgspec.structs.replace(decided(1), is_steered=False)
    one = Account(decision, (sole, TEXT), began_at=10.0)
    one.respond(200, "10.0.0.2:1", 10.5)
    outcome = one.outcome()
    assert (outcome.worker, outcome.predicted_tokens) == ("second", 16)
    assert (outcome.is_steered, outcome.is_moved, outcome.delivery) == (False, False, "unknown")


@pytest.mark.parametrize(
    ("body", "counted"),
    [
        (BODY, 100),
        (b'{"usage": {"prompt_tokens": 7}}', 7),
        (b'{"usage": {"input_tokens": 5, "cache_read_input_tokens": 90}}', None),
        (b"{}", None),
    ],
)
def test_counted_tokens_are_those_of_a_sole_prompt_that_was_computed(
    body: bytes, counted: int | None
) -> None:
    for prompts, status, expected in ((1, 200, counted), (2, 200, None), (1, 400, None)):
        one = account(prompts)
        one.respond(status, "10.0.0.1:1", 10.5)
        one.read(body, 10.6, is_last=True)
        assert one.outcome().counted_tokens == expected
