"""Builds the messages that answer Envoy on an ext_proc stream.

Sources: envoy/service/ext_proc/v3/external_processor.proto for the messages, the Endpoint Picker
Protocol 1.0.0 for the names of the pick.
"""

from collections.abc import Iterator, Mapping

import msgspec

from extproc.base import headers
from extproc.http2.grpc_messages import LongMessage
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
from extproc.requests.added_fields import LONG_BYTES, Body, Extended
from extproc.serving.refusals import Refusal

# Most bytes of an echoed body in one message: with its frame, the message stays below the 64 KiB
# that Envoy's documentation requires (BodyMutation.streamed_response).
MAX_ECHO_BYTES = 62_000

# The encoded messages (ProcessingResponse) that answer one message of the proxy, in order.
Answers = list[bytes | LongMessage]


def encoded(*answers: ProcessingResponse) -> Answers:
    """Returns answers as they are sent."""
    return [answer.SerializeToString() for answer in answers]


class Placement(msgspec.Struct, frozen=True, gc=False):
    """What Envoy is told about a request's destination; each part may be absent.

    destination: ip:port, best first, comma-separated. model: for routes by model. rank: name and
    value of the header that names a data-parallel rank. legs: names and values of the headers that
    say where the prompt is computed. body: replaces the request's own, if that was received whole.
    priority: as rank, of the header that gives the engine's queue a priority.
    """

    destination: str = ""
    model: str = ""
    rank: tuple[str, str] | None = None
    legs: tuple[tuple[str, str], ...] = ()
    body: Body | None = None
    priority: tuple[str, str] | None = None


# By what a repeated answer is known: the body mode that lets request headers go on, a placement, or
# a pick and its model, which are all that most placements have.
_Cause = int | None | Placement | tuple[tuple[str, ...], str | None]


# What stands for a pick, as long as one. It begins otherwise than it goes on, so that no length in
# front of it (those of 128 to 255 bytes end with 0x01) is taken for its beginning. A pick is in a
# header and in the metadata, so three parts are around it.
_MARK_BEGINS, _MARK, _PICK_PARTS = "\x02", "\x01", 3


class Phrases:
    """Answers that many requests get: each is built and encoded once.

    They are shared, so they must not be changed. Bounded: when the cache is full, it is cleared.
    Among many workers there are too many picks to know: what is around picks of one length is the
    same, so that it is built once, and the pick is put into it.
    """

    def __init__(self, most: int = 1024) -> None:
        self._most = most
        self._answers: dict[_Cause, Answers] = {}
        self._around: dict[tuple[int, str], list[bytes]] = {}

    def go_on(self, body_mode: int | None) -> Answers:
        """Returns the answer of `request_headers_go_on`."""
        known = self._answers.get(body_mode)
        if known is None:
            known = self._keep(body_mode, encoded(request_headers_go_on(body_mode)))
        return known

    def body_picked(
        self,
        pick: tuple[str, ...],
        model: str | None,
        most: int,
        *,
        names_model: bool,
        owned: tuple[str, ...] = (),
    ) -> Answers:
        """Returns the answer of `body_placed` to a pick that has nothing but a model.

        pick: ip:port, best first. most: the number of endpoints that are named; it, names_model and
        owned are the same in every call.
        """
        known = self._answers.get((pick, model))
        if known is not None:
            return known
        destination = ",".join(pick[:most])
        written, name = destination.encode(), model or ""
        around = self._around.get((len(written), name))
        if around is None:
            mark = (_MARK_BEGINS + _MARK * (len(written) - 1)) if written else ""
            marked = _placed(Placement(mark, name), names_model=names_model, owned=owned)
            around = marked.split(mark.encode()) if mark else [marked]
            if len(around) != _PICK_PARTS:  # no pick, or the model's name has the mark as well
                placement = Placement(destination, name)
                return self.body_placed(placement, names_model=names_model, owned=owned)
            self._around[len(written), name] = around
        return self._keep((pick, model), [written.join(around)])

    def body_placed(
        self, placement: Placement, *, names_model: bool, owned: tuple[str, ...] = ()
    ) -> Answers:
        """Returns the answer to a buffered request body that carries a placement.

        names_model, owned: as in `pick_of`, and the same in every call.
        """
        # an answer for only one request is not cached
        is_its_own = placement.body is not None or bool(placement.legs)
        known = None if is_its_own else self._answers.get(placement)
        if known is not None:
            return known
        body = placement.body
        if isinstance(body, Extended) or (body is not None and len(body) >= LONG_BYTES):
            return [_long_placed(placement, body, names_model=names_model, owned=owned)]
        answers: Answers = [_placed(placement, names_model=names_model, owned=owned)]
        return answers if is_its_own else self._keep(placement, answers)

    def _keep(self, cause: _Cause, answers: Answers) -> Answers:
        if len(self._answers) >= self._most:
            self._answers.clear()
            self._around.clear()
        self._answers[cause] = answers
        return answers


