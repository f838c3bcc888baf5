"""One ext_proc stream, which is one HTTP request: messages in, answers out, no transport.

There are two dialects. The request body mode in the first message (`protocol_config`, since Envoy
1.34) determines which one is used; without it, the configuration does:

A  BUFFERED and every mode but B's: Envoy holds the request, and answers carry the pick.
B  FULL_DUPLEX_STREAMED, the Endpoint Picker Protocol 1.0.0: the router sends every byte back.

    state    message            dialect A                       dialect B                 then
    HEAD     request_headers    a prompt to come: go on         say nothing, collect      BODY
                                else ROUTE, pick goes with it   the same                  PLACED*
                                (none, where no model is called)
    HEAD     request_trailers   go on                           go on                     HEAD
    BODY     request_body       ROUTE, pick goes with it        not the end: collect      BODY
                                                                the end, or too much: ROUTE,
                                                                headers with the pick,
                                                                all that was collected    PLACED*
    BODY     request_trailers   ROUTE, pick goes with them      ROUTE, headers with the pick,
                                                                what was collected, trailers ENDED
    PLACED   request_body       go on: Envoy sent it although   echo                      PLACED*
                                it was told not to
    PLACED   request_trailers   go on                           go on                     ENDED
    ENDED    request_body       go on                           nothing: Envoy 1.35 and   ENDED
                                                                later may repeat the last
                                                                piece (envoy#46237)
    REFUSED  request_*          nothing: we have answered       nothing                   REFUSED
    any      response_headers   go on                           go on                     unchanged
    any      response_body      go on                           echo                      unchanged
    any      response_trailers  go on                           go on                     unchanged
    any      anything else      ProtocolError

    * ENDED in dialect B if the message says that it is the last one of the request.

ROUTE: a `RoutingRequest` is returned. Until `place` or `refuse` answers it, the state is ROUTING,
in which no message may arrive; in dialect A, `more_time` may be sent meanwhile. Each direction has
its own mode: a response is echoed if `response_body_mode` is FULL_DUPLEX_STREAMED.

A pick on the headers in dialect A tells Envoy not to buffer the body (mode_override, which needs
allow_mode_override). Envoy holds the headers until the body is answered, so a pick with the body
still steers. A pick on trailers steers by its metadata: Envoy accepts no other headers there.
Headers are set and removed by name, and otherwise stay as they are. A body is changed only in
dialect A, as `extproc.requests.edits` and the features that write say.

A response may begin at any time, even before the request has ended: its headers are read, and it
passes unchanged.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import ClassVar

import msgspec

from extproc._core import Budget
from extproc.base import headers
from extproc.base.errors import ProtocolError
from extproc.pb.kvsteer_ext_proc_pb2 import ProcessingMode, ProcessingRequest
from extproc.requests.added_fields import Body
from extproc.requests.engine_paths import EnginePaths
from extproc.requests.refusals import Refusal
from extproc.requests.request import (
    NO_HEAD,
    NOT_INFERENCE,
    Head,
    LearnedPaths,
    RoutingRequest,
    may_compute,
)
from extproc.serving import stream_answers
from extproc.serving.naming_headers import NO_NAMES, NamingHeaders
from extproc.serving.proxy_decoder import head_of
from extproc.serving.proxy_message import (
    NAMES,
    NO_KIND,
    OF_RESPONSES,
    REQUEST_BODY,
    REQUEST_HEADERS,
    REQUEST_TRAILERS,
    RESPONSE_HEADERS,
    RESPONSE_TRAILERS,
    TEXT_BYTES,
    ProxyMessage,
    number_of,
)
from extproc.serving.stream_answers import AnswerCache, Answers, HeaderValues, PickAnswer

# Most decimal digits of a status.
_STATUS_DIGITS = 3

_AUDIO = "/v1/audio/"

# Media types of responses that may carry usage (OpenAI's, Anthropic's and SGLang's APIs).
JSON = "application/json"
EVENTS = "text/event-stream"


class ResponseHead(msgspec.Struct, frozen=True, gc=False):
    """The parts of a response's headers that accounting uses.

    status: None if unreadable. is_readable: whether the body may report usage: JSON or server-sent
    events, not compressed. served: ip:port of the endpoint that sent it, "" if unknown.
    """

    status: int | None
    is_readable: bool = False
    served: str = ""


def response_head_of(message: ProxyMessage) -> ResponseHead:
    """Returns the parts of a response's headers that accounting uses."""
    texts = message.headers
    status = texts.get(":status")
    media_type = texts.get("content-type", "").partition(";")[0].strip().lower()
    is_plain = texts.get("content-encoding", "").strip().lower() in ("", "identity")
    return ResponseHead(
        None if status is None else number_of(status, _STATUS_DIGITS),
        is_plain and media_type in (JSON, EVENTS),
        "" if message.context is None else _served(message.context),
    )


