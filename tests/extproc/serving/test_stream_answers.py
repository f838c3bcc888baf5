from typing import Any

import msgspec
import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st

from extproc.http2.grpc_messages import LongMessage, joined
from extproc.pb.kvsteer_ext_proc_pb2 import HeaderValueOption, ProcessingMode, ProcessingResponse
from extproc.requests.added_fields import LONG_BYTES, Extended
from extproc.serving import stream_answers as say
from extproc.serving.refusals import Refusal
from extproc.serving.stream_answers import MAX_ECHO_BYTES, Phrases, Placement

PICK = Placement("10.0.0.1:1,10.0.0.2:1", "tiny")
LENGTHS = st.integers(0, 3) | st.integers(MAX_ECHO_BYTES - 2, 2 * MAX_ECHO_BYTES + 2)


def test_pick_of_overwrites_headers_and_removes_them_without_a_pick() -> None:
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


def test_pick_of_overwrites_the_rank_header_of_a_client() -> None:
    told = say.pick_of(Placement("10.0.0.1:1", rank=("x-rank", "3")), names_model=False)
    last = told.header_mutation.set_headers[-1]
    assert (last.header.key, last.header.raw_value) == ("x-rank", b"3")


def test_pick_header_and_metadata_hold_the_same_value() -> None:
    answer = say.with_metadata(say.request_trailers_go_on(), PICK)
    metadata = {"envoy.lb": {"x-gateway-destination-endpoint": PICK.destination}}
    assert MessageToDict(answer.dynamic_metadata) == metadata
    assert not say.with_metadata(ProcessingResponse(), Placement()).HasField("dynamic_metadata")


def test_placed_headers_may_omit_the_body() -> None:
    common = say.pick_of(PICK, names_model=False)
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


@pytest.mark.parametrize("status", [429, 503])
def test_refused_is_an_immediate_response(status: int) -> None:
    refusal = Refusal(status, (("retry-after", "1"),), b"{}")
    answer = say.refused(refusal).immediate_response
    assert (answer.status.code, answer.body, answer.details) == (status, b"{}", "kvsteer")
    (header,) = answer.headers.set_headers
    assert (header.header.key, header.header.raw_value) == ("retry-after", b"1")


def test_phrases_make_and_encode_a_repeated_answer_once() -> None:
    phrases = Phrases()
    placed = phrases.body_placed(PICK, names_model=True)
    assert placed is phrases.body_placed(PICK, names_model=True)
    made = say.with_metadata(say.body_placed(say.pick_of(PICK, names_model=True)), PICK)
    assert placed == [made.SerializeToString()]
    for mode in (None, *say.WHOLE_BODY_MODES):
        assert phrases.go_on(mode) is phrases.go_on(mode)
        assert phrases.go_on(mode) == say.encoded(say.request_headers_go_on(mode))


def test_body_picked_is_the_answer_of_a_placement_of_the_first_endpoints() -> None:
    phrases, pick = Phrases(), ("10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1")
    picked = phrases.body_picked(pick, "tiny", 2, names_model=True)
    assert picked == phrases.body_placed(PICK, names_model=True)
    assert picked is phrases.body_picked(pick, "tiny", 2, names_model=True)
    unnamed = phrases.body_picked((), None, 2, names_model=True)
    assert unnamed == phrases.body_placed(Placement(), names_model=True)


PICKS = st.lists(
    st.tuples(st.sampled_from(["10.0.0.1", "[::1]", "a"]), st.integers(1, 65535)).map(
        lambda one: f"{one[0]}:{one[1]}"
    ),
    max_size=3,
).map(tuple)


