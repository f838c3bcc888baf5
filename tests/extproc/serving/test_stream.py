import pytest
from google.protobuf.json_format import MessageToDict, ParseDict

from extproc.errors import ProtocolError
from extproc.pb.kvsteer_ext_proc_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingMode,
    ProcessingRequest,
    ProcessingResponse,
)
from extproc.picking.refusal import Refusal
from extproc.serving.stream import Ask, Head, Placement, State, Stream
from tests.extproc.messages import body, head

DESTINATION = "x-gateway-destination-endpoint"
MODEL = "x-kvsteer-model"
PLACEMENT = Placement("10.0.0.1:8000,10.0.0.2:8000", "tiny")


def stream(*, names_model: bool = False) -> Stream:
    return Stream(max_body_bytes=1000, names_model=names_model)


def ask(step: object) -> Ask:
    assert isinstance(step, Ask)
    return step


def set_headers(response: ProcessingResponse) -> dict[str, bytes]:
    part = getattr(response, str(response.WhichOneof("response")))
    return {
        one.header.key: one.header.raw_value for one in part.response.header_mutation.set_headers
    }


def removed_headers(response: ProcessingResponse) -> list[str]:
    part = getattr(response, str(response.WhichOneof("response")))
    return list(part.response.header_mutation.remove_headers)


def test_a_prompt_is_waited_for_and_placed_with_its_body() -> None:
    one = stream()
    go_on = one.receive(head())
    assert isinstance(go_on, ProcessingResponse)
    assert go_on.WhichOneof("response") == "request_headers"
    assert not go_on.request_headers.HasField("response")
    assert one.receive(body(b"{}")) == Ask(Head("POST", "/v1/chat/completions", None), b"{}")
    answer = one.place(PLACEMENT)
    assert answer.WhichOneof("response") == "request_body"
    assert set_headers(answer) == {DESTINATION: b"10.0.0.1:8000,10.0.0.2:8000"}
    assert one.state is State.PLACED


def test_the_pick_is_in_the_dynamic_metadata_too() -> None:
    one = stream()
    one.receive(head())
    one.receive(body(b"{}"))
    metadata = MessageToDict(one.place(PLACEMENT).dynamic_metadata)
    assert metadata == {"envoy.lb": {DESTINATION: "10.0.0.1:8000,10.0.0.2:8000"}}


def test_with_nothing_to_say_the_clients_own_header_is_removed() -> None:
    one = stream(names_model=True)
    one.receive(head())
    one.receive(body(b"{}"))
    answer = one.place(Placement())
    assert removed_headers(answer) == [DESTINATION, MODEL]
    assert not answer.HasField("dynamic_metadata")


def test_the_model_is_named_for_routes_where_there_are_several() -> None:
    one = stream(names_model=True)
    one.receive(head())
    one.receive(body(b"{}"))
    answer = one.place(PLACEMENT)
    assert set_headers(answer)[MODEL] == b"tiny"
    assert answer.request_body.response.clear_route_cache


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (head("/metrics"), "not_inference"),
        (head(method="GET"), "not_inference"),
        (head(headers={"content-length": "1001"}), "body_too_large"),
        (head(mode=ProcessingMode.NONE), "body_not_buffered"),
        (head(mode=ProcessingMode.STREAMED), "body_not_buffered"),
    ],
)
def test_what_needs_no_body_is_placed_on_its_headers(
    message: ProcessingRequest, reason: str
) -> None:
    one = stream()
    step = ask(one.receive(message))
    assert (step.body, step.reason) == (None, reason)
    answer = one.place(PLACEMENT)
    assert answer.WhichOneof("response") == "request_headers"
    assert answer.mode_override.request_body_mode == ProcessingMode.NONE
    assert answer.mode_override.response_trailer_mode == ProcessingMode.SEND


def test_a_request_without_a_body_needs_no_mode_override() -> None:
    one = stream()
    assert ask(one.receive(head(end_of_stream=True))).reason == "no_body"
    assert not one.place(PLACEMENT).HasField("mode_override")


@pytest.mark.parametrize("length", ["", "many", "9" * 30, "-5"])
def test_an_unreadable_content_length_is_as_good_as_none(length: str) -> None:
    one = stream()
    one.receive(head(headers={"content-length": length}))
    assert ask(one.receive(body(b"x"))).head.content_length is None


def test_a_body_that_turns_out_too_large_is_placed_without_it() -> None:
    one = stream()
    one.receive(head())
    step = ask(one.receive(body(b"x" * 1001)))
    assert (step.body, step.reason) == (None, "body_too_large")
    assert one.place(PLACEMENT).WhichOneof("response") == "request_body"


