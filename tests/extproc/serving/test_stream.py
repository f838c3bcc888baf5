from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict

from extproc._core import Budget
from extproc.base.errors import ProtocolError
from extproc.pb.kvsteer_ext_proc_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingMode,
    ProcessingRequest,
    ProcessingResponse,
)
from extproc.requests.added_fields import ExtendedBody
from extproc.requests.engine_paths import EnginePaths
from extproc.requests.refusals import Refusal
from extproc.requests.request import Head, RoutingRequest
from extproc.serving.naming_headers import NamingHeaders
from extproc.serving.stream import Stream, StreamSettings, StreamState
from extproc.serving.stream_answers import MAX_ECHO_BYTES, AnswerCache, PickAnswer
from tests.extproc.messages import answers_of, body, head, read, trailers

DESTINATION = "x-gateway-destination-endpoint"
MODEL = "x-kvsteer-model"
PLACEMENT = PickAnswer("10.0.0.1:8000,10.0.0.2:8000")
DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED


def stream(*, names_model: bool = False, dialect: str = "auto") -> Stream:
    cache = AnswerCache((DESTINATION, MODEL) if names_model else (DESTINATION,))
    return Stream(StreamSettings(1000, Budget(2000), dialect=dialect, answer_cache=cache))


def looking() -> Stream:
    spoken = StreamSettings(max_body_bytes=1000, bodies=Budget(2000))
    return Stream(spoken, wants_status=True)


def test_conversation_header_is_read() -> None:
    spoken = StreamSettings(1000, Budget(2000), naming=NamingHeaders.of((), ("x-user",)))
    one = Stream(spoken)
    one.receive(read(head(headers={"x-user": "u7"})))
    assert request(one.receive(read(body(b"{}")))).head.conversation == "u7"


def duplex_head(
    path: str = "/v1/chat/completions", *, end_of_stream: bool = False
) -> ProcessingRequest:
    return head(path, mode=DUPLEX, end_of_stream=end_of_stream)


def request(step: object) -> RoutingRequest:
    assert isinstance(step, RoutingRequest)
    return step


def only(answers: object) -> ProcessingResponse:
    (answer,) = answers_of(answers)
    return answer


def kinds(answers: object) -> list[str]:
    return [str(answer.WhichOneof("response")) for answer in answers_of(answers)]


def echoed(answers: object) -> list[tuple[bytes, bool]]:
    """The bytes of each echo of the request's body, and whether it is the last one."""
    parts = [
        answer.request_body.response.body_mutation.streamed_response
        for answer in answers_of(answers)
        if answer.HasField("request_body")
    ]
    return [(part.body, part.end_of_stream) for part in parts]


def set_headers(response: ProcessingResponse) -> dict[str, bytes]:
    part = getattr(response, str(response.WhichOneof("response")))
    return {
        one.header.key: one.header.raw_value for one in part.response.header_mutation.set_headers
    }


def removed_headers(response: ProcessingResponse) -> list[str]:
    part = getattr(response, str(response.WhichOneof("response")))
    return list(part.response.header_mutation.remove_headers)


# Dialect A


def test_request_with_a_prompt_is_placed_with_its_body() -> None:
    one = stream()
    go_on = only(one.receive(read(head())))
    assert go_on.WhichOneof("response") == "request_headers"
    assert not go_on.request_headers.HasField("response")
    assert one.receive(read(body(b"{}"))) == RoutingRequest(
        Head("POST", "/v1/chat/completions", None), b"{}"
    )
    answer = only(one.place(PLACEMENT))
    assert answer.WhichOneof("response") == "request_body"
    assert set_headers(answer) == {DESTINATION: b"10.0.0.1:8000,10.0.0.2:8000"}
    assert one.state is StreamState.PLACED
    assert not one.is_duplex


def test_pick_is_in_the_dynamic_metadata_too() -> None:
    one = stream()
    one.receive(read(head()))
    one.receive(read(body(b"{}")))
    metadata = MessageToDict(only(one.place(PLACEMENT)).dynamic_metadata)
    assert metadata == {"envoy.lb": {DESTINATION: "10.0.0.1:8000,10.0.0.2:8000"}}


def test_empty_pick_removes_the_headers_of_the_client() -> None:
    one = stream(names_model=True)
    one.receive(read(head()))
    one.receive(read(body(b"{}")))
    answer = only(one.place(PickAnswer()))
    assert removed_headers(answer) == [DESTINATION, MODEL]
    assert not answer.HasField("dynamic_metadata")


