"""One ext_proc stream, which is one HTTP request: messages in, answers out, no transport.

Dialect A (Envoy's BUFFERED request body; envoy/service/ext_proc/v3/external_processor.proto):

    state     message            answer                                          next state
    HEAD      request_headers    a prompt to come: go on and send the body       BODY
                                 anything else: Ask, the pick goes with it       PLACED
    BODY      request_body       Ask, the pick goes with it                      PLACED
    PLACED    request_body       go on (a body that came in spite of us)         PLACED
    any       request_trailers   go on                                           unchanged
    any       response_*         go on                                           unchanged
    any       out of order       ProtocolError

A pick on the headers tells Envoy not to buffer the body (mode_override, which needs
allow_mode_override); headers are held by Envoy until the body was answered, so a pick with the
body still steers.
"""

from dataclasses import dataclass
from enum import Enum, auto

from google.protobuf.struct_pb2 import Struct

from extproc import headers
from extproc.errors import ProtocolError
from extproc.pb.kvsteer_ext_proc_pb2 import (
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HeaderValue,
    HeaderValueOption,
    ImmediateResponse,
    ProcessingMode,
    ProcessingRequest,
    ProcessingResponse,
    TrailersResponse,
)
from extproc.picking.eligibility import subset_of
from extproc.picking.refusal import Refusal
from extproc.requests.request import is_inference, path_of


class State(Enum):
    """Of the table above."""

    HEAD = auto()
    BODY = auto()
    PLACED = auto()


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


@dataclass(frozen=True, slots=True)
class Ask:
    """The request is to be placed: decide, then call `Stream.place`.

    body: None where the pick is made on the headers; reason then says why.
    """

    head: Head
    body: bytes | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the request goes, for Envoy; both may be absent.

    destination: ip:port, best first, comma-separated. model: for routes by model.
    """

    destination: str = ""
    model: str = ""


Step = ProcessingResponse | Ask

# With these a whole body arrives in one message that may not say so: request trailers follow it.
_WHOLE_BODY_MODES = (ProcessingMode.BUFFERED, ProcessingMode.BUFFERED_PARTIAL)


class Stream:
    """One HTTP request on its way through Envoy.

    max_body_bytes: a longer one, by its content-length, is not asked for.
    names_model: whether routes choose a cluster by a model header that we set.
    policy_header: the request header that may name a policy, None if none may.
    """

    def __init__(
        self, *, max_body_bytes: int, names_model: bool, policy_header: str | None = None
    ) -> None:
        self.state = State.HEAD
        self._max_body_bytes = max_body_bytes
        self._names_model = names_model
        self._policy_header = policy_header
        self._head: Head | None = None
        self._body_follows = False

    def receive(self, message: ProcessingRequest) -> Step:
        """Takes one message.

        Raises:
            ProtocolError: out of order, or in a dialect that is not spoken here.
        """
        kind = message.WhichOneof("request")
        if kind == "request_headers":
            return self._receive_head(message)
        if kind == "request_body":
            return self._receive_body(message)
        if kind == "request_trailers":
            return ProcessingResponse(request_trailers=TrailersResponse())
        if kind == "response_headers":
            return ProcessingResponse(response_headers=HeadersResponse())
        if kind == "response_body":
            return ProcessingResponse(response_body=BodyResponse())
        if kind == "response_trailers":
            return ProcessingResponse(response_trailers=TrailersResponse())
        raise ProtocolError("message without a request")

    def place(self, placement: Placement) -> ProcessingResponse:
        """The answer that carries the pick; belongs to the last `Ask`."""
        common = CommonResponse(
            header_mutation=self._mutation(placement),
            clear_route_cache=self._names_model,
        )
        if self.state is State.BODY:
            answer = ProcessingResponse(request_body=BodyResponse(response=common))
        else:
            answer = ProcessingResponse(request_headers=HeadersResponse(response=common))
            if self._body_follows:
                answer.mode_override.CopyFrom(_WITHOUT_BODY)
        if placement.destination:
            answer.dynamic_metadata.CopyFrom(_metadata(placement.destination))
        self.state = State.PLACED
        return answer

    def refuse(self, refusal: Refusal) -> ProcessingResponse:
        """The answer that takes a worker's place; belongs to the last `Ask`."""
        self.state = State.PLACED
        mutation = HeaderMutation(set_headers=[_overwrite(*pair) for pair in refusal.headers])
        answer = ImmediateResponse(headers=mutation, body=refusal.body, details="kvsteer")
        answer.status.code = refusal.status
        return ProcessingResponse(immediate_response=answer)

    def _receive_head(self, message: ProcessingRequest) -> Step:
        if self.state is not State.HEAD or self._head is not None:
            raise ProtocolError("request headers twice")
        mode = _body_mode(message)
        self._head = head = _head(message, self._policy_header)
        self._body_follows = not message.request_headers.end_of_stream
        reason = self._reason_without_body(head, mode)
        if reason:
            return Ask(head, None, reason)
        self.state = State.BODY
        return ProcessingResponse(request_headers=HeadersResponse())

    def _reason_without_body(self, head: Head, mode: int) -> str:
        """Why a request is placed on its headers, "" if its body is wanted."""
        if not is_inference(head.method, head.path):
            return "not_inference"
        if not self._body_follows:
            return "no_body"
        if head.content_length is not None and head.content_length > self._max_body_bytes:
            return "body_too_large"
        return "" if mode in _WHOLE_BODY_MODES else "body_not_buffered"

    def _receive_body(self, message: ProcessingRequest) -> Step:
        if self._head is None:
            raise ProtocolError("request body before its headers")
        if self.state is State.PLACED:
            return ProcessingResponse(request_body=BodyResponse())
        body = message.request_body.body
        if len(body) > self._max_body_bytes:
            return Ask(self._head, None, "body_too_large")
        return Ask(self._head, body)

    def _mutation(self, placement: Placement) -> HeaderMutation:
        """Ours replaces what a client sent under the same name, also where it is nothing."""
        mutation = HeaderMutation()
        names = [(headers.DESTINATION, placement.destination)]
        if self._names_model:
            names.append((headers.MODEL, placement.model))
        for name, value in names:
            if value:
                mutation.set_headers.append(_overwrite(name, value))
            else:
                mutation.remove_headers.append(name)
        return mutation


