import pytest
from google.protobuf.json_format import ParseDict

from extproc.config.sections import SESSION_HEADERS
from extproc.pb.kvsteer_ext_proc_pb2 import ProcessingRequest
from extproc.requests.request import Head
from extproc.serving.naming_headers import NamingHeaders
from extproc.serving.proxy_decoder import head_of
from extproc.serving.stream import ResponseHead, response_head_of
from tests.extproc.messages import head, read, response_head

SUBSET = "x-gateway-destination-endpoint-subset"
SERVED = "x-gateway-destination-endpoint-served"


def with_metadata(
    message: ProcessingRequest, namespace: str, **values: object
) -> ProcessingRequest:
    fields = {name.replace("_", "-"): value for name, value in values.items()}
    ParseDict(fields, message.metadata_context.filter_metadata[namespace])
    return message


def test_head_of_reads_method_path_and_length() -> None:
    message = head("/v1/completions?x=1", headers={"content-length": "17"})
    assert head_of(read(message), None) == Head("POST", "/v1/completions", 17)


def test_head_of_reads_headers_given_as_text() -> None:
    message = head()
    for header in message.request_headers.headers.headers:
        header.value, header.raw_value = header.raw_value.decode(), b""
    assert head_of(read(message), None).path == "/v1/chat/completions"


@pytest.mark.parametrize(
    ("header", "encoding"), [("GZip ", "gzip"), ("identity", ""), ("", ""), ("zstd", "zstd")]
)
def test_head_of_reads_how_a_body_is_compressed(header: str, encoding: str) -> None:
    message = read(head(headers={"content-encoding": header}))
    assert (message.head or head_of(message, None)).encoding == encoding


@pytest.mark.parametrize("length", ["", "many", "9" * 30, "-5", "\u0665"])
def test_head_of_ignores_an_unreadable_content_length(length: str) -> None:
    assert head_of(read(head(headers={"content-length": length})), None).content_length is None


def test_head_of_reads_the_policy_header_if_configured() -> None:
    message = head(headers={"x-policy": "random"})
    assert head_of(read(message), "x-policy").policy == "random"
    assert head_of(read(message), None).policy is None


def named(*session: str) -> NamingHeaders:
    return NamingHeaders.of(session, ())


def test_head_of_reads_the_session_header_if_configured() -> None:
    message = head(headers={"x-session": "chat 7"})
    assert head_of(read(message), None, named("x-session")).session == "chat 7"
    assert (
        head_of(read(message), None, named("x-other")).session
        == head_of(read(message), None).session
        == ""
    )


def test_head_of_reads_the_first_of_several_session_headers() -> None:
    message = head(headers={"session-id": "codex", "x-session-id": "other", "x-user": "u7"})
    found = head_of(read(message), None, NamingHeaders.of(SESSION_HEADERS, ("x-none", "x-user")))
    assert (found.session, found.conversation) == ("codex", "u7")
    empty = head(headers={"session-id": "", "x-session-id": "other"})
    assert head_of(read(empty), None, named(*SESSION_HEADERS)).session == "other"


@pytest.mark.parametrize(
    ("hint", "subset"),
    [
        ("10.0.0.1:1,10.0.0.2:1", {"10.0.0.1:1", "10.0.0.2:1"}),
        (["10.0.0.1:1", "10.0.0.2:1"], {"10.0.0.1:1", "10.0.0.2:1"}),
        ("", set()),
        ([], set()),
    ],
)
def test_head_of_reads_the_subset_hint(hint: object, subset: set[str]) -> None:
    message = with_metadata(head(), "envoy.lb.subset_hint", **{SUBSET: hint})
    assert head_of(read(message), None).subset == frozenset(subset)


def test_head_of_finds_no_hint_in_attributes() -> None:
    message = head()
    message.attributes["filter"].fields["x"].string_value = "10.0.0.1:1"
    assert head_of(read(message), None).subset is None


@pytest.mark.parametrize("namespace", ["other", "envoy.lb.subset_hint"])
def test_head_of_finds_no_hint_in_other_metadata(namespace: str) -> None:
    assert head_of(read(with_metadata(head(), namespace, x=1)), None).subset is None


def test_response_head_of_reads_status_and_served_endpoint() -> None:
    message = response_head(503, {"content-type": "text/plain"})
    served = read(with_metadata(message, "envoy.lb", **{SERVED: "10.0.0.2:1"}))
    assert response_head_of(served) == ResponseHead(503, is_readable=False, served="10.0.0.2:1")


@pytest.mark.parametrize(("name", "served"), [("upstream.address", "10.0.0.2:1"), ("other", "")])
def test_response_head_of_reads_the_served_endpoint_attribute(name: str, served: str) -> None:
    message = response_head(200)
    told = message.attributes["envoy.filters.http.ext_proc"].fields
    told[name].string_value = "10.0.0.2:1"
    assert response_head_of(read(message)).served == served


@pytest.mark.parametrize("namespace", ["other", "envoy.lb"])
def test_response_head_of_finds_no_served_endpoint_in_other_metadata(namespace: str) -> None:
    assert response_head_of(read(with_metadata(response_head(200), namespace, x=1))).served == ""


def test_response_head_of_ignores_a_served_endpoint_that_is_no_text() -> None:
    message = with_metadata(response_head(200), "envoy.lb", **{SERVED: 5})
    assert response_head_of(read(message)).served == ""


@pytest.mark.parametrize("status", ["", "abc", "2000", "-1"])
def test_response_head_of_ignores_an_unreadable_status(status: str) -> None:
    assert response_head_of(read(response_head(status))).status is None


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
def test_response_head_of_takes_plain_json_and_events_for_readable(
    headers: dict[str, str], *, is_readable: bool
) -> None:
    assert response_head_of(read(response_head(200, headers))).is_readable is is_readable


def test_response_head_of_finds_no_served_endpoint_without_metadata() -> None:
    assert response_head_of(read(response_head(200, {"x": "y"}))).served == ""


def test_head_of_keeps_at_most_1024_characters_of_a_value() -> None:
    found = head_of(read(head("/" + "a" * 100_000, method="x" * 5000)), None)
    assert len(found.path) == len(found.method) == 1024