def _placed(placement: Placement, *, names_model: bool, owned: tuple[str, ...]) -> bytes:
    """Builds and encodes the answer of `Phrases.body_placed`, with no body or a short one."""
    common = pick_of(placement, names_model=names_model, owned=owned)
    body = None if isinstance(placement.body, Extended) else placement.body
    return with_metadata(body_placed(common, body), placement).SerializeToString()


def _long_placed(
    placement: Placement, body: Body, *, names_model: bool, owned: tuple[str, ...]
) -> LongMessage:
    """Builds and encodes the answer of `Phrases.body_placed` with a long body."""
    common = pick_of(placement, names_model=names_model, owned=owned)
    announced = with_metadata(body_placed(common, None, len(body)), placement)
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


def pick_of(
    placement: Placement, *, names_model: bool, owned: tuple[str, ...] = ()
) -> CommonResponse:
    """Returns the header mutation of a pick; it removes or overwrites what a client set of them.

    That holds for the endpoint, the model if `names_model`, and all `owned` headers.

    names_model: whether routes choose by KVSteer's model header. owned: headers that say where the
    prompt is computed, or on which rank, and that no client may set.
    """
    mutation = HeaderMutation()
    names = [(headers.DESTINATION, placement.destination)]
    if names_model:
        names.append((headers.MODEL, placement.model))
    for name, value in names:
        if value:
            mutation.set_headers.append(_overwrite(name, value))
        else:
            mutation.remove_headers.append(name)
    told = placement.legs if placement.rank is None else (*placement.legs, placement.rank)
    if placement.priority is not None:
        told = (*told, placement.priority)
    for name, value in told:
        mutation.set_headers.append(_overwrite(name, value))
    if owned:
        set_names = {name for name, _ in told}
        mutation.remove_headers.extend([name for name in owned if name not in set_names])
    return CommonResponse(header_mutation=mutation, clear_route_cache=names_model)


def with_metadata(answer: ProcessingResponse, placement: Placement) -> ProcessingResponse:
    """Adds the pick, if there is one, to the dynamic metadata of an answer, and returns it."""
    if placement.destination:
        space = answer.dynamic_metadata.fields[headers.DESTINATION_NAMESPACE].struct_value
        space.fields[headers.DESTINATION].string_value = placement.destination
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
        common.header_mutation.set_headers.append(_overwrite("content-length", str(size)))
    if body is not None:
        common.body_mutation.body = body
    return ProcessingResponse(request_body=BodyResponse(response=common))


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
    if isinstance(body, Extended):
        return LongMessage(answer + before, body.body, body.end, body.tail)
    return LongMessage(answer + before, body, length)


def _varint(number: int) -> Iterator[int]:
    while number > 0x7F:
        yield number & 0x7F | 0x80
        number >>= 7
    yield number


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


def response_headers_go_on(*, read_body: bool = False) -> ProcessingResponse:
    """Returns the answer that leaves response headers as they are.

    read_body: requests the response's body as it streams; needs allow_mode_override.
    """
    answer = ProcessingResponse(response_headers=HeadersResponse())
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