_WITHOUT_BODY = ProcessingMode(
    request_header_mode=ProcessingMode.SEND,
    request_body_mode=ProcessingMode.NONE,
    response_trailer_mode=ProcessingMode.SEND,
)


def _body_mode(message: ProcessingRequest) -> int:
    """How Envoy sends bodies; before Envoy 1.34 it did not say, and BUFFERED is what we ask for."""
    if not message.HasField("protocol_config"):
        return ProcessingMode.BUFFERED
    mode = message.protocol_config.request_body_mode
    if mode in (ProcessingMode.FULL_DUPLEX_STREAMED, ProcessingMode.GRPC):
        name = ProcessingMode.BodySendMode.Name(mode)
        raise ProtocolError(f"request_body_mode {name} is not supported, use BUFFERED")
    return mode


def _head(message: ProcessingRequest, policy_header: str | None) -> Head:
    method = path = ""
    length: int | None = None
    policy: str | None = None
    for header in message.request_headers.headers.headers:
        if header.key == ":method":
            method = _text(header)
        elif header.key == ":path":
            path = path_of(_text(header))
        elif header.key == "content-length":
            length = _length(_text(header))
        elif header.key == policy_header:
            policy = _text(header)
    return Head(method, path, length, policy, _subset(message))


def _length(text: str) -> int | None:
    is_number = text.isascii() and text.isdigit() and len(text) < 20  # noqa: PLR2004 - 64 bits
    return int(text) if is_number else None


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


def _text(header: HeaderValue) -> str:
    """Envoy fills raw_value; value is for those that do not (HeaderValue, core/v3/base.proto)."""
    return header.raw_value.decode("utf-8", "replace") if header.raw_value else header.value


def _overwrite(name: str, value: str) -> HeaderValueOption:
    return HeaderValueOption(
        header=HeaderValue(key=name, raw_value=value.encode()),
        append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def _metadata(destination: str) -> Struct:
    metadata = Struct()
    fields = metadata.fields[headers.DESTINATION_NAMESPACE].struct_value.fields
    fields[headers.DESTINATION].string_value = destination
    return metadata
