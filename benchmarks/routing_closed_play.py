"""Plays one closed loop: clients who wait for their answers, with one contestant."""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from routing_clients import CHAT, Turn, turns_of
from routing_closed_cells import Loop
from routing_spans import Span, mean_and_p90

from kvtools.whatif.engines import BLOCK_TOKENS, Request, quantile
from kvtools.whatif.routers import Arrivals, Contestant, Proxy, proxy_of

# An answered turn is due again after a second at the earliest, so none is missed between two looks.
LOOK_SECONDS = 0.2

# A first token within this time counts as prompt.
PROMPT_SECONDS = 2.0

# Who was refused comes again after so long: the Retry-After of the router's answer.
RETRY_SECONDS = 5.0

# The interval of messages between several routers.
TICK_SECONDS = 0.01


class LoopResult(NamedTuple):
    """The results of one run.

    turns: answered a second. prompt_turns: those of them whose first token came within
    `PROMPT_SECONDS`. p50, p90, p99: time to the first token, in seconds. hit_rate: share of the
    prompt tokens that were cached. ideal_hit_rate: the same with endless caches that all workers
    have in common. computed: prompt tokens computed a turn. busiest: the share of these that one
    worker computed. longest_hold: of requests that wait in the router, in seconds; times to the
    first token, and of conversations, include it. conversation, conversation_p90: from when a
    client's conversation is due until its last answer, in seconds; of those that begin after the
    warm part, estimated as Kaplan and Meier do where they have not ended yet. least_served: turns a
    second of the tenth of the clients that had fewest, at most. filled: the share of the caches
    that conversations need in the end, as a router counts them.
    """

    turns: float
    prompt_turns: float
    p50: float
    p90: float
    p99: float
    hit_rate: float
    ideal_hit_rate: float
    computed: float
    busiest: float
    longest_hold: float = 0.0
    conversation: float = 0.0
    conversation_p90: float = 0.0
    least_served: float = 0.0
    filled: float = 0.0


@dataclass(slots=True)
class _Asker:
    """A client, or a sub-agent. turn: the one that is due or under way, None after the last.

    may_wait: whether its requests may wait in the router. began: when the conversation of that turn
    was due. turns_ended: after the warm part.
    """

    turns: Iterator[Turn]
    parent: "_Asker | None" = None
    may_wait: bool = True
    open_forks: int = 0
    turn: Turn | None = None
    began: float = 0.0
    ended: float = 0.0
    turns_ended: int = 0


class _Sent(NamedTuple):
    """A request, when it was due, and how many of its tokens earlier ones had."""

    request: Request
    due: float
    known_tokens: int

    @property
    def wait(self) -> float:
        """The time to the first token."""
        return self.request.first_token_at - self.due