@given(st.lists(st.tuples(PICKS, st.sampled_from(["tiny", None, "\x01" * 9])), max_size=9))
def test_body_picked_is_the_answer_that_is_built_for_each_pick(
    picks: list[tuple[tuple[str, ...], str | None]],
) -> None:
    phrases = Phrases(most=4)
    for pick, model in picks:
        placement = Placement(",".join(pick[:2]), model or "")
        made = say.body_placed(say.pick_of(placement, names_model=True, owned=("x-leg",)))
        picked = phrases.body_picked(pick, model, 2, names_model=True, owned=("x-leg",))
        assert picked == say.encoded(say.with_metadata(made, placement))


@pytest.mark.parametrize("length", [*range(5), 127, 128, 129, 130, 255, 256, 257, 16_385])
def test_answer_is_right_for_a_pick_of_any_length(length: int) -> None:
    placement = Placement("x" * length)
    made = say.with_metadata(say.body_placed(say.pick_of(placement, names_model=True)), placement)
    picked = Phrases().body_picked(("x" * length,), None, 1, names_model=True)
    assert picked == say.encoded(made)


def test_phrases_keep_a_bounded_number_of_answers() -> None:
    phrases = Phrases(most=2)
    picks = [Placement(f"10.0.0.{number}:1") for number in range(5)]
    said = [phrases.body_placed(pick, names_model=False) for pick in picks]
    assert said[-1] is phrases.body_placed(picks[-1], names_model=False)
    assert said[0] is not phrases.body_placed(picks[0], names_model=False)
    assert said[0] == phrases.body_placed(picks[0], names_model=False)


@pytest.mark.parametrize("more", [{"body": b"{}"}, {"legs": (("x-leg", "1"),)}])
def test_phrases_do_not_keep_answers_of_a_single_request(more: dict[str, Any]) -> None:
    phrases, pick = Phrases(), msgspec.structs.replace(PICK, **more)
    placed = phrases.body_placed(pick, names_model=False, owned=("x-leg",))
    assert placed is not phrases.body_placed(pick, names_model=False, owned=("x-leg",))
    body = None if pick.body is None else bytes(pick.body)
    made = say.body_placed(say.pick_of(pick, names_model=False, owned=("x-leg",)), body)
    assert placed == say.encoded(say.with_metadata(made, pick))


OWNED = ("x-leg", "x-other-leg", "x-rank")
placements = st.builds(
    Placement,
    destination=st.sampled_from(["", "10.0.0.1:1", "10.0.0.1:1,10.0.0.2:1"]),
    model=st.sampled_from(["", "tiny"]),
    rank=st.sampled_from([None, ("x-rank", "3")]),
    legs=st.sets(st.sampled_from(OWNED[:2])).map(
        lambda names: tuple((name, "1") for name in names)
    ),
)


@given(placements, st.booleans())
def test_pick_of_leaves_no_owned_header_of_a_client(
    placement: Placement,
    names_model: bool,
) -> None:
    mutation = say.pick_of(placement, names_model=names_model, owned=OWNED).header_mutation
    settled = {one.header.key: one.append_action for one in mutation.set_headers}
    assert set(settled.values()) <= {HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD}
    told = {"x-gateway-destination-endpoint", *OWNED} | (
        {"x-kvsteer-model"} if names_model else set()
    )
    assert told <= {*settled, *mutation.remove_headers}
    assert settled.keys().isdisjoint(mutation.remove_headers)


@pytest.mark.parametrize("extra", [-1, 0, 1, 20_000])
def test_new_body_is_whole_however_long_it_is(extra: int) -> None:
    body = bytes(LONG_BYTES + extra)
    placement = Placement("a:1,b:2", body=body, priority=("x", "1"))
    (written,) = Phrases().body_placed(placement, names_model=False, owned=("y",))
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
    placement = Placement("a:1", body=Extended(body, LONG_BYTES, b',"x":1}'))
    (written,) = Phrases().body_placed(placement, names_model=False)
    assert isinstance(written, LongMessage)
    assert written.body is body
    answer = ProcessingResponse.FromString(joined(written)).request_body.response
    assert answer.body_mutation.body == bytes(LONG_BYTES) + b',"x":1}'
