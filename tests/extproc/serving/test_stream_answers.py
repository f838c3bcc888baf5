from datetime import timedelta
from typing import Any

import msgspec
import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.headers import DESTINATION, MODEL
from extproc.http2.messages import LongMessage
from extproc.pb.kvsteer_ext_proc_pb2 import HeaderValueOption, ProcessingMode, ProcessingResponse
from extproc.requests.added_fields import LONG_BYTES, ExtendedBody
from extproc.requests.refusals import Refusal
from extproc.serving import stream_answers as say
from extproc.serving.stream_answers import MAX_ECHO_BYTES, AnswerCache, PickAnswer
from tests.oracles.http2.grpc_messages import joined

NAMES_MODEL = (DESTINATION, MODEL)
PICK = PickAnswer("10.0.0.1:1,10.0.0.2:1", ((MODEL, "tiny"),))
LENGTHS = st.integers(0, 3) | st.integers(MAX_ECHO_BYTES - 2, 2 * MAX_ECHO_BYTES + 2)


def test_pick_of_overwrites_headers_and_removes_them_without_a_pick() -> None:
    pick = say.pick_of(PICK, NAMES_MODEL)
    set_headers = pick.header_mutation.set_headers
    assert {one.header.key: one.header.raw_value for one in set_headers} == {
        "x-gateway-destination-endpoint": b"10.0.0.1:1,10.0.0.2:1",
        "x-kvsteer-model": b"tiny",
    }
    assert pick.clear_route_cache
    nothing = say.pick_of(PickAnswer(), (DESTINATION,))
    assert list(nothing.header_mutation.remove_headers) == ["x-gateway-destination-endpoint"]
    assert not nothing.clear_route_cache


def test_pick_header_and_metadata_hold_the_same_value() -> None:
    answer = say.with_metadata(say.request_trailers_go_on(), PICK)
    metadata = {"envoy.lb": {"x-gateway-destination-endpoint": PICK.destination}}
    assert MessageToDict(answer.dynamic_metadata) == metadata
    assert not say.with_metadata(ProcessingResponse(), PickAnswer()).HasField("dynamic_metadata")


def test_placed_headers_may_omit_the_body() -> None:
    common = say.pick_of(PICK, NAMES_MODEL)
    assert not say.headers_placed(common).HasField("mode_override")
    mode = say.headers_placed(common, without_body=True).mode_override
    assert mode.request_body_mode == ProcessingMode.NONE
    assert say.body_placed(common).request_body.response == common


def test_continue_answers_change_nothing() -> None:
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
def test_mode_override_of_request_headers_asks_for_response_headers(mode: int) -> None:
    asked = say.request_headers_go_on(mode).mode_override
    assert (asked.request_body_mode, asked.response_header_mode) == (mode, ProcessingMode.SEND)


def test_mode_override_of_response_headers_asks_for_a_streamed_body() -> None:
    mode = say.response_headers_go_on(read_body=True).mode_override
    assert mode.response_body_mode == ProcessingMode.STREAMED


