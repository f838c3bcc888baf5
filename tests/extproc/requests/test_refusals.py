"""The router's own answers: JSON over HTTP, and to a client of gRPC what such a client reads."""

import json
from collections.abc import Callable

import pytest

from extproc.requests.grpc_request import PATHS
from extproc.requests.refusals import (
    Refusal,
    busy,
    crowded_out,
    no_room,
    refused_body,
    unavailable,
)
from extproc.requests.request import CHAT_PATH
from extproc.requests.reserved_grpc_fields import MAX_FIELDS


def test_refusal_while_all_are_busy_is_429_with_retry_after() -> None:
    refusal = busy(CHAT_PATH)
    assert refusal.status == 429
    assert dict(refusal.headers) == {"content-type": "application/json", "retry-after": "1"}
    assert json.loads(refusal.body)["error"]["type"] == "RateLimitError"


def test_refusal_without_room_is_429_and_says_that_the_place_is_kept() -> None:
    refusal = no_room(CHAT_PATH)
    assert (refusal.status, dict(refusal.headers)["retry-after"]) == (429, "5")
    assert b"keeps its place" in refusal.body


def test_refusal_without_a_worker_is_503() -> None:
    refusal = unavailable(CHAT_PATH)
    assert (refusal.status, json.loads(refusal.body)["error"]["code"]) == (503, 503)


def test_refused_body_is_400_in_json() -> None:
    refusal = refused_body(CHAT_PATH)
    assert (refusal.status, json.loads(refusal.body)["error"]["code"]) == (400, 400)


def test_body_without_room_is_429() -> None:
    refusal = crowded_out(CHAT_PATH)
    assert (refusal.status, json.loads(refusal.body)["error"]["code"]) == (429, 429)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("refused", "status"), [(busy, "8"), (unavailable, "14")])
def test_refusal_of_a_grpc_request_is_trailers_only(
    path: str, refused: Callable[[str], Refusal], status: str
) -> None:
    assert trailers_only(refused(path))["grpc-status"] == status


@pytest.mark.parametrize("path", PATHS)
def test_refused_grpc_body_is_an_invalid_argument(path: str) -> None:
    headers = trailers_only(refused_body(path))
    assert headers["grpc-status"] == "3"
    assert f"at most {MAX_FIELDS} fields" in headers["grpc-message"]


def trailers_only(refusal: Refusal) -> dict[str, str]:
    headers = dict(refusal.headers)
    assert (refusal.status, refusal.body) == (200, b"")
    assert headers["content-type"] == "application/grpc"
    assert headers["grpc-message"].isprintable()
    assert "%" not in headers["grpc-message"]
    return headers