def test_model_header_is_set_where_there_are_several_models() -> None:
    one = stream(names_model=True)
    one.receive(read(head()))
    one.receive(read(body(b"{}")))
    answer = only(one.place(PickAnswer("10.0.0.1:8000", ((MODEL, "tiny"),))))
    assert set_headers(answer)[MODEL] == b"tiny"
    assert answer.request_body.response.clear_route_cache


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (head("/metrics"), "not_inference"),
        (head("/v1/rerank"), "unkeyed_api"),
        (head(method="GET"), "not_inference"),
        (head(headers={"content-length": "1001"}), "body_too_large"),
        (head(mode=ProcessingMode.NONE), "body_not_buffered"),
        (head(mode=ProcessingMode.STREAMED), "body_not_buffered"),
    ],
)
def test_request_without_a_needed_body_is_placed_on_its_headers(
    message: ProcessingRequest, reason: str
) -> None:
    one = stream()
    step = request(one.receive(read(message)))
    assert (step.body, step.reason) == (None, reason)
    answer = only(one.place(PLACEMENT))
    assert answer.WhichOneof("response") == "request_headers"
    assert answer.mode_override.request_body_mode == ProcessingMode.NONE
    assert answer.mode_override.response_trailer_mode == ProcessingMode.SEND


@pytest.mark.parametrize(
    ("names_model", "is_duplex"), [(True, False), (False, False), (True, True)]
)
def test_proxy_finds_model_only_in_buffered_mode_with_named_models(
    names_model: bool, is_duplex: bool
) -> None:
    one = stream(names_model=names_model)
    mode = DUPLEX if is_duplex else ProcessingMode.BUFFERED
    step = request(one.receive(read(head(mode=mode, headers={"content-length": "1001"}))))
    assert step.proxy_finds_model is (names_model and not is_duplex)


def test_request_without_a_body_needs_no_mode_override() -> None:
    one = stream()
    assert request(one.receive(read(head(end_of_stream=True)))).reason == "no_body"
    assert not only(one.place(PLACEMENT)).HasField("mode_override")


@pytest.mark.parametrize("mode", [ProcessingMode.BUFFERED, ProcessingMode.BUFFERED_PARTIAL])
def test_mode_override_asks_for_response_headers_where_status_is_wanted(mode: int) -> None:
    asked = only(looking().receive(read(head(mode=mode)))).mode_override
    assert asked.response_header_mode == asked.response_trailer_mode == ProcessingMode.SEND
    assert (asked.request_body_mode, asked.response_body_mode) == (mode, ProcessingMode.NONE)


def test_mode_override_is_omitted_for_a_proxy_that_names_no_modes() -> None:
    assert not only(looking().receive(read(head(mode=None)))).HasField("mode_override")


@pytest.mark.parametrize(
    ("sent", "content", "reason"),
    [(b"", b"", ""), (b"x" * 1000, b"x" * 1000, ""), (b"x" * 1001, None, "body_too_large")],
)
def test_body_is_placed_with_its_content_up_to_the_limit(
    sent: bytes, content: bytes | None, reason: str
) -> None:
    one = stream()
    one.receive(read(head()))
    step = request(one.receive(read(body(sent))))
    assert (step.body, step.reason) == (content, reason)
    assert kinds(one.place(PLACEMENT)) == ["request_body"]


def test_buffered_body_before_trailers_is_whole_without_end_of_stream() -> None:
    one = stream()
    one.receive(read(head(headers={"content-length": "2"})))
    assert request(one.receive(read(body(b"{}", end_of_stream=False)))).body == b"{}"


def test_partly_buffered_body_is_not_taken_for_a_whole() -> None:
    one = stream()
    one.receive(read(head(mode=ProcessingMode.BUFFERED_PARTIAL, headers={"content-length": "900"})))
    step = request(one.receive(read(body(b"{", end_of_stream=False))))
    assert (step.body, step.reason) == (None, "body_not_buffered")
    assert kinds(one.place(PLACEMENT)) == ["request_body"]


def test_trailers_without_a_body_carry_the_pick_in_metadata() -> None:
    one = stream()
    one.receive(read(head()))
    assert request(one.receive(read(trailers()))).reason == "no_body"
    answer = only(one.place(PLACEMENT))
    assert answer.WhichOneof("response") == "request_trailers"
    assert answer.HasField("dynamic_metadata")


