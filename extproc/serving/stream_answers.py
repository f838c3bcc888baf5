"""Builds the messages that answer Envoy on an ext_proc stream.

Sources: envoy/service/ext_proc/v3/external_processor.proto for the messages, the Endpoint Picker
Protocol 1.0.0 for the names of the pick.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from extproc.base import headers
from extproc.config.owned_headers import DIFFERING
from extproc.http2.messages import LongMessage
from extproc.pb.kvsteer_ext_proc_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HeaderValue,
    HeaderValueOption,
    ImmediateResponse,
    ProcessingMode,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)
from extproc.requests.added_fields import LONG_BYTES, Body, ExtendedBody
from extproc.requests.refusals import Refusal

# Most bytes of an echoed body in one message: with its frame, the message stays below the 64 KiB
# that Envoy's documentation requires (BodyMutation.streamed_response).
MAX_ECHO_BYTES = 62_000

# The encoded messages (ProcessingResponse) that answer one message of the proxy, in order.
Answers = list[bytes | LongMessage]


def encoded(*answers: ProcessingResponse) -> Answers:
    """Returns answers as they are sent."""
    return [answer.SerializeToString() for answer in answers]


# Names and values of headers to set.
HeaderValues = tuple[tuple[str, str], ...]


class PickAnswer(msgspec.Struct, frozen=True, gc=False):
    """What an answer says of a request's destination; each part may be absent.

    destination: ip:port, best first, comma-separated. header_values: the other headers that are
    set, of those in `extproc.config.owned_headers`. body: replaces the request's own, if that was
    received whole.
    """

    destination: str = ""
    header_values: HeaderValues = ()
    body: Body | None = None


# By what a repeated answer is known: the body mode that lets request headers go on, or a placement.
_Cause = int | None | PickAnswer

# Of an answer, the lengths in bytes of its values, the destination's first, and the other names.
_Shape = tuple[tuple[int, ...], tuple[str, ...]]


class _Frame(NamedTuple):
    """What is around values of certain lengths.

    parts: what is before each value, and after the last one. order: which values these are.
    """

    parts: list[bytes]
    order: list[int]


class AnswerCache:
    """Answers that many requests get: each is built and encoded once.

    They are shared, so they must not be changed. Bounded: when there are too many, all are dropped.
    Among many workers there are too many picks to know, and some headers differ from request to
    request: what is around values of the same lengths is the same, so that it is built once, and
    the values are put into it.

    owned: the headers that an answer with a pick sets or removes. names_model: whether the model's
    is one of them, by which routes choose. differing: an answer that sets one of these is not kept.
    """

    def __init__(
        self,
        owned: tuple[str, ...] = (headers.DESTINATION,),
        differing: frozenset[str] = DIFFERING,
        most: int = 1024,
    ) -> None:
        self.owned = owned
        self.names_model = headers.MODEL in owned
        self._differing = differing
        self._most = most
        self._answers: dict[_Cause, Answers] = {}
        self._frames: dict[_Shape, _Frame] = {}

    def go_on(self, body_mode: int | None) -> Answers:
        """Returns the answer of `request_headers_go_on`."""
        known = self._answers.get(body_mode)
        if known is None:
            known = encoded(request_headers_go_on(body_mode))
            self._keep(body_mode, known)
        return known

    def body_placed(self, pick: PickAnswer) -> Answers:
        """Returns the answer to a buffered request body that carries a pick."""
        body = pick.body
        if body is not None:
            if isinstance(body, ExtendedBody) or len(body) >= LONG_BYTES:
                return [_long_placed(pick, body, self.owned)]
            return [_placed(pick, body, self.owned)]
        known = self._answers.get(pick)
        if known is None:
            known = [self._filled(pick)]
            values = pick.header_values
            if not values or self._differing.isdisjoint([name for name, _ in values]):
                self._keep(pick, known)
        return known

    def _filled(self, pick: PickAnswer) -> bytes:
        """Builds an answer from what is known of others whose values are as long."""
        destination, named = pick.destination.encode(), pick.header_values
        if not named:  # as in most answers: only the pick stands at each place
            return destination.join(self._frame(((len(destination),), ())).parts)
        values = [destination, *[value.encode() for _, value in named]]
        shape = tuple(map(len, values)), tuple([name for name, _ in named])
        (before, *others), order = self._frame(shape)
        return before + b"".join(
            [values[at] + part for at, part in zip(order, others, strict=True)]
        )

    def _frame(self, shape: _Shape) -> _Frame:
        known = self._frames.get(shape)
        if known is None:
            if len(self._frames) >= self._most:
                self._frames.clear()
            known = self._frames[shape] = _frame_of(shape, self.owned)
        return known

    def _keep(self, cause: _Cause, answers: Answers) -> None:
        if len(self._answers) >= self._most:
            self._answers.clear()
        self._answers[cause] = answers


def _frame_of(shape: _Shape, owned: tuple[str, ...]) -> _Frame:
    """Returns what is around the values of an answer.

    It is encoded twice, with values that are as long and differ in each byte: where the two differ,
    the values are. In the second, the bytes of a value are its number, from 1 on.
    """
    lengths, _ = shape
    blank = _placed(_pick_of_shape(shape, [0] * len(lengths)), None, owned)
    numbered = _placed(_pick_of_shape(shape, range(1, len(lengths) + 1)), None, owned)
    parts, order = [], []
    start = at = 0
    while at < len(blank):
        if blank[at] == numbered[at]:
            at += 1
            continue
        parts.append(blank[start:at])
        order.append(numbered[at] - 1)
        start = at = at + lengths[order[-1]]
    return _Frame([*parts, blank[start:]], order)


def _pick_of_shape(shape: _Shape, marks: Sequence[int]) -> PickAnswer:
    """Returns a pick of a shape. marks: for each value the character of which it consists."""
    lengths, names = shape
    pick, *values = [chr(mark) * length for length, mark in zip(lengths, marks, strict=True)]
    return PickAnswer(pick, tuple(zip(names, values, strict=True)))


def _headers_of(pick: PickAnswer) -> HeaderValues:
    """Returns the names and values of all headers that an answer sets."""
    if not pick.destination:
        return pick.header_values
    return (headers.DESTINATION, pick.destination), *pick.header_values


def _placed(pick: PickAnswer, body: bytes | None, owned: tuple[str, ...]) -> bytes:
    """Builds and encodes the answer of `AnswerCache.body_placed`, with no body or a short one."""
    common = pick_of(pick, owned)
    return with_metadata(body_placed(common, body), pick).SerializeToString()


def _long_placed(pick: PickAnswer, body: Body, owned: tuple[str, ...]) -> LongMessage:
    """Builds and encodes the answer of `AnswerCache.body_placed` with a long body."""
    announced = with_metadata(body_placed(pick_of(pick, owned), None, len(body)), pick)
    return _with_body(announced.SerializeToString(), body)


# In these modes a whole body arrives in one message, which is not always marked as the last one:
# request trailers may follow it.
WHOLE_BODY_MODES = (ProcessingMode.BUFFERED, ProcessingMode.BUFFERED_PARTIAL)

# The mode after a pick on the headers: Envoy sends no body, but keeps the stream open until the
# response ends, which it would not do by itself.
_WITHOUT_REQUEST_BODY = ProcessingMode(
    request_header_mode=ProcessingMode.SEND,
    request_body_mode=ProcessingMode.NONE,
    response_trailer_mode=ProcessingMode.SEND,
)
# The same, but Envoy also sends the headers of the response.
_WITH_RESPONSE_ALONE = ProcessingMode(
    request_header_mode=ProcessingMode.SEND,
    request_body_mode=ProcessingMode.NONE,
    response_header_mode=ProcessingMode.SEND,
    response_trailer_mode=ProcessingMode.SEND,
)
# The same with a request body, by its mode; Envoy also sends the headers of the response.
_WITH_RESPONSE_HEADERS: Mapping[int, ProcessingMode] = {
    mode: ProcessingMode(
        request_header_mode=ProcessingMode.SEND,
        request_body_mode=mode,
        response_header_mode=ProcessingMode.SEND,
        response_trailer_mode=ProcessingMode.SEND,
    )
    for mode in WHOLE_BODY_MODES
}
_WITH_RESPONSE_BODY = ProcessingMode(
    response_header_mode=ProcessingMode.SEND,
    response_body_mode=ProcessingMode.STREAMED,
    response_trailer_mode=ProcessingMode.SEND,
)


def pick_of(pick: PickAnswer, owned: tuple[str, ...]) -> CommonResponse:
    """Returns the header mutation of a pick.

    owned: the headers of which it overwrites or removes what a client set.
    """
    values = _headers_of(pick)
    mutation = HeaderMutation(set_headers=[_overwrite(name, value) for name, value in values])
    names = {name for name, _ in values}
    mutation.remove_headers.extend([name for name in owned if name not in names])
    return CommonResponse(header_mutation=mutation, clear_route_cache=headers.MODEL in owned)


def with_metadata(answer: ProcessingResponse, pick: PickAnswer) -> ProcessingResponse:
    """Adds the pick, if there is one, to the dynamic metadata of an answer, and returns it."""
    if pick.destination:
        space = answer.dynamic_metadata.fields[headers.DESTINATION_NAMESPACE].struct_value
        space.fields[headers.DESTINATION].string_value = pick.destination
    return answer


def headers_placed(
    common: CommonResponse, *, without_body: bool = False, with_response: bool = False
) -> ProcessingResponse:
    """Returns the answer to request headers that carries the pick.

    without_body: tells Envoy not to buffer the body. with_response: requests the headers of the
    response, which Envoy would not send by itself.
    """
    answer = ProcessingResponse(request_headers=HeadersResponse(response=common))
    if with_response:
        answer.mode_override.CopyFrom(_WITH_RESPONSE_ALONE)
    elif without_body:
        answer.mode_override.CopyFrom(_WITHOUT_REQUEST_BODY)
    return answer


def body_placed(
    common: CommonResponse, body: bytes | None = None, length: int | None = None
) -> ProcessingResponse:
    """Returns the answer to a buffered request body that carries the pick.

    body: the new body for the worker; None keeps the old one. length: of a new body that is put
    into the answer later; None if there is none.
    """
    size = length if body is None else len(body)
    if size is not None:
        announce_length(common, size)
    if body is not None:
        common.body_mutation.body = body
    return ProcessingResponse(request_body=BodyResponse(response=common))


def announce_length(common: CommonResponse, size_bytes: int) -> None:
    """Has the request say how long its new body is."""
    length = _overwrite("content-length", str(size_bytes))
    common.header_mutation.set_headers.append(length)


# The fields in which a new body lies, from the inside out.
_BODY_FIELDS = (
    BodyMutation.DESCRIPTOR.fields_by_name["body"].number,
    CommonResponse.DESCRIPTOR.fields_by_name["body_mutation"].number,
    BodyResponse.DESCRIPTOR.fields_by_name["response"].number,
    ProcessingResponse.DESCRIPTOR.fields_by_name["request_body"].number,
)
_LENGTH_DELIMITED = 2


def _with_body(answer: bytes, body: Body) -> LongMessage:
    """Returns an encoded answer to a request body with this new body, which is not copied.

    The messages would copy it three times. A decoder merges what stands twice for one message
    (protobuf's encoding, "Last One Wins").
    """
    length = size = len(body)
    before = b""
    for number in _BODY_FIELDS:
        before = bytes((number << 3 | _LENGTH_DELIMITED, *_varint(size))) + before
        size = length + len(before)
    if isinstance(body, ExtendedBody):
        return LongMessage(answer + before, body.body, body.end, body.tail)
    return LongMessage(answer + before, body, length)


def _varint(number: int) -> Iterator[int]:
    while number > 0x7F:
        yield number & 0x7F | 0x80
        number >>= 7
    yield number


def more_time(seconds: float) -> bytes:
    """Returns the message that has Envoy wait so long for the answer, from when it is received.

    Envoy takes one for each of its messages, and ignores what is below a millisecond or above the
    filter's max_message_timeout.
    """
    whole, rest = divmod(round(seconds * 1000), 1000)
    # google.protobuf.Duration: int64 seconds = 1, int32 nanos = 2; a 0 is left out
    duration = bytes((0x08, *_varint(whole))) if whole else b""
    if rest:
        duration += bytes((0x10, *_varint(rest * 1_000_000)))
    # ProcessingResponse: google.protobuf.Duration override_message_timeout = 10
    return bytes((10 << 3 | _LENGTH_DELIMITED, len(duration))) + duration


def request_headers_go_on(body_mode: int | None = None) -> ProcessingResponse:
    """Returns the answer to request headers that lets them wait for the body.

    body_mode: the unchanged mode of the request's body, given to also request the response's
    headers, which Envoy would not send by itself; None to change no mode.
    """
    answer = ProcessingResponse(request_headers=HeadersResponse())
    if body_mode is not None:
        answer.mode_override.CopyFrom(_WITH_RESPONSE_HEADERS[body_mode])
    return answer


def request_body_goes_on() -> ProcessingResponse:
    """Returns the answer that leaves a request body as it is."""
    return ProcessingResponse(request_body=BodyResponse())


def request_trailers_go_on() -> ProcessingResponse:
    """Returns the answer that leaves request trailers as they are."""
    return ProcessingResponse(request_trailers=TrailersResponse())


def response_headers_go_on(
    values: HeaderValues = (), *, read_body: bool = False
) -> ProcessingResponse:
    """Returns the answer that leaves response headers as they are.

    values: those that are set besides. read_body: requests the response's body as it streams; needs
    allow_mode_override.
    """
    answer = ProcessingResponse(response_headers=HeadersResponse())
    if values:
        mutation = HeaderMutation(set_headers=[_overwrite(*pair) for pair in values])
        answer.response_headers.response.header_mutation.CopyFrom(mutation)
    if read_body:
        answer.mode_override.CopyFrom(_WITH_RESPONSE_BODY)
    return answer


def response_body_goes_on() -> ProcessingResponse:
    """Returns the answer that leaves a piece of a response body as it is."""
    return ProcessingResponse(response_body=BodyResponse())


def response_trailers_go_on() -> ProcessingResponse:
    """Returns the answer that leaves response trailers as they are."""
    return ProcessingResponse(response_trailers=TrailersResponse())


def request_body_echo(body: bytes, *, end_of_stream: bool) -> Iterator[ProcessingResponse]:
    """Yields answers that send back a piece of a request body in FULL_DUPLEX_STREAMED."""
    for common in _echo(body, end_of_stream=end_of_stream):
        yield ProcessingResponse(request_body=BodyResponse(response=common))


def response_body_echo(body: bytes, *, end_of_stream: bool) -> Iterator[ProcessingResponse]:
    """Yields answers that send back a piece of a response body in FULL_DUPLEX_STREAMED."""
    for common in _echo(body, end_of_stream=end_of_stream):
        yield ProcessingResponse(response_body=BodyResponse(response=common))


def refused(refusal: Refusal) -> ProcessingResponse:
    """Returns the immediate response with which the router itself refuses a request."""
    mutation = HeaderMutation(set_headers=[_overwrite(*pair) for pair in refusal.headers])
    answer = ImmediateResponse(headers=mutation, body=refusal.body, details="kvsteer")
    answer.status.code = refusal.status
    return ProcessingResponse(immediate_response=answer)


def _echo(body: bytes, *, end_of_stream: bool) -> Iterator[CommonResponse]:
    """Yields the pieces of an echo; none for an empty piece that is not the last."""
    last = len(body) - MAX_ECHO_BYTES
    for start in range(0, len(body), MAX_ECHO_BYTES):
        piece = body if last <= 0 else body[start : start + MAX_ECHO_BYTES]
        yield _streamed(piece, end_of_stream=end_of_stream and start >= last)
    if not body and end_of_stream:
        yield _streamed(b"", end_of_stream=True)


def _streamed(piece: bytes, *, end_of_stream: bool) -> CommonResponse:
    streamed = StreamedBodyResponse(body=piece, end_of_stream=end_of_stream)
    return CommonResponse(body_mutation=BodyMutation(streamed_response=streamed))


def _overwrite(name: str, value: str) -> HeaderValueOption:
    return HeaderValueOption(
        header=HeaderValue(key=name, raw_value=value.encode()),
        append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )
