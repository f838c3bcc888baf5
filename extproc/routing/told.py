"""What another router tells of its own requests, and how it is counted in the workers' records.

It tells of the same workers again and again. Where a C compiler was at hand at installation, the
core reads its figures from the message (extproc/native/figures.c), and counts all but its first
ones of a worker (told.c), in one call for each message. Tests hold both equal to the decoder of
`WorkerNews` and to `Loads.record_report`, to the last bit.
"""

from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Protocol, TypeAlias

import msgspec

from extproc.base.compiled import compiled_or
from kvstate.undecodable import UNDECODABLE

# Most workers of one message.
MAX_WORKERS = 256

# Where a worker is, and anything else.
Place = tuple[str, Any]

# The time, the configured tokens per second, the window in seconds, and the most tokens that may
# count as sent in it, as in `extproc.routing.load_numbers.PlainNumbers.share`.
Rules = tuple[float, float, float, float]

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**50)]


class GaugesOf(Protocol):
    """`extproc.routing.load.Gauges`, or a message with the same attributes, which need not be
    copied.
    """

    @property
    def in_flight(self) -> int:
        """See `Gauges`, also for the others."""

    @property
    def booked_tokens(self) -> int:
        """Tokens of the requests in flight."""

    @property
    def sent_tokens(self) -> int:
        """Tokens of all requests so far."""

    @property
    def backlog_tokens(self) -> int:
        """Tokens in the queue."""

    @property
    def lately_tokens(self) -> int:
        """Tokens sent lately."""


class WorkerNews(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A worker, and the load that the sender's own requests put on it; see `Gauges`."""

    worker: _Number
    in_flight: _Count
    booked_tokens: _Tokens
    sent_tokens: _Tokens
    backlog_tokens: _Tokens
    lately_tokens: _Tokens


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[tuple[WorkerNews, ...]] = msgspec.msgpack.Decoder(
    Annotated[tuple[WorkerNews, ...], msgspec.Meta(max_length=MAX_WORKERS)]
)


def encoded_figures(news: Sequence[WorkerNews]) -> msgspec.Raw:
    """Returns figures of workers as a part of a message."""
    return msgspec.Raw(_encoder.encode(news))


NO_FIGURES = encoded_figures(())


def decoded_figures(told: msgspec.Raw) -> tuple[WorkerNews, ...]:
    """Returns the figures in a part of a message.

    Raises:
        UNDECODABLE: it is something else.
    """
    return _decoder.decode(told)


def are_figures(told: msgspec.Raw) -> bool:
    """Returns whether a part of a message, which may be anything, has figures within bounds."""
    return are_plain_figures(told) or _are_decoded(told)


def _are_decoded(told: msgspec.Raw) -> bool:
    try:
        decoded_figures(told)
    except UNDECODABLE:
        return False
    return True


# The last figures of a router that were counted for a worker: its requests in flight, their booked
# tokens, and the tokens of all that it sent; of 64 bits each, and changed in place.
Counted: TypeAlias = "array[int]"
IN_FLIGHT, BOOKED_TOKENS, SENT_TOKENS = range(3)
NOTHING_COUNTED: Counted = array("q", (0, 0, 0))


def counted(gauges: GaugesOf) -> Counted:
    """Returns figures that are counted now."""
    return array("q", (gauges.in_flight, gauges.booked_tokens, gauges.sent_tokens))


def none_are_plain(_: msgspec.Raw, /) -> bool:
    """Returns whether figures have been read without their decoder: none have."""
    return False


def none_are_counted(_told: msgspec.Raw, *_: object) -> list[int] | None:
    """Returns the positions of figures that are left to `Loads.record_report`; None: of all."""
    return None


are_plain_figures = compiled_or("are_plain_figures", none_are_plain)
count_later = compiled_or("count_later", none_are_counted)
