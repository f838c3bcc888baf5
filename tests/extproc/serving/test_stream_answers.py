from typing import Any

import msgspec
import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st

from extproc.pb.kvsteer_ext_proc_pb2 import ProcessingMode, ProcessingResponse
from extproc.picking.decision import Refusal
from extproc.serving import stream_answers as say
from extproc.serving.stream_answers import MAX_ECHO_BYTES, Phrases, Placement

PICK = Placement("10.0.0.1:1,10.0.0.2:1", "tiny")
LENGTHS = st.integers(0, 3) | st.integers(MAX_ECHO_BYTES - 2, 2 * MAX_ECHO_BYTES + 2)


def test_the_pick_overwrites_and_the_absence_of_one_removes() -> None:
    told = say.pick_of(PICK, names_model=True)
    names = {one.header.key: one.header.raw_value for one in told.header_mutation.set_headers}
    assert names == {
        "x-gateway-destination-endpoint": b"10.0.0.1:1,10.0.0.2:1",
        "x-kvsteer-model": b"tiny",
    }
    assert told.clear_route_cache
    nothing = say.pick_of(Placement(), names_model=False)
    assert list(nothing.header_mutation.remove_headers) == ["x-gateway-destination-endpoint"]
    assert not nothing.clear_route_cache


def test_a_rank_overwrites_what_a_client_asks_for() -> None:
    told = say.pick_of(Placement("10.0.0.1:1", rank=("x-rank", "3")), names_model=False)
    last = told.header_mutation.set_headers[-1]
    assert (last.header.key, last.header.raw_value) == ("x-rank", b"3")


def test_header_and_metadata_hold_the_same_value() -> None:
    answer = say.with_metadata(say.request_trailers_go_on(), PICK)
    metadata = {"envoy.lb": {"x-gateway-destination-endpoint": PICK.destination}}
    assert MessageToDict(answer.dynamic_metadata) == metadata
    assert not say.with_metadata(ProcessingResponse(), Placement()).HasField("dynamic_metadata")


def test_headers_that_were_placed_may_spare_envoy_the_body() -> None:
    common = say.pick_of(PICK, names_model=False)
    assert not say.headers_placed(common).HasField("mode_override")
    mode = say.headers_placed(common, without_body=True).mode_override
    assert mode.request_body_mode == ProcessingMode.NONE
    assert say.body_placed(common).request_body.response == common


def test_what_goes_on_says_nothing() -> None:
    answers = {
        "request_headers": say.request_headers_go_on(),
        "request_body": say.request_body_goes_on(),
        "request_trailers": say.request_trailers_go_on(),
        "response_headers": say.response_headers_go_on(),
        "response_body": say.response_body_goes_on(),
        "response_trailers": say.response_trailers_go_on(),
    }
    for kind, answer in answers.items():
        assert answer.WhichOneof("response") == kind
        assert answer.ByteSize() == 2


@pytest.mark.parametrize("mode", say.WHOLE_BODY_MODES)
def test_a_responses_headers_may_be_asked_for(mode: int) -> None:
    asked = say.request_headers_go_on(mode).mode_override
    assert (asked.request_body_mode, asked.response_header_mode) == (mode, ProcessingMode.SEND)


def test_a_response_may_be_asked_for_as_it_streams() -> None:
    mode = say.response_headers_go_on(read_body=True).mode_override
    assert mode.response_body_mode == ProcessingMode.STREAMED


@given(LENGTHS, st.booleans())
def test_an_echo_is_exact_and_in_pieces_that_envoy_takes(length: int, last: bool) -> None:  # noqa: FBT001
    body = bytes(range(256)) * (length // 256 + 1)
    answers = [*say.request_body_echo(body[:length], end_of_stream=last)]
    parts = [one.request_body.response.body_mutation.streamed_response for one in answers]
    assert b"".join(part.body for part in parts) == body[:length]
    assert max([len(part.body) for part in parts], default=0) <= MAX_ECHO_BYTES
    assert [part.end_of_stream for part in parts] == [False] * (len(parts) - 1) + [last] * bool(
        parts
    )
    assert bool(parts) == (length > 0 or last)


def test_a_response_is_echoed_as_a_response() -> None:
    (answer,) = say.response_body_echo(b"x", end_of_stream=True)
    part = answer.response_body.response.body_mutation.streamed_response
    assert (part.body, part.end_of_stream) == (b"x", True)


@pytest.mark.parametrize("status", [429, 503])
def test_a_refusal_is_an_answer_of_ours(status: int) -> None:
    refusal = Refusal(status, (("retry-after", "1"),), b"{}")
    answer = say.refused(refusal).immediate_response
    assert (answer.status.code, answer.body, answer.details) == (status, b"{}", "kvsteer")
    (header,) = answer.headers.set_headers
    assert (header.header.key, header.header.raw_value) == ("retry-after", b"1")


def test_what_is_said_again_is_made_and_encoded_once() -> None:
    phrases = Phrases()
    placed = phrases.body_placed(PICK, names_model=True)
    assert placed is phrases.body_placed(PICK, names_model=True)
    assert phrases.encoded(placed) is phrases.encoded(placed)
    made = say.with_metadata(say.body_placed(say.pick_of(PICK, names_model=True)), PICK)
    assert phrases.encoded(placed) == phrases.encoded(made) == made.SerializeToString()
    for mode in (None, *say.WHOLE_BODY_MODES):
        assert phrases.go_on(mode) is phrases.go_on(mode)
        assert phrases.go_on(mode) == say.request_headers_go_on(mode)


def test_only_so_much_of_what_is_said_is_kept() -> None:
    phrases = Phrases(most=2)
    picks = [Placement(f"10.0.0.{number}:1") for number in range(5)]
    said = [phrases.body_placed(pick, names_model=False) for pick in picks]
    assert said[-1] is phrases.body_placed(picks[-1], names_model=False)
    assert said[0] is not phrases.body_placed(picks[0], names_model=False)
    assert [phrases.encoded(one) for one in said] == [one.SerializeToString() for one in said]


@pytest.mark.parametrize("more", [{"body": b"{}"}, {"legs": (("x-leg", "1"),)}])
def test_what_is_said_of_one_request_alone_is_not_kept(more: dict[str, Any]) -> None:
    phrases, pick = Phrases(), msgspec.structs.replace(PICK, **more)
    placed = phrases.body_placed(pick, names_model=False, owned=("x-leg",))
    assert placed is not phrases.body_placed(pick, names_model=False, owned=("x-leg",))
    made = say.body_placed(say.pick_of(pick, names_model=False, owned=("x-leg",)), pick.body)
    assert placed == say.with_metadata(made, pick)
