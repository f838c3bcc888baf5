import builtins
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, overload

from extproc.config.schema import Cost
from extproc.http2.call_events import CallEvent
from extproc.http2.messages import LongMessage
from extproc.http2.method_decoder import MethodDecoder
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.claims.claim_table import (
    Claim,
    Costs,
    Expected,
    Holdings,
    Lifetimes,
    ReportedBounds,
    ReportedClaim,
    ReportedCounts,
    ReportedPlaces,
)
from extproc.routing.claims.marks import HasMarks
from extproc.routing.load.endpoint_load import EndpointLoad
from extproc.routing.load.loads import Load, Rates
from extproc.routing.load.reports import ReportedGauges
from kvstate.overlap import Tokens

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
        reading: MethodDecoder | None,
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

# --- the arithmetic of a decision (columns.c, survey.c): tests/oracles/routing has it in Python ---

# The loads of the compared workers, a row for each, in their order.
class LoadColumns:
    # load_class: Load. endpoints: the records by ip:port; a worker without one is idle. rates:
    # those of `Loads`.
    @overload
    def __new__(
        cls,
        load_class: type[Load],
        endpoints: dict[str, EndpointLoad],
        workers: Sequence[Candidate],
        now: float,
        rates: Rates,
        /,
    ) -> Self: ...
    # Of loads that are known already.
    @overload
    def __new__(cls, loads: Sequence[Load], /) -> Self: ...
    def __len__(self) -> int: ...
    def __getitem__(self, at: int, /) -> Load: ...
    def __iter__(self) -> Iterator[Load]: ...
    # Returns the weight of an uncached token, by the mean utilization of the first workers, and
    # their shortest queue: tokens of a slow worker count as many times as it is slower. count: of
    # them.
    def affinity(self, count: int, cost: Cost, /) -> float: ...
    # Returns what each of the workers costs, in tokens. saved: the tokens of the prompt by which
    # they are preferred, by name. weighed: of the whole prompt. affinity: the weight of each.
    # running: tokens for each request in flight.
    def costs(
        self,
        workers: Sequence[Candidate],
        saved: Mapping[str, float],
        weighed: float,
        affinity: float,
        running: float,
        /,
    ) -> list[float]: ...
    # Returns the requests on each, other routers' and reported ones included.
    def requests(self) -> list[float]: ...
    # Returns how many times slower than configured each is.
    def slowness(self) -> list[float]: ...

# Returns the load of one endpoint, as a row of `LoadColumns`.
def load_of(
    load_class: type[Load],
    endpoints: dict[str, EndpointLoad],
    endpoint: str,
    now: float,
    rates: Rates,
    /,
) -> Load: ...

# Returns how many live tokens the new ones of a prompt are expected to evict on each worker. An
# added token evicts one with the square of the share of the cache that is occupied as the chance,
# certainly once all of it is; where the capacity is 0, none. occupied: the live tokens on each.
# saved, weighed: as for `LoadColumns.costs`. shared: of the prompt, those that are counted among
# the live ones.
def evicted(
    workers: Sequence[Candidate],
    saved: Mapping[str, float],
    occupied: list[float],
    capacities: list[float],
    weighed: float,
    shared: float,
    /,
) -> list[float]: ...

# Returns `count` of these places, in the order in which they are drawn. One number of `random` is
# the seed of all, since asking for each would cost more than the rest of a draw.
def drawn(places: Sequence[int], count: int, random: Callable[[], float], /) -> list[int]: ...

# Returns the indices of the lowest ranks, at most `count`; ties are broken at random. Without ties
# among them, no random number is drawn.
def lowest(ranks: list[float], count: int, random: Callable[[], float], /) -> list[int]: ...

# --- the numbers of a load (numbers.c) ---

# How fast a worker computes. slowness: how many times as long as configured a prompt takes. pace:
# how many times as fast as configured its queue shrinks. is_even: whether it counts as average.
class Pace:
    slowness: float
    pace: float
    is_even: bool