@dataclass(slots=True)
class _Play:
    """One run of a loop. due: (when, number, who asks), a heap."""

    loop: Loop
    proxy: Proxy
    sent: list[_Sent] = field(default_factory=list)
    _asker_of: dict[int, _Asker] = field(default_factory=dict)
    _due: list[tuple[float, int, _Asker]] = field(default_factory=list)
    _again: list[tuple[float, int, Request]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _clients: list[_Asker] = field(default_factory=list)
    _conversations: list[Span] = field(default_factory=list)
    _holds: list[float] = field(default_factory=list)

    def run(self, seed: int) -> LoopResult:
        """Lets the clients ask until the time is up."""
        kinds = [kind for kind, count in self.loop.clients for _ in range(count)]
        asked = zip(kinds, clients_of(self.loop, seed), strict=True)
        self._clients = [_Asker(turns, may_wait=kind != CHAT) for kind, turns in asked]
        for asker in self._clients:
            self._proceed(asker, 0.0)
        self.proxy.fleet.run(self._arrivals(), self.proxy.pick, self._over)
        return self._result()

    def _proceed(self, asker: _Asker, now: float) -> None:
        """Makes the next turn due; after a sub-agent's last one, that of its parent perhaps."""
        asker.turn = next(asker.turns, None)
        if asker.turn is not None:
            due = now + asker.turn.pause
            if asker.turn.begins:
                self._note_conversation(asker, asker.ended, is_over=True)
                asker.began = due
            heapq.heappush(self._due, (due, next(self._numbers), asker))
        elif asker.parent is not None:
            asker.parent.open_forks -= 1
            if not asker.parent.open_forks:
                self._proceed(asker.parent, now)

    def _note_conversation(self, asker: _Asker, until: float, *, is_over: bool) -> None:
        """Notes how long a conversation has taken, of those that begin after the warm part."""
        if self.loop.warm_seconds <= asker.began < until:
            over = is_over and until <= self.loop.seconds
            end = min(until, self.loop.seconds)
            self._conversations.append(Span(end - asker.began, over))

    def _arrivals(self) -> Iterator[Request]:
        now = 0.0
        while now < self.loop.seconds:
            yield from self._let_in(now)
            next_due = min(each[0][0] if each else math.inf for each in (self._due, self._again))
            if next_due > now:
                now = min(now + LOOK_SECONDS, next_due)
                self.proxy.fleet.advance_to(now, self._over)
                continue
            request = self._next(now)
            if request is not None and not self._must_wait(request, now):
                yield self._admitted(request, now)

    def _must_wait(self, request: Request, now: float) -> bool:
        """Returns whether a request waits in the router; those of people who chat do not."""
        return self._asker_of[id(request)].may_wait and self.proxy.must_wait(request, now)

    def _next(self, now: float) -> Request | None:
        """Returns a request that is due now, or again."""
        if self._again and self._again[0][0] <= now:
            return heapq.heappop(self._again)[2]
        asker = heapq.heappop(self._due)[2]
        return None if asker.turn is None else self._request(asker, asker.turn, now)

    def _let_in(self, now: float) -> Iterator[Request]:
        for request, goes_on in self.proxy.let_in(now):
            if goes_on:
                yield self._admitted(request, now)
            else:
                again = now + RETRY_SECONDS, next(self._numbers), request
                heapq.heappush(self._again, again)

    def _admitted(self, request: Request, now: float) -> Request:
        if now > request.at:
            self._holds.append(now - request.at)
        request.at = now
        return request

    def _request(self, asker: _Asker, turn: Turn, now: float) -> Request:
        turn.request.at = now
        self._asker_of[id(turn.request)] = asker
        self.sent.append(_Sent(turn.request, now, turn.known * BLOCK_TOKENS))
        return turn.request

    def _over(self, request: Request, now: float) -> None:
        self.proxy.over(request, now)
        asker = self._asker_of.pop(id(request))
        asker.ended = now
        asker.turns_ended += self.loop.warm_seconds <= now <= self.loop.seconds
        forks = asker.turn.forks if asker.turn is not None else ()
        asker.open_forks = len(forks)
        for fork in forks:
            self._proceed(_Asker(fork, asker, asker.may_wait), now)
        if not forks:
            self._proceed(asker, now)
        request.blocks = request.answer_blocks = ()  # they would take most of the memory

    def _result(self) -> LoopResult:
        since, until = self.loop.warm_seconds, self.loop.seconds
        counted = [one for one in self.sent if one.due >= since]
        served = [one for one in counted if one.request.first_token_at]
        requests = [one.request for one in served]
        # who still waits has waited until the end at least
        held = [until - one.due for one in counted if not one.request.first_token_at]
        waits = sorted([*(one.wait for one in served), *held])
        ended = [one for one in self.sent if since <= one.request.done_at <= until]
        prompt = [one for one in ended if one.wait <= PROMPT_SECONDS]
        tokens = sum(one.tokens for one in requests)
        computed = _computed(requests, self.loop.workers)
        for asker in self._clients:
            self._note_conversation(asker, until, is_over=False)
        span, span_p90 = mean_and_p90(self._conversations)
        fewest = quantile(sorted(one.turns_ended for one in self._clients), 0.1)
        return LoopResult(
            turns=len(ended) / (until - since),
            prompt_turns=len(prompt) / (until - since),
            p50=quantile(waits, 0.5),
            p90=quantile(waits, 0.9),
            p99=quantile(waits, 0.99),
            hit_rate=sum(one.cached for one in requests) / tokens,
            ideal_hit_rate=sum(one.known_tokens for one in served) / tokens,
            computed=sum(computed) / len(requests),
            busiest=max(computed) / sum(computed),
            longest_hold=max([0.0, *self._holds, *held]),
            conversation=span,
            conversation_p90=span_p90,
            least_served=fewest / (until - since),
            filled=self.proxy.filled(until),
        )


def _computed(requests: Sequence[Request], workers: int) -> Sequence[int]:
    """Returns the prompt tokens that each worker computed."""
    computed = [0] * workers
    for one in requests:
        computed[one.worker] += one.tokens - one.cached
    return computed


def clients_of(loop: Loop, seed: int) -> Iterator[Iterator[Turn]]:
    """Yields what each client asks."""
    for kind, count in loop.clients:
        for number in range(count):
            is_named = math.floor((number + 1) * loop.named_share) > math.floor(
                number * loop.named_share
            )
            yield turns_of(kind, number, seed, is_named=is_named)


def play(loop: Loop, contestant: Contestant, seed: int) -> LoopResult:
    """Returns what a contestant makes of a loop."""
    if loop.routers > 1:
        tick = TICK_SECONDS if contestant.expects else 0.0
        contestant = contestant._replace(routers=loop.routers, tick_seconds=tick)
    return play_with(loop, proxy_of(loop.stage, contestant, Arrivals([]), seed), seed)


def play_with(loop: Loop, proxy: Proxy, seed: int) -> LoopResult:
    """Returns what a proxy makes of a loop."""
    return _Play(loop, proxy).run(seed)