def test_trailers_after_the_pick_continue_and_end_the_request() -> None:
    one = stream()
    one.receive(read(head()))
    one.receive(read(body(b"{}")))
    one.place(PLACEMENT)
    assert kinds(one.receive(read(trailers()))) == ["request_trailers"]
    assert kinds(one.receive(read(body(b"more")))) == ["request_body"]
    with pytest.raises(ProtocolError, match="request trailers after the end of the request"):
        one.receive(read(trailers()))


def test_envoy_that_names_no_mode_is_taken_to_buffer() -> None:
    one = stream()
    assert kinds(one.receive(read(head(mode=None)))) == ["request_headers"]
    assert one.state is StreamState.BODY


def test_bodies_after_the_pick_continue() -> None:
    one = stream()
    one.receive(read(head("/metrics", mode=ProcessingMode.STREAMED)))
    one.place(PLACEMENT)
    for last in (False, False, True):
        assert kinds(one.receive(read(body(b"late", end_of_stream=last)))) == ["request_body"]


# Dialect B


def test_duplex_body_is_collected_and_echoed_behind_the_pick() -> None:
    one = stream()
    assert one.receive(read(duplex_head())) == []
    assert one.is_duplex
    assert one.receive(read(body(b'{"a"', end_of_stream=False))) == []
    step = request(one.receive(read(body(b": 1}"))))
    assert step.body == b'{"a": 1}'
    answers = one.place(PLACEMENT)
    assert kinds(answers) == ["request_headers", "request_body"]
    first = answers_of(answers)[0]
    assert set_headers(first) == {DESTINATION: b"10.0.0.1:8000,10.0.0.2:8000"}
    assert first.HasField("dynamic_metadata")
    assert not first.HasField("mode_override")
    assert echoed(answers) == [(b'{"a": 1}', True)]
    assert one.state is StreamState.ENDED


def test_large_duplex_body_is_echoed_in_pieces_that_envoy_accepts() -> None:
    one = Stream(StreamSettings(max_body_bytes=200_000, bodies=Budget(200_000)))
    one.receive(read(duplex_head()))
    one.receive(read(body(b"a" * 82_000, end_of_stream=False)))
    one.receive(read(body(b"b" * 82_000)))
    pieces = echoed(one.place(PLACEMENT))
    assert b"".join(piece for piece, _ in pieces) == b"a" * 82_000 + b"b" * 82_000
    assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True]
    assert max(len(piece) for piece, _ in pieces) <= MAX_ECHO_BYTES


def test_duplex_body_that_is_extended_is_echoed_as_it_is_now() -> None:
    one = stream()
    one.receive(read(duplex_head()))
    one.receive(read(body(b'{"a"', end_of_stream=False)))
    one.receive(read(body(b": 1}")))
    answers = one.place(PickAnswer("10.0.0.1:1", (), ExtendedBody(b'{"a": 1}', 7, b',"b":2}')))
    assert echoed(answers) == [(b'{"a": 1,"b":2}', True)]
    assert set_headers(answers_of(answers)[0])["content-length"] == b"14"


def test_repeated_last_piece_is_echoed_once() -> None:
    one = stream()
    one.receive(read(duplex_head()))
    one.receive(read(body(b"{}")))
    one.place(PLACEMENT)
    assert one.receive(read(body(b"{}"))) == []


def test_duplex_request_without_a_body_is_answered_on_its_headers() -> None:
    one = stream()
    assert request(one.receive(read(duplex_head(end_of_stream=True)))).reason == "no_body"
    assert kinds(one.place(PLACEMENT)) == ["request_headers"]
    assert one.state is StreamState.ENDED


def test_duplex_request_without_a_prompt_is_echoed_behind_its_headers() -> None:
    one = stream()
    assert request(one.receive(read(duplex_head("/upload")))).reason == "not_inference"
    assert kinds(one.place(PLACEMENT)) == ["request_headers"]
    assert echoed(one.receive(read(body(b"x", end_of_stream=False)))) == [(b"x", False)]
    assert echoed(one.receive(read(body(b"")))) == [(b"", True)]


