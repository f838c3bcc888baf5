"""The load record of one endpoint, and the tickets of the requests that are in flight there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from extproc._core import LoadNumbers
from extproc.media.prompts import MediaPrompt
from extproc.proof.lookups import SentRequest
from extproc.routing.candidates.pins import PinnedRank
from extproc.routing.claims.claim_table import Claim
from extproc.routing.claims.homes import NO_TURN, Turn
from extproc.routing.load.reports import GaugesOf
from extproc.routing.load.speed import Speed
from extproc.routing.load.transfers import Transfers
from kvstate.overlap import Prompt


class LoadSample(NamedTuple):
    """A worker's report of its load.

    running, waiting: requests. asked_at: when the worker was asked, or the figures were taken.
    pending_tokens: prompt tokens not computed yet, of all its requests. cache_usage: share of its
    cache that running requests use, on its fullest rank. None if not reported.
    """

    running: int
    waiting: int
    asked_at: float
    pending_tokens: int | None = None
    cache_usage: float | None = None


@dataclass(slots=True)
class LevelLoad:
    """This router's requests of one level of classes: in flight, and the tokens of those queued."""

    requests: int = 0
    queued_tokens: float = 0.0


class EndpointLoad:
    """The load record of one endpoint: its requests in flight, and its worker's last report.

    It is removed with the endpoint. Requests still in flight then keep the record until they end;
    a later worker at the same address starts with a new one.

    numbers: what decisions read. tickets: of its requests in flight. queued: those that are not
    known to be computed, oldest first. gauges: the last figures of each other router. levels: its
    requests by the level of their class, empty without classes. transfers: what other workers pull
    from it.
    """

    __slots__ = (
        "gauges",
        "levels",
        "numbers",
        "queued",
        "report",
        "speed",
        "tickets",
        "transfers",
    )

    def __init__(self) -> None:
        self.speed: Speed[Ticket] = Speed()
        self.numbers = LoadNumbers(self.speed)
        self.tickets: set[Ticket] = set()
        self.queued: dict[Ticket, None] = {}
        self.report: LoadSample | None = None
        self.gauges: dict[str, GaugesOf] = {}
        self.levels: dict[int, LevelLoad] = {}
        self.transfers = Transfers()


class Ticket(msgspec.Struct, eq=False):
    """One request that was sent to an endpoint: all that must be released when it is over.

    Its fields are what was begun for it: the load (`Loads`), claims and homes (`Ledger`), the other
    leg (`Disaggregator`), and what waits for the worker's events (the router). Each of these ends
    its own part when the request is released; releasing it again changes nothing.
    """

    # Where it was sent.
    endpoint: str
    # Its expected work there.
    uncached_tokens: float
    # The record in which it is counted.
    load: EndpointLoad
    began_at: float = 0.0
    # The rank that it names, None if none.
    rank: PinnedRank | None = None
    # The prompt that the worker's feed announces once it is computed; None if it does not.
    prompt: Prompt | None = None
    # Whether nobody else is about to compute that prompt there.
    is_sure: bool = True
    # When it was announced to be computed, None before.
    computed_at: float | None = None
    # What other routers sent there since this router's previous request; it is computed first.
    ahead_tokens: float = 0.0
    # The level of its class, None without classes.
    level: int | None = None
    # The claims that its worker is about to hold its prompts.
    claims: Sequence[Claim] = ()
    # What is remembered of its conversation on its worker.
    turn: Turn = NO_TURN
    # The ticket of the prefill worker that computes its prompt for another one.
    leg: "Ticket | None" = None
    # The media whose tokens its worker's events may show.
    media: MediaPrompt | None = None
    # Its worker, and the request as it was sent, looked up in that worker's events once it is over.
    sent: tuple[str, SentRequest] | None = None
    # Its prompt and the forms of the request, if the engine's report is compared with them.
    compared: tuple[Prompt, int] | None = None