def _served(context: ProcessingRequest) -> str:
    """Returns the endpoint that answered, "" if unknown.

    The proxy reports it as in the Endpoint Picker Protocol 1.0.0, or in an attribute of Envoy's.
    """
    if context.HasField("metadata_context"):
        namespace = context.metadata_context.filter_metadata.get(headers.DESTINATION_NAMESPACE)
        if namespace is not None and headers.SERVED in namespace.fields:
            return namespace.fields[headers.SERVED].string_value
    told = context.attributes.get(headers.ATTRIBUTES)
    if told is None or headers.UPSTREAM not in told.fields:
        return ""
    return told.fields[headers.UPSTREAM].string_value[:TEXT_BYTES]


# Smaller pieces are joined, this many at a time: a client may send single bytes, and a one-byte
# piece takes 40 bytes of memory. The joined piece fits into one echo
# (stream_answers.MAX_ECHO_BYTES).
SMALL_BYTES = 960
SMALL_PIECES = 64


class CollectedBody:
    """The pieces of one request body, in order.

    budget: the limit of bytes for all bodies together."""

    def __init__(self, budget: Budget) -> None:
        self.size_bytes = 0
        self._budget = budget
        self._taken_bytes = 0
        self._pieces: list[bytes] = []
        self._small: list[bytes] = []

    def add(self, piece: bytes) -> bool:
        """Keeps the next piece; returns False if it exceeds the budget: then release it soon."""
        self.size_bytes += len(piece)
        has_room = self._budget.take(len(piece))
        if has_room:
            self._taken_bytes += len(piece)
        self._keep(piece)
        return has_room

    def _keep(self, piece: bytes) -> None:
        if len(piece) < SMALL_BYTES:
            self._small.append(piece)
            if len(self._small) == SMALL_PIECES:
                self._join_small()
            return
        self._join_small()
        self._pieces.append(piece)

    def join(self) -> bytes:
        """Returns the whole body; copies it only if it has more than one piece."""
        self._join_small()
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    def take(self) -> list[bytes]:
        """Returns the pieces of the body, and forgets them."""
        self._join_small()
        pieces, self._pieces = self._pieces, []
        self.size_bytes = 0
        self._budget.give_back(self._taken_bytes)
        self._taken_bytes = 0
        return pieces

    def _join_small(self) -> None:
        if self._small:
            joined = b"".join(self._small)
            self._small.clear()
            if joined:
                self._pieces.append(joined)


class StreamState(StrEnum):
    """The states of the table above, in the words that errors use."""

    HEAD = "before the request headers"
    BODY = "while the request body is awaited"
    ROUTING = "before the previous message was answered"
    PLACED = "after the pick"
    ENDED = "after the end of the request"
    REFUSED = "after the router refused the request"


# Naming a member through its class is a search, which every request would make several times.
_HEAD, _BODY, _ROUTING = StreamState.HEAD, StreamState.BODY, StreamState.ROUTING
_PLACED, _ENDED = StreamState.PLACED, StreamState.ENDED

Step = Answers | RoutingRequest
_Row = Callable[["Stream", ProxyMessage], Step]

_DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED
_GRPC = ProcessingMode.GRPC


# The headers that every stream reads, of requests and of responses.
_READ_HEADERS = frozenset(
    (
        ":method",
        ":path",
        "content-length",
        headers.TRACEPARENT,
        headers.REQUEST_ID,
        ":status",
        "content-type",
        "content-encoding",
    )
)


def _note_nothing(_: str) -> None:
    """Notes no path."""


