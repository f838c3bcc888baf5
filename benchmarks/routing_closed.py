"""Closed loops: agents who wait for their answers, on the simulated fleet.

An agent's next turn comes a pause after its last answer ended, so a slow fleet gets fewer requests,
unlike in cells whose arrivals are fixed. Contents and pauses are the same for every contestant.
Pauses are log-normal with 2.28 and 1.34 of log seconds, as SAECache (arXiv:2605.18825) fits agents.
"""

import heapq
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from measure import Figure
from routing_cells import CACHE_TOKENS
from routing_compare import interval
from routing_workloads import blocks_of, request_of, take

from kvtools.whatif.engines import BLOCK_TOKENS, ModelledSpeed, Request, quantile
from kvtools.whatif.routers import Arrivals, Contestant, Proxy, Stage, proxy_of

SYSTEM_TOKENS = 8_000
PAUSE_LOG_MEAN, PAUSE_LOG_SIGMA, LONGEST_PAUSE_SECONDS = 2.28, 1.34, 600.0

# Agents begin within this time, and begin another conversation after a pause of up to so long.
BEGIN_SECONDS = 60.0

# An answered turn is due again after a second at the earliest, so none is missed between two looks.
LOOK_SECONDS = 0.2

# A first token within this time counts as prompt.
PROMPT_SECONDS = 2.0


class Loop(NamedTuple):
    """A cell of agents. agents: at once. seconds: how long, of which `warm_seconds` do not count.

    turns: of a conversation, from and to.
    """

    name: str
    agents: int
    seconds: float
    warm_seconds: float
    turns: tuple[int, int] = (14, 26)

    @property
    def most_turns(self) -> int:
        """More turns than an agent can have in that time, of 25 seconds or more on average."""
        return int(self.seconds / 20) + self.turns[1]


class Turns(NamedTuple):
    """All turns of an agent, in order, and the pause in seconds before each."""

    requests: list[Request]
    pauses: list[float]


def agents_of(loop: Loop, seed: int) -> list[Turns]:
    """Returns what the agents of a loop would ask, the same for every contestant."""
    rng, numbers = Random(seed), itertools.count()
    system = take(numbers, blocks_of(SYSTEM_TOKENS))
    return [_turns(loop, rng, numbers, system) for _ in range(loop.agents)]


def _turns(loop: Loop, rng: Random, numbers: Iterator[int], system: list[int]) -> Turns:
    """Returns one agent's turns; its first conversation has begun before, somewhere."""
    made = Turns([], [])
    before = rng.uniform(0, 25_000)
    while len(made.requests) < loop.most_turns:
        history = system + take(numbers, blocks_of(rng.uniform(8_000, 20_000) + before))
        before = 0.0
        for turn in range(rng.randint(*loop.turns)):
            question = take(numbers, blocks_of(rng.lognormvariate(7.0, 0.8)))
            answer_tokens = int(min(1_500, rng.lognormvariate(5.4, 0.7)) + 16)
            answer = take(numbers, blocks_of(answer_tokens))
            made.requests.append(request_of(0.0, history + question, answer, answer_tokens))
            made.pauses.append(_pause(rng) if turn else rng.uniform(0, BEGIN_SECONDS))
            history = history + question + answer
    return made


def _pause(rng: Random) -> float:
    drawn = rng.lognormvariate(PAUSE_LOG_MEAN, PAUSE_LOG_SIGMA)
    return 1.0 + min(LONGEST_PAUSE_SECONDS, drawn)


class LoopResult(NamedTuple):
    """The results of one run.

    turns: answered a second. prompt_turns: those of them whose first token came within
    `PROMPT_SECONDS`. p50, p90, p99: time to the first token, in seconds. hit_rate: share of the
    prompt tokens that were cached.
    """

    turns: float
    prompt_turns: float
    p50: float
    p90: float
    p99: float
    hit_rate: float


