"""The interface of a session: the gRPC calls of one connection, bytes in, messages and bytes out.

It has two implementations, chosen at import: `extproc/native/` has the compiled one, and
`extproc.http2.plain_session` the same in Python. Tests compare both, event by event and byte by
byte.
"""

from collections.abc import Callable
from dataclasses import astuple
from typing import Protocol

from extproc.http2.call_events import CallEvent
from extproc.http2.grpc_messages import LongMessage
from extproc.http2.limits import Limits, SharedBudget
from extproc.http2.plain_session import PlainSessions
from extproc.http2.reading import Reading

try:
    from extproc._core import CompiledBudget, CompiledSession
except ImportError:  # there was no C compiler at installation
    IS_COMPILED = False
else:
    IS_COMPILED = True


class Session(Protocol):
    """The calls of one connection.

    It refuses requests that are no gRPC calls, or compressed. What it keeps of a call it takes from
    the budget, and for the call itself 1 KiB, or 4 KiB from its first message on. After `receive`,
    and after sending, the caller must `send`, and sooner or later write `data_to_send`, while
    anything is unsent.
    """

    @property
    def fault(self) -> tuple[int, str] | None:
        """Why the connection must end: the error code (RFC 9113, section 7) and a text."""

    @property
    def is_due(self) -> bool:
        """Whether the peer waits for any of the data to send."""

    @property
    def has_unsent(self) -> bool:
        """Whether there is data to send now."""

    @property
    def is_over(self) -> bool:
        """Whether no stream is open, and no new one can come."""

    @property
    def stream_count(self) -> int:
        """The number of open streams."""

    def receive(self, data: bytes, /) -> list[CallEvent]:
        """Takes bytes of the peer, and returns what happened; sets `fault` if it must end."""

    def data_to_send(self) -> bytes:
        """Returns the bytes to write now; call it until there are none."""

    def send(self, write: Callable[[bytes], None], /) -> int:
        """Writes what can be sent, a MiB at most, if any of it is due; returns what is left to do.

        write: called with bytes, up to four times. What is left: bits of
        `extproc.http2.leftovers`.
        """

    def answer(self, stream_id: int, message: bytes | LongMessage, /) -> int:
        """Sends one message of an answer; returns how many bytes of it wait for the peer.

        Returns -1 if the call is gone, or there was no room to keep the message. The body of a long
        one is not copied, but held until it was sent.
        """

    def finish(self, stream_id: int, status: int, text: str, /) -> None:
        """Ends a call with a gRPC status; does nothing if it is gone."""

    def queued(self, stream_id: int, /) -> int:
        """Returns how many bytes of an answer wait for the peer."""

    def hold(self, stream_id: int, /) -> None:
        """Lets the peer send no more of a request than its window allows now."""

    def unhold(self, stream_id: int, /) -> None:
        """Lets the peer send more again."""

    def pause_sending(self) -> None:
        """Holds messages back because the transport is full."""

    def resume_sending(self) -> None:
        """Sends messages again because the transport has room."""

    def drain(self) -> None:
        """Accepts no new streams and sends GOAWAY; open streams continue."""

    def tick(self) -> list[CallEvent]:
        """Called every 5 s: resets the flood counts; returns the calls that stalled too long."""

    def close(self) -> None:
        """Forgets all calls of a lost connection, and gives back what they took of the budget."""


class Sessions(Protocol):
    """Opens the sessions of a server. budget: of all of them together."""

    @property
    def budget(self) -> SharedBudget:
        """The limit of kept bytes."""

    def open(self, share: SharedBudget | None = None) -> Session:
        """Returns the session of a new connection, which has its greeting to send.

        share: its peer's, of `budget`; None for a peer that may take all.
        """


class CompiledSessions:
    """Opens compiled sessions."""

    def __init__(
        self, limits: Limits, max_message_bytes: int, max_bytes: int, reading: Reading | None = None
    ) -> None:
        self.budget = CompiledBudget(max_bytes)
        self._reading = reading
        self._limits = astuple(limits)
        self._max_message_bytes = max_message_bytes

    def open(self, share: SharedBudget | None = None) -> Session:
        """Returns the session of a new connection."""
        budget = self.budget if share is None else share
        return CompiledSession(self._limits, self._max_message_bytes, budget, self._reading)


def make_sessions(
    limits: Limits,
    max_message_bytes: int,
    max_bytes: int,
    reading: Reading | None = None,
    *,
    compiled: bool = IS_COMPILED,
) -> Sessions:
    """Returns the sessions of a server.

    max_message_bytes: longest message of a request. max_bytes: of the budget. reading: which
    messages the sessions read; None for none.
    """
    kind = CompiledSessions if compiled else PlainSessions
    return kind(limits, max_message_bytes, max_bytes, reading)
