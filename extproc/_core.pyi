from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from msgspec import Raw

from extproc.http2.call_events import CallEvent
from extproc.http2.messages import LongMessage
from extproc.http2.reading import Reading
from extproc.routing.claim_table import Expected, Lifetimes, PlainMarkTable
from extproc.routing.claims import Beyond, Claims
from extproc.routing.load import Rates
from extproc.routing.load_columns import LoadColumns
from extproc.routing.load_numbers import PlainNumbers, PlainPace
from extproc.routing.told import Place, Rules
from kvstate.overlap import Overlap, Tokens

class Budget:
    """A limit of bytes for all together: unfinished messages, and answers that peers do not read.

    A share of it is what one peer takes: at most three times what is then left to the others. So
    a lone one may take three quarters, each of two that take all they can get three sevenths, and
    nobody the last byte.
    """

    def __new__(cls, max_bytes: int, /) -> Self: ...
    @property
    def max_bytes(self) -> int:
        """The most bytes."""

    @property
    def used_bytes(self) -> int:
        """The reserved bytes."""

    def take(self, size: int, /) -> bool:
        """Reserves bytes; returns False, and reserves none, if there is no room for them."""

    def give_back(self, size: int, /) -> None:
        """Frees bytes that were reserved."""

    def share(self) -> Budget:
        """Returns the share of one peer, which has nothing yet."""

class Session:
    """The gRPC calls of one connection.

    It refuses requests that are no gRPC calls, or compressed. What it keeps of a call it takes from
    the budget, and for the call itself 1 KiB, or 4 KiB from its first message on. After `receive`,
    and after sending, the caller must `send`, and sooner or later write `data_to_send`, while
    anything is unsent.

    limits: the values of `extproc.http2.limits.Limits`, in its order.
    """

    def __new__(
        cls,
        limits: tuple[int, ...],
        max_message_bytes: int,
        budget: Budget,
        reading: Reading | None,
        /,
    ) -> Self: ...
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

def header_fields(block: bytes, /) -> list[tuple[bytes, bytes]]:
    """Returns the names and values that a header block encodes which needs no table (RFC 7541).

    Raises:
        ValueError: it cannot be decoded, or has more than 32 KiB of fields.
    """

class Decoder:
    """Decodes messages of a proxy, and gives up those that it is not sure of.

    record: the class of what it returns, `extproc.serving.proxy_message.ProxyMessage`. names: of
    the headers that are read, in lower case. every: those of which every value is read. head: the
    class of a request's head, the header that may name a policy or "", and those that name sessions
    and conversations; None if heads are made elsewhere.
    """

    def __new__(
        cls,
        record: type,
        names: tuple[str, ...],
        every: tuple[str, ...],
        head: tuple[type, str, tuple[str, ...], tuple[str, ...]] | None,
        /,
    ) -> Self: ...
    def decode(self, message: bytes, /) -> Any:
        """Returns what a message says, its context as bytes of it; None if it gives up."""

    def read(self, message: bytes, /) -> Any:
        """Returns what a message without a context says; None if it gives up."""

def CompiledColumns(  # noqa: N802
    load: type, endpoints: dict[str, Any], workers: Sequence[Any], now: float, rates: Rates, /
) -> LoadColumns: ...

class CompiledPace(PlainPace): ...
class CompiledNumbers(PlainNumbers): ...
class CompiledMarkTable(PlainMarkTable): ...

def chained(
    key: Callable[[memoryview, int], int],
    view: memoryview,
    parts: tuple[slice, ...],
    root: int,
    /,
) -> bytes: ...
def expected(
    old: PlainMarkTable,
    young: PlainMarkTable,
    lengths: Sequence[int],
    keys: bytes,
    now: float,
    lifetimes: Lifetimes,
    /,
) -> dict[str, Expected]: ...
def weighed(
    held: Sequence[Mapping[str, Overlap]],
    expected: Sequence[Mapping[str, Expected]],
    unsure: float,
    worth: Callable[[Overlap, float], float],
    claims: type[Claims],
    /,
) -> tuple[dict[str, Claims], list[Beyond]]: ...
def held_tokens(name: str, overlaps: Sequence[Mapping[str, Overlap]], /) -> tuple[int, int]: ...
def count_later(
    told: Raw,
    places: Mapping[int, Place],
    endpoints: Mapping[str, Any],
    router: str,
    rules: Rules,
    /,
) -> list[int] | None: ...
def are_plain_figures(told: Raw, /) -> bool: ...
def bucketed(
    bounds: tuple[float, ...], starts: tuple[float, ...], ends: tuple[float, ...], /
) -> tuple[list[int], float]: ...
def drawn(places: Sequence[int], count: int, random: Callable[[], float], /) -> list[int]: ...
def lowest(
    ranks: Sequence[float] | Sequence[tuple[float, float]],
    count: int,
    random: Callable[[], float],
    /,
) -> list[int] | None: ...
def plain_chat(
    body: bytes, limited: bytes, /
) -> tuple[str | None, str | None, bytes, bytes] | None: ...
def turn_texts(
    body: bytes,
    spans: bytes,
    new: list[int],
    before: tuple[str, ...],
    behind: tuple[str, ...],
    /,
) -> list[str | None]: ...

class TurnTable:
    def __new__(cls, max_bytes: int, secret: bytes, /) -> Self: ...
    def find(
        self, body: bytes, spans: bytes, shapes: bytes, /
    ) -> tuple[list[Tokens | bytes], list[int]]: ...
    def keep(
        self, parts: list[Tokens | bytes], new: list[int], shapes: bytes, made: list[Tokens], /
    ) -> None: ...