@dataclass(slots=True)
class _Play:
    """One run of a loop. agent_of: the number of the agent that sends a request, by its id."""

    loop: Loop
    proxy: Proxy
    agents: list[Turns]
    sent: list[Request] = field(default_factory=list)
    _agent_of: dict[int, int] = field(default_factory=dict)
    _next: list[int] = field(default_factory=list)
    _due: list[tuple[float, int]] = field(default_factory=list)

    def run(self) -> LoopResult:
        """Lets the agents ask until the time is up."""
        for number, one in enumerate(self.agents):
            self._agent_of.update(dict.fromkeys(map(id, one.requests), number))
            self._next.append(0)
            heapq.heappush(self._due, (one.pauses[0], number))
        self.proxy.fleet.run(self._arrivals(), self.proxy.pick, self._over)
        return self._result()

    def _arrivals(self) -> Iterator[Request]:
        now = 0.0
        while now < self.loop.seconds:
            next_due = self._due[0][0] if self._due else math.inf
            if next_due > now:
                now = min(now + LOOK_SECONDS, next_due)
                self.proxy.fleet.advance_to(now, self._over)
                continue
            _, number = heapq.heappop(self._due)
            request = self.agents[number].requests[self._next[number]]
            request.at = now
            self.sent.append(request)
            yield request

    def _over(self, request: Request, now: float) -> None:
        self.proxy.over(request, now)
        number = self._agent_of[id(request)]
        self._next[number] += 1
        pause = self.agents[number].pauses[self._next[number]]
        heapq.heappush(self._due, (now + pause, number))

    def _result(self) -> LoopResult:
        since, until = self.loop.warm_seconds, self.loop.seconds
        counted = [one for one in self.sent if one.at >= since]
        waits = sorted(one.first_token_at - one.at for one in counted)
        ended = [one for one in self.sent if since <= one.done_at <= until]
        prompt = [one for one in ended if one.first_token_at - one.at <= PROMPT_SECONDS]
        return LoopResult(
            turns=len(ended) / (until - since),
            prompt_turns=len(prompt) / (until - since),
            p50=quantile(waits, 0.5),
            p90=quantile(waits, 0.9),
            p99=quantile(waits, 0.99),
            hit_rate=sum(one.cached for one in counted) / sum(one.tokens for one in counted),
        )


def play(loop: Loop, contestant: Contestant, seed: int, workers: int = 8) -> LoopResult:
    """Returns what a contestant makes of a loop on so many engines."""
    agents = agents_of(loop, seed)
    given = Arrivals([request for one in agents for request in one.requests])
    stage = Stage([ModelledSpeed()] * workers, CACHE_TOKENS // BLOCK_TOKENS)
    proxy = proxy_of(stage, contestant, given, seed)
    own = iter(proxy.requests)
    fresh = [Turns(list(itertools.islice(own, len(one.requests))), one.pauses) for one in agents]
    return _Play(loop, proxy, fresh).run()


LoopResults = Mapping[str, Sequence[LoopResult]]


def figure(results: Sequence[LoopResult], what: str) -> Figure:
    """Returns one quantity of the runs, one value for each seed."""
    return Figure([max(1e-6, getattr(one, what)) for one in results])


def summary(loop: Loop, results: LoopResults, reference: str) -> str:
    """Returns all quantities of all contestants, as means over the seeds."""
    columns = "turns/s  within 2 s   p50 s   p90 s   p99 s   hit"
    lines = [loop.name, f"  {'':34} {columns}  turns/s of {reference}'s"]
    for name, each in results.items():
        means = [statistics.fmean(column) for column in zip(*each, strict=True)]
        ratio = figure(each, "turns").over(figure(results[reference], "turns"))
        low, high = interval(ratio.values)
        lines.append(
            "  {:34}{:8.2f}{:12.2f}{:8.2f}{:8.2f}{:8.2f}{:6.2f}".format(name, *means)
            + f"  {statistics.geometric_mean(ratio.values):5.3f} ({low:.3f}-{high:.3f})"
        )
    return "\n".join(lines)