# The numbers of one endpoint. Times are seconds of one clock; now: the time. rate: the configured
# tokens per second. window: seconds in which what was sent fades.
#
# in_flight: its requests. backlog_tokens: the estimated queue at backlog_at, in prompt tokens;
# lately_tokens: those sent lately, older ones counting less, at the same time. booked_tokens: of
# requests not known to be computed; sent_tokens: of all so far. ahead_tokens: other routers', since
# this router's last request whose end of computing is announced: the next such request waits for
# them. shared, shared_tokens: requests and booked tokens of routers that share. others,
# excess_tokens: requests and tokens beyond those that its worker reported at asked_at.
class LoadNumbers:
    in_flight: int
    shared: int
    shared_tokens: int
    backlog_tokens: float
    backlog_at: float
    lately_tokens: float
    booked_tokens: float
    sent_tokens: float
    ahead_tokens: float
    others: float
    excess_tokens: float
    asked_at: float
    def __new__(cls, pace: Pace, /) -> Self: ...
    # Returns the uncached tokens of known requests that are probably not computed yet.
    def backlog(self, now: float, rate: float, /) -> float: ...
    # Returns the uncached tokens sent lately, older ones counting less.
    def lately(self, now: float, window: float, /) -> float: ...
    # Adds a request with so many uncached tokens; returns the tokens queued before it.
    def begin(self, tokens: float, now: float, rate: float, window: float, /) -> float: ...
    # Removes a request's tokens from the booked ones. is_last: whether no other is queued; then
    # rounding errors of the running sum end.
    def leave(self, tokens: float, is_last: bool, /) -> None: ...
    # Removes a request in flight.
    def end(self, now: float, rate: float, window: float, /) -> None: ...
    # Sets the estimate of the queue, to at most the tokens not known to be computed.
    def bound(self, backlog: float, now: float, window: float, /) -> None: ...
    # Returns what this router tells others of its own requests, as `Gauges`.
    def reported(self, now: float, rate: float, window: float, /) -> ReportedGauges: ...
    # Adds what another router told: requests and booked tokens, fewer if negative. queued, sent:
    # tokens that join the queue, and those sent lately. most: so many of these, times the pace, may
    # other routers' figures make.
    def share(
        self,
        requests: int,
        booked: int,
        queued: float,
        sent: float,
        now: float,
        rate: float,
        window: float,
        most: float,
        /,
    ) -> None: ...

# --- the claims at marks (mark_table.c) ---

# Every request looks into it, and writes to it, at each of its marks. make: makes a claim. most:
# claims that a mark may have. fewer: chooses some of more; its second argument is when the requests
# under way began at the earliest. costs: of memory. bytes: of all.
class MarkTable:
    @property
    def bytes(self) -> int: ...
    def __new__(
        cls,
        make: Callable[[Holdings, builtins.bytes, float, int, tuple[int, ...]], Claim],
        most: int,
        fewer: Callable[[tuple[Claim, ...], float], tuple[Claim, ...]],
        costs: Costs,
        /,
    ) -> Self: ...
    # Returns how many marks have a claim.
    def __len__(self) -> int: ...
    # Puts a new claim to its marks, and returns it; since: the second argument of `fewer`.
    def record(self, holdings: Holdings, marks: HasMarks, now: float, since: float, /) -> Claim: ...
    # Puts the claims of another router to their marks; see `ClaimTable.record_reported`.
    def record_reported(
        self,
        reported: Sequence[ReportedClaim],
        places: ReportedPlaces,
        known: dict[int, Claim],
        bounds: ReportedBounds,
        now: float,
        since: float,
        /,
    ) -> ReportedCounts: ...
    # Removes a claim from its marks.
    def withdraw(self, claim: Claim, /) -> None: ...
    # Returns the longest mark of each run of marks with the same claims, and these claims. Marks
    # are looked up one by one, as far as they have claims.
    def stretches(
        self, lengths: Sequence[int], keys: builtins.bytes, /
    ) -> Sequence[tuple[int, tuple[Claim, ...]]]: ...

# Returns what each worker probably holds of a prompt with these marks, by two generations.
def expected(
    old: MarkTable,
    young: MarkTable,
    lengths: Sequence[int],
    keys: bytes,
    now: float,
    lifetimes: Lifetimes,
    /,
) -> dict[str, Expected]: ...

# --- plain conversations (plain_chat.c, turn_table.c) ---

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

# --- token ids as JSON (id_list.c) ---

# A compact list. Raises ValueError if an id stands for a longer one, as in images.
def id_list(tokens: Tokens, /) -> bytes: ...
