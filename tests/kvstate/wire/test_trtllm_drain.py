import time
from typing import Any

import msgspec
import pytest

from kvstate.errors import WireError
from kvstate.wire.trtllm_wire import error_of, parse_drain, parse_event


def test_answer_is_a_list_of_events() -> None:
    assert parse_drain(b"[]") == []
    (one,) = parse_drain(b'[{"event_id": 3, "data": {"type": "created"}, "attention_dp_rank": 2}]')
    event = parse_event(one)
    assert (event.rank, event.sequence, event.window_tokens) == (2, 3, None)


@pytest.mark.parametrize("body", [b"", b"{}", b"[", b"[" * 5000, b"\xff", b'{"error": "x"}'])
def test_invalid_answer_is_refused(body: bytes) -> None:
    with pytest.raises(WireError, match="answer is no JSON list of events"):
        parse_drain(body)


@pytest.mark.parametrize("number", [-1, 2**64, None, "7", 1.5])
def test_event_without_a_number_is_refused(number: Any) -> None:
    with pytest.raises(WireError, match="event has no number"):
        parse_event(msgspec.Raw(msgspec.json.encode({"event_id": number})))


def test_error_of_names_the_error_of_the_server() -> None:
    assert error_of(b'{"error": "not enabled"}') == "not enabled"
    assert error_of(b'{"error": {"code": 1}}') == "an error"
    assert error_of(b"[]") is None


@pytest.mark.parametrize("element", [b"0", b"{}", b'"text"'])
def test_long_list_of_other_values_is_refused_at_the_first(element: bytes) -> None:
    body = b"[" + b",".join([element] * 2_000_000) + b"]"
    began = time.thread_time()
    with pytest.raises(WireError, match="no JSON list of events"):
        parse_drain(body)
    refused, began = time.thread_time() - began, time.thread_time()
    msgspec.json.decode(body, type=list[msgspec.Raw])
    assert refused < (time.thread_time() - began) / 4


def test_events_over_the_limit_are_refused() -> None:
    body = b"[" + b",".join([b'{"event_id":1}'] * 65_537) + b"]"
    with pytest.raises(WireError, match="more than 65536 events"):
        parse_drain(body)


def test_long_list_of_events_is_parsed() -> None:
    body = b"[" + b",".join([b'{"event_id":1,"data":{}}'] * 10_000) + b"]"
    assert len(parse_drain(body)) == 10_000