def test_empty_piece_of_a_duplex_body_is_not_echoed() -> None:
    one = stream()
    one.receive(read(duplex_head("/upload")))
    one.place(PLACEMENT)
    assert one.receive(read(body(b"", end_of_stream=False))) == []


def test_empty_duplex_body_is_ended() -> None:
    one = stream()
    one.receive(read(duplex_head()))
    assert request(one.receive(read(body(b"")))).body == b""
    assert echoed(one.place(PLACEMENT)) == [(b"", True)]


def test_duplex_body_above_the_limit_is_placed_by_load_and_echoed() -> None:
    one = stream()
    one.receive(read(duplex_head()))
    one.receive(read(body(b"x" * 900, end_of_stream=False)))
    step = request(one.receive(read(body(b"y" * 900, end_of_stream=False))))
    assert (step.body, step.reason) == (None, "body_too_large")
    answers = one.place(PLACEMENT)
    assert b"".join(piece for piece, _ in echoed(answers)) == b"x" * 900 + b"y" * 900
    assert not any(last for _, last in echoed(answers))
    last = one.receive(read(body(b"z")))
    assert echoed(last) == [(b"z", True)]
    assert one.state is StreamState.ENDED


def test_trailers_end_a_duplex_body_in_its_place() -> None:
    one = stream()
    one.receive(read(duplex_head()))
    one.receive(read(body(b"{}", end_of_stream=False)))
    assert request(one.receive(read(trailers()))).body == b"{}"
    answers = one.place(PLACEMENT)
    assert kinds(answers) == ["request_headers", "request_body", "request_trailers"]
    assert echoed(answers) == [(b"{}", False)]
    assert one.state is StreamState.ENDED


def test_trailers_alone_end_a_duplex_request_without_a_body() -> None:
    one = stream()
    one.receive(read(duplex_head()))
    assert request(one.receive(read(trailers()))).reason == "no_body"
    assert kinds(one.place(PLACEMENT)) == ["request_headers", "request_trailers"]


def test_dialect_epp_makes_a_proxy_without_a_named_mode_duplex() -> None:
    one = stream(dialect="epp")
    assert one.receive(read(head(mode=None))) == []
    assert one.is_duplex


def test_named_mode_of_a_proxy_overrides_the_configured_dialect() -> None:
    one = stream(dialect="epp")
    assert kinds(one.receive(read(head()))) == ["request_headers"]
    assert not one.is_duplex


# Either dialect


@pytest.mark.parametrize("message", [head(), duplex_head()])
def test_refusal_replaces_the_pick_and_ends_the_stream(
    message: ProcessingRequest,
) -> None:
    one = stream()
    one.receive(read(message))
    one.receive(read(body(b"{}")))
    answer = only(one.refuse(Refusal(429, (("retry-after", "1"),), b"{}"))).immediate_response
    assert (answer.status.code, answer.body) == (429, b"{}")
    assert [(each.header.key, each.header.raw_value) for each in answer.headers.set_headers] == [
        ("retry-after", b"1")
    ]
    assert one.receive(read(body(b"more"))) == one.receive(read(trailers())) == []


@pytest.mark.parametrize(
    "message",
    [
        trailers(),
        ProcessingRequest(response_headers=HttpHeaders()),
        ProcessingRequest(response_body=HttpBody()),
        ProcessingRequest(response_trailers=HttpTrailers()),
    ],
)
def test_other_messages_continue_unchanged(message: ProcessingRequest) -> None:
    assert kinds(stream().receive(read(message))) == [message.WhichOneof("request")]


def test_response_may_begin_before_the_request_ends() -> None:
    one = stream()
    one.receive(read(head()))
    early = ProcessingRequest(response_headers=HttpHeaders(end_of_stream=True))
    assert kinds(one.receive(read(early))) == ["response_headers"]
    assert request(one.receive(read(body(b"{}")))).body == b"{}"


def test_response_mode_is_independent_of_the_request_mode() -> None:
    one = stream()
    one.receive(read(head(response_mode=DUPLEX)))
    step = one.receive(read(ProcessingRequest(response_body=HttpBody(body=b"x"))))
    (answer,) = answers_of(step)
    assert answer.response_body.response.body_mutation.streamed_response.body == b"x"
    assert not one.is_duplex


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([ProcessingRequest()], "message without a request"),
        ([head(), head()], "request headers while the request body is awaited"),
        ([body(b"{}")], "request body before the request headers"),
        (
            [head("/metrics"), body(b"{}")],
            "request body before the previous message was answered",
        ),
        ([head(mode=5)], "body mode GRPC is not supported"),
        ([head(response_mode=5)], "body mode GRPC is not supported"),
    ],
)
def test_message_out_of_place_is_refused(messages: list[ProcessingRequest], fault: str) -> None:
    one, *before = stream(), *messages[:-1]
    for message in before:
        one.receive(read(message))
    with pytest.raises(ProtocolError, match=fault):
        one.receive(read(messages[-1]))