class StreamSettings(msgspec.Struct, frozen=True):
    """Settings of all streams of a server.

    max_body_bytes: a longer body is collected only up to this, or not requested at all if its
    content-length says so. bodies: the limit for the bodies of all streams together; a body that
    exceeds it counts as too long.
    policy_header: the request header that may name a policy, in lower case; None without one.
    naming: those with names that clients give.
    dialect: `extproc.dialect`: "buffered" refuses dialect B, "epp" uses it with a proxy that
    declares no mode.
    reads_usage: whether to request, in dialect A, the bodies of responses that may report usage.
    cleans: whether bodies are cleaned of fields that no client may set.
    answer_cache: the answers that most streams get, and the headers that only the router may set.
    learned: the paths on which a model computes, though no API of theirs is known. paths: finds
    those that engines see. note_unrecognized: called with the path of a request with a body that
    may be a model's call, but is no known one.
    """

    max_body_bytes: int
    bodies: Budget
    policy_header: str | None = None
    naming: NamingHeaders = NO_NAMES
    dialect: str = "auto"
    reads_usage: bool = False
    cleans: bool = False
    answer_cache: AnswerCache = msgspec.field(default_factory=AnswerCache)
    learned: LearnedPaths = msgspec.field(default_factory=LearnedPaths)
    paths: EnginePaths = EnginePaths()
    note_unrecognized: Callable[[str], None] = _note_nothing

    def header_names(self) -> frozenset[str]:
        """Returns the headers that a stream reads, in lower case."""
        named = self.naming.all if self.policy_header is None else {self.policy_header}
        return _READ_HEADERS | self.naming.all | named


