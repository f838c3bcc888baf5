"""Our subset of the ext_proc messages compared with envoy-data-plane's complete ones, both ways."""

from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ProcessingMode as TheirMode,
)
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ProcessingModeBodySendMode as Body,
)
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ProcessingModeHeaderSendMode as Header,
)
from envoy_data_plane.envoy.service.ext_proc import v3 as theirs
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st

from extproc._core import Budget
from extproc.base.headers import DESTINATION, MODEL
from extproc.pb import kvsteer_ext_proc_pb2 as ours
from extproc.serving.stream import Stream, StreamSettings
from extproc.serving.stream_answers import AnswerCache, PickAnswer
from tests.extproc.messages import body, head, read


def test_complete_request_is_read_the_same_by_the_subset() -> None:
    message = theirs.ProcessingRequest(
        request_headers=theirs.HttpHeaders(
            headers=core.HeaderMap(headers=[core.HeaderValue(key=":path", raw_value=b"/v1")]),
            end_of_stream=True,
        ),
        protocol_config=theirs.ProtocolConfiguration(request_body_mode=Body.BUFFERED),
        observability_mode=True,
    )
    read = ours.ProcessingRequest.FromString(bytes(message))
    assert read.request_headers.headers.headers[0].raw_value == b"/v1"
    assert read.request_headers.end_of_stream
    assert read.protocol_config.request_body_mode == ours.ProcessingMode.BUFFERED
    assert read.observability_mode


def test_subset_answer_is_read_the_same_by_the_complete_classes() -> None:
    stream = Stream(StreamSettings(10, Budget(10), answer_cache=AnswerCache((DESTINATION, MODEL))))
    stream.receive(read(head("/metrics")))
    (answer,) = stream.place(PickAnswer("10.0.0.1:8000"))
    assert isinstance(answer, bytes)
    theirs_read = theirs.ProcessingResponse.parse(answer)
    assert theirs_read.request_headers is not None
    common = theirs_read.request_headers.response
    assert common is not None
    assert common.clear_route_cache
    assert common.header_mutation is not None
    first = common.header_mutation.set_headers[0]
    assert first.header == core.HeaderValue(
        key="x-gateway-destination-endpoint", raw_value=b"10.0.0.1:8000"
    )
    assert (
        first.append_action == core.HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
    )
    assert theirs_read.mode_override == TheirMode(
        request_header_mode=Header.SEND,
        request_body_mode=Body.NONE,
        response_trailer_mode=Header.SEND,
    )


def test_unknown_fields_survive_a_round_trip_through_the_subset() -> None:
    message = theirs.ProcessingRequest(
        request_body=theirs.HttpBody(body=b"x", grpc_message_compressed=True),
        metadata_context=core.Metadata(typed_filter_metadata={}),
    )
    ours_read = ours.ProcessingRequest.FromString(bytes(message))
    again = theirs.ProcessingRequest.parse(ours_read.SerializeToString())
    assert again == message


def test_subset_fields_have_the_numbers_and_names_of_the_complete_ones() -> None:
    for name in ("ProcessingRequest", "ProcessingResponse", "CommonResponse", "HttpBody"):
        descriptor = ours.DESCRIPTOR.message_types_by_name[name]
        their_fields = getattr(theirs, name)._betterproto.meta_by_field_name
        for field in descriptor.fields:
            assert their_fields[field.name].number == field.number, f"{name}.{field.name}"


@given(content=st.binary(max_size=200), end=st.booleans())
def test_bodies_of_any_bytes_are_read_the_same_both_ways(*, content: bytes, end: bool) -> None:
    mine = body(content, end_of_stream=end)
    parsed = theirs.ProcessingRequest.parse(mine.SerializeToString())
    assert parsed.request_body == theirs.HttpBody(body=content, end_of_stream=end)
    back = ours.ProcessingRequest.FromString(bytes(parsed))
    assert MessageToDict(back) == MessageToDict(mine)
