import pytest
from google.protobuf.json_format import ParseDict

from extproc.pb.kvsteer_ext_proc_pb2 import ProcessingRequest
from extproc.requests.request import Head
from extproc.serving.stream import ResponseHead, head_of, response_head_of, traceparent_of
from tests.extproc.messages import head, response_head

SUBSET = "x-gateway-destination-endpoint-subset"
SERVED = "x-gateway-destination-endpoint-served"


def with_metadata(
    message: ProcessingRequest, namespace: str, **values: object
) -> ProcessingRequest:
    fields = {name.replace("_", "-"): value for name, value in values.items()}
    ParseDict(fields, message.metadata_context.filter_metadata[namespace])
    return message


def test_method_path_and_length_are_read() -> None:
    message = head("/v1/completions?x=1", headers={"content-length": "17"})
    assert head_of(message, None) == Head("POST", "/v1/completions", 17)


def test_headers_given_as_text_are_read() -> None:
    message = head()
    for header in message.request_headers.headers.headers:
        header.value, header.raw_value = header.raw_value.decode(), b""
    assert head_of(message, None).path == "/v1/chat/completions"


@pytest.mark.parametrize("length", ["", "many", "9" * 30, "-5", "\u0665"])
def test_an_unreadable_content_length_is_as_good_as_none(length: str) -> None:
    assert head_of(head(headers={"content-length": length}), None).content_length is None


def test_a_policy_is_read_where_one_may_be_named() -> None:
    message = head(headers={"x-policy": "random"})
    assert head_of(message, "x-policy").policy == "random"
    assert head_of(message, None).policy is None


def test_a_session_is_read_where_one_may_be_named() -> None:
    message = head(headers={"x-session": "chat 7"})
    assert head_of(message, None, "x-session").session == "chat 7"
    assert head_of(message, None, "x-other").session == head_of(message, None).session == ""


@pytest.mark.parametrize("hint", ["10.0.0.1:1,10.0.0.2:1", ["10.0.0.1:1", "10.0.0.2:1"]])
def test_the_proxys_hint_names_the_endpoints_that_are_allowed(hint: object) -> None:
    message = with_metadata(head(), "envoy.lb.subset_hint", **{SUBSET: hint})
    assert head_of(message, None).subset == frozenset(("10.0.0.1:1", "10.0.0.2:1"))


@pytest.mark.parametrize("hint", ["", []])
def test_an_empty_hint_allows_no_endpoint(hint: object) -> None:
    message = with_metadata(head(), "envoy.lb.subset_hint", **{SUBSET: hint})
    assert head_of(message, None).subset == frozenset()


@pytest.mark.parametrize("namespace", ["other", "envoy.lb.subset_hint"])
def test_other_metadata_is_no_hint(namespace: str) -> None:
    assert head_of(with_metadata(head(), namespace, x=1), None).subset is None


def test_status_and_served_endpoint_of_a_response_are_read() -> None:
    message = response_head(503, {"content-type": "text/plain"})
    served = with_metadata(message, "envoy.lb", **{SERVED: "10.0.0.2:1"})
    assert response_head_of(served) == ResponseHead(503, is_readable=False, served="10.0.0.2:1")


@pytest.mark.parametrize(("name", "served"), [("upstream.address", "10.0.0.2:1"), ("other", "")])
def test_the_served_endpoint_is_read_from_an_attribute_of_envoys(name: str, served: str) -> None:
    message = response_head(200)
    told = message.attributes["envoy.filters.http.ext_proc"].fields
    told[name].string_value = "10.0.0.2:1"
    assert response_head_of(message).served == served


@pytest.mark.parametrize("namespace", ["other", "envoy.lb"])
def test_other_metadata_tells_no_served_endpoint(namespace: str) -> None:
    assert response_head_of(with_metadata(response_head(200), namespace, x=1)).served == ""


def test_a_served_endpoint_that_is_no_text_is_none() -> None:
    message = with_metadata(response_head(200), "envoy.lb", **{SERVED: 5})
    assert response_head_of(message).served == ""


@pytest.mark.parametrize("status", ["", "abc", "2000", "-1"])
def test_an_unreadable_status_is_as_good_as_none(status: str) -> None:
    assert response_head_of(response_head(status)).status is None


@pytest.mark.parametrize(
    ("headers", "is_readable"),
    [
        ({"content-type": "application/json"}, True),
        ({"content-type": "Text/Event-Stream; charset=utf-8"}, True),
        ({"content-type": "application/json", "content-encoding": "identity"}, True),
        ({"content-type": "application/json", "content-encoding": "gzip"}, False),
        ({"content-type": "text/html"}, False),
        ({}, False),
    ],
)
def test_only_plain_json_and_events_may_tell_usage(
    headers: dict[str, str], *, is_readable: bool
) -> None:
    assert response_head_of(response_head(200, headers)).is_readable is is_readable


def test_the_clients_trace_is_read_where_it_names_one() -> None:
    assert traceparent_of(head(headers={"traceparent": "00-1-2-01"})) == "00-1-2-01"
    assert traceparent_of(head()) == ""


def test_a_response_without_metadata_tells_no_served_endpoint() -> None:
    assert response_head_of(response_head(200, {"x": "y"})).served == ""


def test_of_a_value_only_what_can_matter_is_kept() -> None:
    found = head_of(head("/" + "a" * 100_000, method="x" * 5000), None)
    assert len(found.path) == len(found.method) == 1024