class Stream:
    """One HTTP request on its way through Envoy.

    wants_status: whether to request this response's headers in dialect A, if Envoy would not send
    them; needs allow_mode_override, and a proxy that declares its modes.
    is_duplex: whether dialect B is used; in it, a request that cannot be placed must be refused.
    has_more_time: whether Envoy waits longer for the answer to the `RoutingRequest`.
    head: of the request, an empty one before it arrived. response_head: None until the response's
    headers arrive.
    """

    # What few streams look at belongs to the class, since every request makes a stream.
    response_head: ResponseHead | None = None
    response_values: HeaderValues = ()
    is_duplex = False
    has_more_time = False
    _echoes_response = False
    _mode: int = ProcessingMode.BUFFERED
    _announced_mode: int | None = None
    _asked_with = NO_KIND
    _is_last = False

    def __init__(self, settings: StreamSettings, *, wants_status: bool = False) -> None:
        self.state = _HEAD
        self.head = NO_HEAD
        self._collected: CollectedBody | None = None  # used in dialect B only
        self._unkeyed = ""  # why a body that is cleaned has no keys
        self._settings = settings
        self._wants_status = wants_status
        self._reads_usage = settings.reads_usage
        if settings.dialect == "epp":
            self.is_duplex = self._echoes_response = True
            self._mode = _DUPLEX

    def receive(self, message: ProxyMessage) -> Step:
        """Handles one message from Envoy; returns the answers, or the request to be placed.

        Raises:
            ProtocolError: the message is out of order, or sets an unsupported body mode.
        """
        if message.modes is not None:
            self._learn_modes(*message.modes)
        row = self._rows.get((self.state, message.kind))
        return self._other(message) if row is None else row(self, message)

    def _other(self, message: ProxyMessage) -> Step:
        """Handles a message of the response, which may come in any state, or a wrong one."""
        kind = message.kind
        if kind in OF_RESPONSES:
            return self._response(message)
        if kind == NO_KIND:
            raise ProtocolError("message without a request")
        name = next(name for name, one in NAMES.items() if one == kind)
        raise ProtocolError(f"{name.replace('_', ' ')} {self.state.value}")

    @property
    def reads_usage(self) -> bool:
        """Whether the response's body is to be read for its usage."""
        return self._reads_usage

    def place(self, answer: PickAnswer) -> Answers:
        """Returns the answers that carry the pick for the last `RoutingRequest`."""
        settings = self._settings
        self.state = _ENDED if self.is_duplex and self._is_last else _PLACED
        if self._asked_with == REQUEST_BODY and not self.is_duplex:
            return settings.answer_cache.body_placed(answer)
        common = stream_answers.pick_of(answer, settings.answer_cache.owned)
        if answer.body is not None:
            stream_answers.announce_length(common, len(answer.body))
        if self._asked_with == REQUEST_HEADERS or self.is_duplex:
            without_body = not self._is_last and not self.is_duplex
            may_ask = self._announced_mode is not None and not self.is_duplex
            first = stream_answers.headers_placed(
                common,
                without_body=without_body,
                with_response=may_ask and self._wants_status,
            )
        else:
            first = stream_answers.request_trailers_go_on()
        answers = stream_answers.encoded(stream_answers.with_metadata(first, answer))
        if self.is_duplex and self._asked_with != REQUEST_HEADERS:
            answers += self._collected_echo(answer.body)
        return answers

    def more_time(self, seconds: float) -> Answers | None:
        """Returns what has Envoy wait so long for the pick; None if it does not wait.

        Envoy takes one such message for each of its own. In dialect B it has no timer, so it waits
        without.
        """
        if self.has_more_time or self.state is not _ROUTING:
            return None
        self.has_more_time = True
        return [] if self.is_duplex else [stream_answers.more_time(seconds)]

    def refuse(self, refusal: Refusal) -> Answers:
        """Returns the answer that refuses the request of the last `RoutingRequest`."""
        self.state = StreamState.REFUSED
        self.close()
        return stream_answers.encoded(stream_answers.refused(refusal))

    def close(self) -> None:
        """Releases the memory of the request's body."""
        if self._collected is not None:
            self._collected.take()

    def _learn_modes(self, request_mode: int, response_mode: int) -> None:
        """Takes the body modes, which only a stream's first message has (ProtocolConfiguration)."""
        self._mode = self._announced_mode = request_mode
        self.is_duplex = request_mode == _DUPLEX
        self._echoes_response = response_mode == _DUPLEX
        if request_mode >= _DUPLEX or response_mode >= _DUPLEX:
            self._check_modes(request_mode, response_mode)

    def _check_modes(self, *modes: int) -> None:
        if _GRPC in modes:
            raise ProtocolError("body mode GRPC is not supported, use BUFFERED")
        if self._settings.dialect == "buffered" and _DUPLEX in modes:
            raise ProtocolError("FULL_DUPLEX_STREAMED is refused: extproc.dialect is buffered")

    def _ask(self, kind: int, body: bytes | None, reason: str = "") -> RoutingRequest:
        self.state = _ROUTING
        self._asked_with = kind
        finds_model = self._settings.answer_cache.names_model and not self.is_duplex
        has_more = kind == REQUEST_BODY or not self._is_last
        return RoutingRequest(
            self.head,
            body,
            reason,
            finds_model,
            wants_endpoint=self.is_duplex,
            is_unread=body is None and has_more and self._is_cleaned(self.head),
        )

    def _request_headers(self, message: ProxyMessage) -> Step:
        settings = self._settings
        head = message.head
        if head is None:
            head = head_of(message, settings.policy_header, settings.naming)
        self.head = head
        self._is_last = message.is_last
        learned = settings.learned
        unkeyed = learned.why_unkeyed(head.method, head.path)
        if unkeyed:
            head, unkeyed = self._seen_by_engine(head, unkeyed)
        unread = self._reason_without_body(head)
        reason = unkeyed or unread
        if unkeyed and not unread and self._is_cleaned(head):
            self._unkeyed, reason = unkeyed, ""
        if reason:
            return self._ask(REQUEST_HEADERS, None, reason)
        self.state = _BODY
        if self.is_duplex:
            return []
        return self._settings.answer_cache.go_on(
            self._announced_mode if self._wants_status else None
        )

    def _seen_by_engine(self, head: Head, unkeyed: str) -> tuple[Head, str]:
        """Returns a head with the path that the engine sees, and why its body is not needed.

        unkeyed: why that is so by the path that the client used.
        """
        settings = self._settings
        path = settings.paths.seen(head.path)
        if path != head.path:
            self.head = head = msgspec.structs.replace(head, path=path)
            unkeyed = settings.learned.why_unkeyed(head.method, path)
        if not unkeyed:
            return head, ""
        is_unknown = unkeyed == NOT_INFERENCE
        if is_unknown and not self._is_last and may_compute(head.method, path):
            settings.note_unrecognized(path)
        self._reads_usage &= is_unknown and settings.learned.may_learn(head.method, path)
        self._wants_status &= not is_unknown
        return head, unkeyed

    def _is_cleaned(self, head: Head) -> bool:
        """Returns whether a body may be changed, whoever may read it; those of audio are forms."""
        if self.is_duplex or not self._settings.cleans or head.path.startswith(_AUDIO):
            return False
        return may_compute(head.method, head.path)

    def _reason_without_body(self, head: Head) -> str:
        """Returns why a request is placed on its headers, "" if its body is needed."""
        if self._is_last:
            return "no_body"
        if head.content_length is not None and head.content_length > self._settings.max_body_bytes:
            return "body_too_large"
        is_read = self.is_duplex or self._mode in stream_answers.WHOLE_BODY_MODES
        return "" if is_read else "body_not_buffered"

    def _request_body(self, message: ProxyMessage) -> Step:
        if self.is_duplex:
            return self._collect(message)
        body, length = message.body, self.head.content_length
        if len(body) > self._settings.max_body_bytes:
            return self._ask(REQUEST_BODY, None, self._unkeyed or "body_too_large")
        if length is not None and len(body) < length and not message.is_last:
            # BUFFERED_PARTIAL
            return self._ask(REQUEST_BODY, None, self._unkeyed or "body_not_buffered")
        return self._ask(REQUEST_BODY, body, self._unkeyed)

    def _collect(self, message: ProxyMessage) -> Step:
        self._is_last = message.is_last
        body = self._collected
        if body is None:
            body = self._collected = CollectedBody(self._settings.bodies)
        has_room = body.add(message.body)
        if not has_room or body.size_bytes > self._settings.max_body_bytes:
            return self._ask(REQUEST_BODY, None, "body_too_large")
        return self._ask(REQUEST_BODY, body.join()) if self._is_last else []

    def _collected_echo(self, extended: Body | None) -> Answers:
        """Returns the echo of the body. extended: another one in its place, None for none."""
        pieces = self._collected.take() if self._collected is not None else []
        if extended is not None:
            pieces = [bytes(extended)]
        if self._is_last and self._asked_with == REQUEST_BODY:
            *before, last = pieces or [b""]
        else:
            before, last = pieces, None
        answers = [
            *[
                one
                for piece in before
                for one in stream_answers.request_body_echo(piece, end_of_stream=False)
            ],
            *(() if last is None else stream_answers.request_body_echo(last, end_of_stream=True)),
        ]
        if self._asked_with == REQUEST_TRAILERS:
            answers.append(stream_answers.request_trailers_go_on())
        return stream_answers.encoded(*answers)

    def _request_body_after_pick(self, message: ProxyMessage) -> Step:
        if not self.is_duplex:
            return stream_answers.encoded(stream_answers.request_body_goes_on())
        if message.is_last:
            self.state = _ENDED
        return stream_answers.encoded(
            *stream_answers.request_body_echo(message.body, end_of_stream=message.is_last)
        )

    def _request_body_after_end(self, _: ProxyMessage) -> Step:
        return (
            [] if self.is_duplex else stream_answers.encoded(stream_answers.request_body_goes_on())
        )

    def _request_trailers_with_pick(self, _: ProxyMessage) -> Step:
        """Handles trailers before the body's end is known; in dialect A, there is no body then."""
        self._is_last = True
        if self._collected is not None and self._collected.size_bytes:
            return self._ask(REQUEST_TRAILERS, self._collected.join())
        return self._ask(REQUEST_TRAILERS, None, "no_body")

    def _request_trailers_after_pick(self, _: ProxyMessage) -> Step:
        self.state = _ENDED
        return stream_answers.encoded(stream_answers.request_trailers_go_on())

    def _request_trailers_alone(self, _: ProxyMessage) -> Step:
        return stream_answers.encoded(stream_answers.request_trailers_go_on())

    def _nothing(self, _: ProxyMessage) -> Step:
        return []

    def _response(self, message: ProxyMessage) -> Answers:
        """Returns the answers that let a message of the response pass unchanged."""
        if message.kind == RESPONSE_HEADERS:
            self.response_head = head = response_head_of(message)
            may_tell = head.is_readable and not message.is_last
            read_body = self._reads_usage and may_tell and not self._echoes_response
            return stream_answers.encoded(
                stream_answers.response_headers_go_on(self.response_values, read_body=read_body)
            )
        if message.kind == RESPONSE_TRAILERS:
            return stream_answers.encoded(stream_answers.response_trailers_go_on())
        if not self._echoes_response:
            return stream_answers.encoded(stream_answers.response_body_goes_on())
        return stream_answers.encoded(
            *stream_answers.response_body_echo(message.body, end_of_stream=message.is_last)
        )

    _rows: ClassVar[Mapping[tuple[StreamState, int], _Row]] = {
        (StreamState.HEAD, REQUEST_HEADERS): _request_headers,
        (StreamState.HEAD, REQUEST_TRAILERS): _request_trailers_alone,
        (StreamState.BODY, REQUEST_BODY): _request_body,
        (StreamState.BODY, REQUEST_TRAILERS): _request_trailers_with_pick,
        (StreamState.PLACED, REQUEST_BODY): _request_body_after_pick,
        (StreamState.PLACED, REQUEST_TRAILERS): _request_trailers_after_pick,
        (StreamState.ENDED, REQUEST_BODY): _request_body_after_end,
        (StreamState.REFUSED, REQUEST_BODY): _nothing,
        (StreamState.REFUSED, REQUEST_TRAILERS): _nothing,
    }