@pytest.mark.parametrize("modes", [{"mode": DUPLEX}, {"response_mode": DUPLEX}])
def test_dialect_buffered_refuses_duplex_modes(
    modes: dict[str, Any],
) -> None:
    for dialect in ("auto", "epp"):
        stream(dialect=dialect).receive(read(head(**modes)))
    with pytest.raises(ProtocolError, match=r"extproc\.dialect is buffered"):
        stream(dialect="buffered").receive(read(head(**modes)))
    stream(dialect="buffered").receive(read(head()))


def test_body_beyond_the_budget_is_echoed_unread() -> None:
    bodies = Budget(100)
    first, second = (Stream(StreamSettings(max_body_bytes=1000, bodies=bodies)) for _ in range(2))
    for one in (first, second):
        one.receive(read(duplex_head()))
    assert first.receive(read(body(b"a" * 60, end_of_stream=False))) == []
    step = request(second.receive(read(body(b"b" * 60, end_of_stream=False))))
    assert (step.body, step.reason) == (None, "body_too_large")
    assert echoed(second.place(PLACEMENT)) == [(b"b" * 60, False)]
    assert bodies.used_bytes == 60
    first.close()
    assert bodies.used_bytes == 0


# Paths that the proxy rewrites behind the router


def rewriting(**settings: Any) -> tuple[Stream, list[str]]:
    unrecognized: list[str] = []
    spoken = StreamSettings(
        1000,
        Budget(2000),
        note_unrecognized=unrecognized.append,
        **settings,
    )
    return Stream(spoken), unrecognized


def test_rewritten_path_is_placed_as_the_engine_sees_it() -> None:
    one, unrecognized = rewriting()
    assert kinds(one.receive(read(head("/llm/tiny/v1/chat/completions")))) == ["request_headers"]
    asked = request(one.receive(read(body(b"{}"))))
    assert (asked.head.path, asked.reason) == ("/v1/chat/completions", "")
    assert one.head == asked.head
    assert not unrecognized


def test_path_that_ends_like_an_engines_is_not_guessed_where_bodies_are_edited() -> None:
    one, unrecognized = rewriting(cleans=True, paths=EnginePaths(["/llm"], guesses=False))
    one.receive(read(head("/other/v1/chat/completions")))
    asked = request(one.receive(read(body(b"{}"))))
    assert (asked.head.path, asked.reason) == ("/other/v1/chat/completions", "not_inference")
    assert unrecognized == ["/other/v1/chat/completions"]


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        ("/v1/new", True),
        ("/v1/score", False),
        ("/llm/v1/score", False),
        ("/tokenize", False),
        ("/llm/tokenize", False),
    ],
)
def test_unrecognized_are_bodies_of_no_known_api(path: str, counts: bool) -> None:
    one, unrecognized = rewriting(paths=EnginePaths(["/llm"]))
    one.receive(read(head(path)))
    assert unrecognized == [path] * counts


def test_request_without_a_body_is_not_unrecognized() -> None:
    one, unrecognized = rewriting()
    one.receive(read(head("/v1/new", end_of_stream=True)))
    assert not unrecognized


def test_more_time_is_asked_once_and_only_while_a_pick_is_awaited() -> None:
    one = stream()
    one.receive(read(head()))
    assert not one.more_time(60.0)
    request(one.receive(read(body(b"{}"))))
    asked = only(one.more_time(60.0))
    assert asked.override_message_timeout.seconds == 60
    assert not one.more_time(60.0)
    assert only(one.place(PLACEMENT)).WhichOneof("response") == "request_body"


def test_proxy_that_streams_both_ways_waits_without_being_asked() -> None:
    one = stream()
    one.receive(read(duplex_head()))
    request(one.receive(read(body(b"{}"))))
    assert (one.more_time(60.0), one.has_more_time) == ([], True)
    assert one.more_time(60.0) is None