@given(LENGTHS, st.booleans())
def test_echo_is_exact_in_pieces_envoy_accepts(length: int, last: bool) -> None:
    body = bytes(range(256)) * (length // 256 + 1)
    answers = [*say.request_body_echo(body[:length], end_of_stream=last)]
    parts = [one.request_body.response.body_mutation.streamed_response for one in answers]
    assert b"".join(part.body for part in parts) == body[:length]
    assert max([len(part.body) for part in parts], default=0) <= MAX_ECHO_BYTES
    assert [part.end_of_stream for part in parts] == [False] * (len(parts) - 1) + [last] * bool(
        parts
    )
    assert bool(parts) == (length > 0 or last)


def test_echo_of_a_response_is_a_response_body() -> None:
    (answer,) = say.response_body_echo(b"x", end_of_stream=True)
    part = answer.response_body.response.body_mutation.streamed_response
    assert (part.body, part.end_of_stream) == (b"x", True)


@given(st.integers(0, 10**8))
def test_more_time_is_a_message_with_nothing_but_the_duration(milliseconds: int) -> None:
    answer = ProcessingResponse(override_message_timeout=timedelta(milliseconds=milliseconds))
    said = say.more_time(milliseconds / 1000)
    assert said == answer.SerializeToString()
    assert ProcessingResponse.FromString(said) == answer


@pytest.mark.parametrize("status", [429, 503])
def test_refused_is_an_immediate_response(status: int) -> None:
    refusal = Refusal(status, (("retry-after", "1"),), b"{}")
    answer = say.refused(refusal).immediate_response
    assert (answer.status.code, answer.body, answer.details) == (status, b"{}", "kvsteer")
    (header,) = answer.headers.set_headers
    assert (header.header.key, header.header.raw_value) == ("retry-after", b"1")


def built(answer: PickAnswer, owned: tuple[str, ...]) -> list[Any]:
    """The answer to a request body, built for this placement alone."""
    body = None if answer.body is None else bytes(answer.body)
    made = say.body_placed(say.pick_of(answer, owned), body)
    return say.encoded(say.with_metadata(made, answer))


def test_answer_cache_makes_and_encodes_a_repeated_answer_once() -> None:
    cache = AnswerCache(NAMES_MODEL)
    assert cache.names_model
    assert cache.body_placed(PICK) is cache.body_placed(PICK)
    assert cache.body_placed(PICK) == built(PICK, NAMES_MODEL)
    for mode in (None, *say.WHOLE_BODY_MODES):
        assert cache.go_on(mode) is cache.go_on(mode)
        assert cache.go_on(mode) == say.encoded(say.request_headers_go_on(mode))


PICKS = st.lists(
    st.tuples(st.sampled_from(["10.0.0.1", "[::1]", "a"]), st.integers(1, 65535)).map(
        lambda one: f"{one[0]}:{one[1]}"
    ),
    max_size=16,
).map(",".join)
OWNED = (DESTINATION, MODEL, "x-leg", "x-other-leg", "x-rank", "100%b")
VALUES = st.sampled_from(["", "3", "\0", "\1", "\2\3", "%b", "%", "tiny", "\1" * 9, "ü" * 70])
HEADER_VALUES = st.dictionaries(st.sampled_from(OWNED[1:]), VALUES | st.text(max_size=300)).map(
    lambda told: tuple(told.items())
)
PICK_ANSWERS = st.builds(PickAnswer, PICKS, HEADER_VALUES)


@given(st.lists(PICK_ANSWERS, max_size=9))
def test_answer_is_the_one_that_is_built_for_each_pick(picks: list[PickAnswer]) -> None:
    cache = AnswerCache(OWNED, frozenset({"x-leg"}), most=4)
    for one in (*picks, *picks):
        assert cache.body_placed(one) == built(one, OWNED)


@pytest.mark.parametrize("length", [*range(5), 127, 128, 129, 130, 255, 256, 257, 16_385])
def test_answer_is_right_for_values_of_any_length(length: int) -> None:
    cache = AnswerCache(OWNED)
    for letter in "x\1\2%":
        for one in (
            PickAnswer(letter * length),
            PickAnswer("a:1", (("x-leg", letter * length), ("x-rank", letter * 3))),
            PickAnswer(letter * length, (("x-leg", letter * length),)),
        ):
            assert cache.body_placed(one) == built(one, OWNED)


def test_answer_cache_keeps_a_bounded_number_of_answers() -> None:
    cache = AnswerCache(most=2)
    picks = [PickAnswer(f"10.0.0.{number}:1") for number in range(5)]
    said = [cache.body_placed(pick) for pick in picks]
    assert said[-1] is cache.body_placed(picks[-1])
    assert said[0] is not cache.body_placed(picks[0])
    assert said[0] == cache.body_placed(picks[0])


@pytest.mark.parametrize("more", [{"body": b"{}"}, {"header_values": (("x-leg", "1"),)}])
def test_answer_cache_does_not_keep_answers_of_a_single_request(more: dict[str, Any]) -> None:
    cache, pick = AnswerCache(OWNED, frozenset({"x-leg"})), msgspec.structs.replace(PICK, **more)
    placed = cache.body_placed(pick)
    assert placed is not cache.body_placed(pick)
    assert placed == built(pick, OWNED)


def test_values_that_differ_by_request_drop_no_answer_that_is_kept() -> None:
    cache = AnswerCache(OWNED, frozenset({"x-leg"}), most=2)
    kept = cache.body_placed(PICK)
    for number in range(100):
        cache.body_placed(PickAnswer("a:1", (("x-leg", "1" * number),)))
    assert cache.body_placed(PICK) is kept


@given(PICK_ANSWERS)
def test_pick_of_leaves_no_owned_header_of_a_client(answer: PickAnswer) -> None:
    mutation = say.pick_of(answer, OWNED).header_mutation
    settled = {one.header.key: one.append_action for one in mutation.set_headers}
    assert set(settled.values()) <= {HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD}
    assert {*settled, *mutation.remove_headers} == {*OWNED}
    assert settled.keys().isdisjoint(mutation.remove_headers)


@pytest.mark.parametrize("extra", [-1, 0, 1, 20_000])
def test_new_body_is_whole_however_long_it_is(extra: int) -> None:
    body = bytes(LONG_BYTES + extra)
    pick = PickAnswer("a:1,b:2", (("x", "1"),), body)
    (written,) = AnswerCache((DESTINATION, "x", "y")).body_placed(pick)
    assert isinstance(written, LongMessage) == (extra >= 0)
    answer = ProcessingResponse.FromString(
        written if isinstance(written, bytes) else joined(written)
    )
    common = answer.request_body.response
    assert common.body_mutation.body == body
    headers = {one.header.key: one.header.raw_value for one in common.header_mutation.set_headers}
    assert headers["content-length"] == b"%d" % len(body)
    assert headers["x"] == b"1"
    assert list(common.header_mutation.remove_headers) == ["y"]
    assert answer.HasField("dynamic_metadata")


def test_long_body_that_ends_otherwise_is_not_copied() -> None:
    body = bytes(LONG_BYTES) + b"} "
    pick = PickAnswer("a:1", body=ExtendedBody(body, LONG_BYTES, b',"x":1}'))
    (written,) = AnswerCache().body_placed(pick)
    assert isinstance(written, LongMessage)
    assert written.body is body
    answer = ProcessingResponse.FromString(joined(written)).request_body.response
    assert answer.body_mutation.body == bytes(LONG_BYTES) + b',"x":1}'