def test_a_buffered_body_before_trailers_is_whole_though_it_does_not_say_so() -> None:
    one = stream()
    one.receive(head())
    assert ask(one.receive(body(b"{}", end_of_stream=False))).body == b"{}"


def test_an_envoy_that_names_no_mode_is_taken_to_buffer() -> None:
    one = stream()
    assert isinstance(one.receive(head(mode=None)), ProcessingResponse)
    assert one.state is State.BODY


def test_headers_given_as_text_are_read() -> None:
    message = head()
    for header in message.request_headers.headers.headers:
        header.value, header.raw_value = header.raw_value.decode(), b""
    one = stream()
    assert isinstance(one.receive(message), ProcessingResponse)


def test_a_body_that_comes_after_the_pick_goes_on() -> None:
    one = stream()
    one.receive(head("/metrics"))
    one.place(PLACEMENT)
    step = one.receive(body(b"late"))
    assert isinstance(step, ProcessingResponse)
    assert step.WhichOneof("response") == "request_body"


@pytest.mark.parametrize(
    "message",
    [
        ProcessingRequest(request_trailers=HttpTrailers()),
        ProcessingRequest(response_headers=HttpHeaders()),
        ProcessingRequest(response_body=HttpBody()),
        ProcessingRequest(response_trailers=HttpTrailers()),
    ],
)
def test_what_is_none_of_our_business_goes_on(message: ProcessingRequest) -> None:
    step = stream().receive(message)
    assert isinstance(step, ProcessingResponse)
    assert step.WhichOneof("response") == message.WhichOneof("request")


def test_a_message_without_a_request_is_refused() -> None:
    with pytest.raises(ProtocolError, match="message without a request"):
        stream().receive(ProcessingRequest())


def test_headers_come_once() -> None:
    one = stream()
    one.receive(head())
    with pytest.raises(ProtocolError, match="request headers twice"):
        one.receive(head())


def test_a_body_comes_after_its_headers() -> None:
    with pytest.raises(ProtocolError, match="request body before its headers"):
        stream().receive(body(b"{}"))


@pytest.mark.parametrize("mode", [ProcessingMode.FULL_DUPLEX_STREAMED, ProcessingMode.GRPC])
def test_other_dialects_are_refused_by_name(mode: int) -> None:
    name = ProcessingMode.BodySendMode.Name(mode)
    with pytest.raises(ProtocolError, match=f"request_body_mode {name} is not supported"):
        stream().receive(head(mode=mode))


def test_a_refusal_answers_in_the_place_of_a_worker() -> None:
    one = stream()
    one.receive(head())
    one.receive(body(b"{}"))
    answer = one.refuse(Refusal(429, (("retry-after", "1"),), b"{}")).immediate_response
    assert (answer.status.code, answer.body) == (429, b"{}")
    assert [(each.header.key, each.header.raw_value) for each in answer.headers.set_headers] == [
        ("retry-after", b"1")
    ]


def test_a_request_may_name_a_policy_where_that_is_read() -> None:
    named = {"x-policy": "random"}
    reading = Stream(max_body_bytes=1000, names_model=False, policy_header="x-policy")
    reading.receive(head(headers=named))
    assert ask(reading.receive(body(b"{}"))).head.policy == "random"
    deaf = stream()
    deaf.receive(head(headers=named))
    assert ask(deaf.receive(body(b"{}"))).head.policy is None


@pytest.mark.parametrize("hint", ["10.0.0.1:1,10.0.0.2:1", ["10.0.0.1:1", "10.0.0.2:1"]])
def test_the_proxys_hint_names_the_endpoints_that_are_allowed(hint: object) -> None:
    one, message = stream(), head()
    namespace = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    ParseDict({"x-gateway-destination-endpoint-subset": hint}, namespace)
    one.receive(message)
    allowed = ask(one.receive(body(b"{}"))).head.subset
    assert allowed == frozenset(("10.0.0.1:1", "10.0.0.2:1"))


def test_other_metadata_is_no_hint() -> None:
    one, message = stream(), head()
    ParseDict({"x": 1}, message.metadata_context.filter_metadata["other"])
    one.receive(message)
    assert ask(one.receive(body(b"{}"))).head.subset is None
    another, message = stream(), head()
    ParseDict({"x": 1}, message.metadata_context.filter_metadata["envoy.lb.subset_hint"])
    another.receive(message)
    assert ask(another.receive(body(b"{}"))).head.subset is None
