"""ext_proc messages as Envoy sends them."""

from collections.abc import Mapping

from extproc.pb.kvsteer_ext_proc_pb2 import (
    HeaderMap,
    HeaderValue,
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingMode,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from extproc.serving.proxy_decoder import ProxyDecoder
from extproc.serving.proxy_message import ProxyMessage

BUFFERED = ProcessingMode.BUFFERED


def read(message: ProcessingRequest) -> ProxyMessage:
    """What the router reads of a message, with all its headers."""
    headers = (message.request_headers.headers, message.response_headers.headers)
    names = [one.key for part in headers for one in part.headers]
    return ProxyDecoder(names).decode(message.SerializeToString())


def answers_of(step: object) -> list[ProcessingResponse]:
    """The answers to a message, decoded."""
    assert isinstance(step, list), step
    return [ProcessingResponse.FromString(each) for each in step]


def head(
    path: str = "/v1/chat/completions",
    *,
    method: str = "POST",
    end_of_stream: bool = False,
    mode: int | None = BUFFERED,
    headers: Mapping[str, str] | None = None,
    response_mode: int = 0,
) -> ProcessingRequest:
    """The first message of a stream; mode None is an Envoy that does not report it."""
    pairs = {":method": method, ":authority": "a", ":path": path, **(headers or {})}
    message = ProcessingRequest(
        request_headers=HttpHeaders(
            headers=HeaderMap(
                headers=[HeaderValue(key=key, raw_value=pairs[key].encode()) for key in pairs]
            ),
            end_of_stream=end_of_stream,
        )
    )
    if mode is not None:
        protocol = ProtocolConfiguration()
        protocol.request_body_mode = mode  # type: ignore[assignment] # enums are ints at run time
        protocol.response_body_mode = response_mode  # type: ignore[assignment]
        message.protocol_config.CopyFrom(protocol)
    return message


def body(content: bytes, *, end_of_stream: bool = True) -> ProcessingRequest:
    """A request body message."""
    return ProcessingRequest(request_body=HttpBody(body=content, end_of_stream=end_of_stream))


def trailers() -> ProcessingRequest:
    """A request trailers message."""
    return ProcessingRequest(request_trailers=HttpTrailers())


def response_head(
    status: int | str, headers: Mapping[str, str] | None = None, *, end_of_stream: bool = False
) -> ProcessingRequest:
    """A response headers message."""
    pairs = {":status": str(status), **(headers or {})}
    values = [HeaderValue(key=key, raw_value=pairs[key].encode()) for key in pairs]
    return ProcessingRequest(
        response_headers=HttpHeaders(headers=HeaderMap(headers=values), end_of_stream=end_of_stream)
    )
