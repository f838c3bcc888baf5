"""What the clients of closed loops ask: agents, agents with sub-agents, and people who chat.

A client asks one conversation after the other. Each turn begins with the one before and its answer.
What a client asks, and its pauses, depend on the seed and its number alone, so they are the same
for every contestant, and in cells with more clients.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

from routing_workloads import blocks_of, request_of, take

from kvtools.whatif.engines import BLOCK_TOKENS, Request

LogNormal = tuple[float, float]

# Block numbers of each client; the common prompts have those before all clients'.
CLIENT_BLOCKS = 1 << 16


class Forks(NamedTuple):
    """Sub-agents that a turn may begin, which share all of its prompt and answer.

    chance: of a turn to begin some. number, turns: how many, and of how many turns each, from and
    to. The client's next turn is due once all of them have ended.
    """

    chance: float
    number: tuple[int, int]
    turns: tuple[int, int]
    question: LogNormal
    pause: LogNormal


class Kind(NamedTuple):
    """A kind of client. Log-normal figures are means and deviations of the logarithm.

    system_tokens: of the prompt with which all clients of a kind begin. turns: of a conversation,
    from and to. opening_tokens: of what a conversation begins with, from and to; earlier_tokens: of
    what the first one has in addition at most, since it has begun before. question, answer: tokens.
    pause: seconds from an answer to the next turn, after a second and at most `longest_pause`.
    rest_seconds: the longest time until the next conversation begins.
    """

    name: str
    system_tokens: int
    turns: tuple[int, int]
    opening_tokens: tuple[float, float]
    earlier_tokens: float
    question: LogNormal
    answer: LogNormal
    most_answer_tokens: int
    pause: LogNormal
    longest_pause: float
    rest_seconds: float
    forks: Forks | None = None


# Pauses of agents, sub-agents and chats are as SAECache (arXiv:2605.18825) fits them.
AGENT = Kind(
    name="agents",
    system_tokens=8_000,
    turns=(14, 26),
    opening_tokens=(8_000, 20_000),
    earlier_tokens=25_000,
    question=(7.0, 0.8),
    answer=(5.4, 0.7),
    most_answer_tokens=1_500,
    pause=(2.28, 1.34),
    longest_pause=600.0,
    rest_seconds=60.0,
)
ENDLESS = AGENT._replace(name="endless agents", turns=(100, 100), question=(6.0, 0.8))
FORKING = AGENT._replace(
    name="agents with sub-agents",
    forks=Forks(0.15, (2, 4), (3, 8), question=(6.0, 0.6), pause=(0.69, 1.13)),
)
CHAT = Kind(
    name="chats",
    system_tokens=2_000,
    turns=(3, 12),
    opening_tokens=(0, 16_000),
    earlier_tokens=8_000,
    question=(5.8, 0.8),
    answer=(5.6, 0.7),
    most_answer_tokens=2_000,
    pause=(4.82, 1.25),
    longest_pause=1_800.0,
    rest_seconds=300.0,
)
KINDS = (AGENT, ENDLESS, FORKING, CHAT)


class Turn(NamedTuple):
    """One request of a client. pause: the seconds before it. known: its blocks that earlier
    requests had, or their answers. forks: the turns of the sub-agents that it begins.
    begins: whether a conversation begins."""

    request: Request
    pause: float
    known: int
    forks: Sequence[Iterator["Turn"]] = ()
    begins: bool = False

    @property
    def held_tokens(self) -> int:
        """How many tokens the conversation has after it."""
        return self.request.tokens + len(self.request.answer_blocks) * BLOCK_TOKENS


class _Client:
    """Makes what one client asks. session: what it names its conversations, "" if nothing."""

    def __init__(self, kind: Kind, number: int, seed: int, *, is_named: bool) -> None:
        self._kind = kind
        self._rng = Random(f"{kind.name}, client {number}, seed {seed}")
        place = KINDS.index(_unnumbered(kind))
        begin = (1 + number * len(KINDS) + place) * CLIENT_BLOCKS
        self._numbers = itertools.count(begin)
        first = place * CLIENT_BLOCKS // len(KINDS)
        self._system = list(range(first, first + blocks_of(kind.system_tokens)))
        self._name = f"{kind.name} {number}" if is_named else ""

    def turns(self) -> Iterator[Turn]:
        """Yields the turns of all conversations, without end."""
        kind, rng = self._kind, self._rng
        before = rng.uniform(0, kind.earlier_tokens)
        for conversation in itertools.count():
            session = f"{self._name}, conversation {conversation}" if self._name else ""
            opening = take(self._numbers, blocks_of(rng.uniform(*kind.opening_tokens) + before))
            before, rest = 0.0, rng.uniform(0, kind.rest_seconds)
            count = rng.randint(*kind.turns)
            yield from self._conversation(opening, rest, count, session)

    def _conversation(
        self, opening: list[int], rest: float, count: int, session: str
    ) -> Iterator[Turn]:
        history, known = self._system + opening, len(self._system)
        for turn in range(count):
            pause = self._pause(self._kind.pause) if turn else rest
            made = self._turn(history, self._kind.question, session)
            history = [*made.blocks, *made.answer_blocks]
            yield Turn(made, pause, known, self._forks(history, session), begins=not turn)
            known = len(history)

    def _forks(self, history: list[int], session: str) -> Sequence[Iterator[Turn]]:
        forks = self._kind.forks
        if forks is None or self._rng.random() >= forks.chance:
            return ()
        count = self._rng.randint(*forks.number)
        return [iter(self._fork(forks, history, session)) for _ in range(count)]

    def _fork(self, forks: Forks, history: list[int], session: str) -> list[Turn]:
        made, known = [], len(history)
        for _ in range(self._rng.randint(*forks.turns)):
            pause = self._pause(forks.pause)
            request = self._turn(history, forks.question, session)
            made.append(Turn(request, pause, known))
            history = [*request.blocks, *request.answer_blocks]
            known = len(history)
        return made

    def _turn(self, history: list[int], question: LogNormal, session: str) -> Request:
        prompt = history + take(self._numbers, blocks_of(self._rng.lognormvariate(*question)))
        drawn = self._rng.lognormvariate(*self._kind.answer)
        tokens = int(min(self._kind.most_answer_tokens, drawn) + 16)
        answer = take(self._numbers, blocks_of(tokens))
        return request_of(0.0, prompt, answer, tokens, session)

    def _pause(self, of: LogNormal) -> float:
        return 1.0 + min(self._kind.longest_pause, self._rng.lognormvariate(*of))


def _unnumbered(kind: Kind) -> Kind:
    return next(one for one in KINDS if one.name == kind.name)


def turns_of(kind: Kind, number: int, seed: int, *, is_named: bool = True) -> Iterator[Turn]:
    """Yields the turns of a client; is_named: whether it sends the name of its conversations."""
    return _Client(kind, number, seed, is_named=is_named).turns()


SAMPLED_CLIENTS, SAMPLED_TURNS = 40, 100


@functools.cache
def mean_context(kind: Kind) -> float:
    """Returns the tokens that a client's conversation holds on average, the common prompt left out.

    It is the mean over turns of the tokens of prompt and answer, and of what the sub-agents that
    this turn begins add to them.
    """
    sizes = []
    for number in range(SAMPLED_CLIENTS):
        for turn in itertools.islice(turns_of(kind, number, 0), SAMPLED_TURNS):
            added = [list(fork)[-1].held_tokens - turn.held_tokens for fork in turn.forks]
            sizes.append(turn.held_tokens + sum(added) - kind.system_tokens)
    return statistics.fmean(sizes)


def clients_that_fill(kind: Kind, share: float, room_tokens: float) -> int:
    """Returns how many clients' contexts fill a share of caches with so much room."""
    return max(1, math.floor(share * room_tokens / mean_context(kind) + 0.5))
