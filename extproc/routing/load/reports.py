"""What another router tells of its own requests, and how it is counted in the workers' records."""

from typing import Annotated, Any, Protocol

import msgspec

# Most workers of one message.
MAX_WORKERS = 256

# What a router reports of its requests: their number and tokens, in the order of `Gauges`
# (`extproc.routing.load.loads`).
ReportedGauges = tuple[int, int, int, int, int]

# Where a worker is, and anything else.
Place = tuple[str, Any]

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**50)]


class GaugesOf(Protocol):
    """`extproc.routing.load.loads.Gauges`, or a message with the same attributes, which need not be
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


class WorkerLoadReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A worker, and the load that the sender's own requests put on it; see `Gauges`."""

    worker: _Number
    in_flight: _Count
    booked_tokens: _Tokens
    sent_tokens: _Tokens
    backlog_tokens: _Tokens
    lately_tokens: _Tokens
