"""What the headers of a request and of its response, and the metadata beside them, tell us."""

from dataclasses import dataclass
from typing import NamedTuple

from extproc import headers
from extproc.pb.kvsteer_ext_proc_pb2 import HeaderValue, ProcessingRequest
from extproc.picking.eligibility import subset_of
from extproc.requests.request import path_of
from extproc.tracing import traceparent

# Decimal digits of the largest content-length and status that are read: 64 bits, and three.
_LENGTH_DIGITS = 19
_STATUS_DIGITS = 3

# More of a value changes nothing: nothing that we look for is as long. What is read is kept as long
# as its stream.
_TEXT_BYTES = 1024

# Media types of responses that may carry usage (OpenAI's, Anthropic's and SGLang's APIs).
JSON = "application/json"
EVENTS = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Head:
    """What of a request's headers decides how it is treated.

    content_length: in bytes, None if not told. policy: what the request asks for, where that is
    read. subset: the only endpoints that it may go to, by the proxy's hint; None for all.
    """

    method: str
    path: str
    content_length: int | None
    policy: str | None = None
    subset: frozenset[str] | None = None


class ResponseHead(NamedTuple):
    """What of a response's headers is accounted for.

    status: None if unreadable. is_readable: whether its body may tell usage: JSON or server-sent
    events, not compressed. served: ip:port of the endpoint that sent it, "" if not told.
    """

    status: int | None
    is_readable: bool = False
    served: str = ""


def head_of(message: ProcessingRequest, policy_header: str | None) -> Head:
    """A request's head.

    policy_header: the header that may name a policy, in lower case; None if none may.
    """
    method = path = ""
    length: int | None = None
    policy: str | None = None
    for header in message.request_headers.headers.headers:
        key = header.key  # made anew each time it is read
        if key == ":method":
            method = _text(header)
        elif key == ":path":
            path = path_of(_text(header))
        elif key == "content-length":
            length = _number(_text(header), _LENGTH_DIGITS)
        elif key == policy_header:
            policy = _text(header)
    return Head(method, path, length, policy, _subset(message))


def traceparent_of(message: ProcessingRequest) -> str:
    """The trace that a client says its request belongs to, "" if it says none."""
    for header in message.request_headers.headers.headers:
        if header.key == traceparent.NAME:
            return _text(header)
    return ""


def response_head_of(message: ProcessingRequest) -> ResponseHead:
    """A response's head."""
    status: int | None = None
    media_type = ""
    is_plain = True
    for header in message.response_headers.headers.headers:
        key = header.key
        if key == ":status":
            status = _number(_text(header), _STATUS_DIGITS)
        elif key == "content-type":
            media_type = _text(header).partition(";")[0].strip().lower()
        elif key == "content-encoding":
            is_plain = _text(header).strip().lower() in ("", "identity")
    return ResponseHead(status, is_plain and media_type in (JSON, EVENTS), _served(message))


def _subset(message: ProcessingRequest) -> frozenset[str] | None:
    """The proxy's hint at the endpoints that are allowed, if it gives one."""
    if not message.HasField("metadata_context"):
        return None
    namespace = message.metadata_context.filter_metadata.get(headers.SUBSET_NAMESPACE)
    if namespace is None or headers.SUBSET not in namespace.fields:
        return None
    hint = namespace.fields[headers.SUBSET]
    if hint.WhichOneof("kind") == "list_value":
        return subset_of([each.string_value for each in hint.list_value.values])
    return subset_of(hint.string_value)


def _served(message: ProcessingRequest) -> str:
    """The endpoint that answered.

    As the Endpoint Picker Protocol 1.0.0 has the proxy tell it, or as an attribute of Envoy's.
    """
    if message.HasField("metadata_context"):
        namespace = message.metadata_context.filter_metadata.get(headers.DESTINATION_NAMESPACE)
        if namespace is not None and headers.SERVED in namespace.fields:
            return namespace.fields[headers.SERVED].string_value
    told = message.attributes.get(headers.ATTRIBUTES)
    if told is None or headers.UPSTREAM not in told.fields:
        return ""
    return told.fields[headers.UPSTREAM].string_value[:_TEXT_BYTES]


def _number(text: str, digits: int) -> int | None:
    is_number = text.isascii() and text.isdigit() and len(text) <= digits
    return int(text) if is_number else None


def _text(header: HeaderValue) -> str:
    """Envoy fills raw_value; value is for those that do not (HeaderValue, core/v3/base.proto)."""
    if header.raw_value:
        return header.raw_value[:_TEXT_BYTES].decode("utf-8", "replace")
    return header.value[:_TEXT_BYTES]
