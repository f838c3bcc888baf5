"""Random requests for which the cached share of prompts in the long run is known."""

from collections.abc import Iterator
from random import Random
from statistics import NormalDist
from typing import Any, NamedTuple

from extproc.observing.outcomes import Outcome
from extproc.observing.report import Report
from extproc.observing.usage import Usage

BEGIN = 1_700_000_040.0  # a full minute


def over(cached: int | None = 0, tokens: int = 1_000, **changes: Any) -> Outcome:
    """The outcome of an ended request."""
    outcome = Outcome(
        model="m",
        worker="w:1",
        is_moved=False,
        status=200,
        ttft_seconds=0.1,
        prompt_tokens=tokens,
        predicted_tokens=0,
        reported=Usage(tokens, cached),
        is_comparable=True,
    )
    return outcome._replace(**changes)


def _clipped(share: float) -> float:
    return min(max(share, 0.0), 1.0)


class Traffic(NamedTuple):
    """Conversations of several turns in one window; about half of them are steered.

    minutes: the length of the window. conversations: the mean number that begin in it. shares: the
    mean cached share of a prompt, steered and others. pause_seconds: the mean between two turns.
    """

    minutes: int
    conversations: int
    shares: tuple[float, float] = (0.6, 0.3)
    turns: float = 4.0
    pause_seconds: float = 20.0

    def outcomes(self, rng: Random) -> Iterator[tuple[float, Outcome]]:
        """Yields requests with the time at which each ended, in order."""
        found: list[tuple[float, int, Outcome]] = []
        window = self.minutes * 60.0
        weather = [rng.gauss(0.0, 0.2) for _ in range(self.minutes)]
        lead = 10 * self.turns * self.pause_seconds  # some conversations begin before the window
        begin = rng.expovariate(self.conversations / window) - lead
        while begin < window:
            self._converse(found, begin, weather, rng)
            begin += rng.expovariate(self.conversations / window)
        for at, _, outcome in sorted(found):
            yield BEGIN + at, outcome

    def _converse(
        self,
        found: list[tuple[float, int, Outcome]],
        at: float,
        weather: list[float],
        rng: Random,
    ) -> None:
        is_steered = rng.random() < 0.5
        mean = self.shares[0 if is_steered else 1]
        own = _clipped(rng.gauss(mean, 0.2))
        length, slow = rng.randint(200, 3_000), rng.gauss(0.0, 0.3)
        while True:
            share = _clipped(rng.gauss(own, 0.05))
            if 0.0 <= at < self.minutes * 60.0:
                spread = slow + weather[int(at // 60)] + rng.gauss(0.0, 0.5)
                outcome = over(
                    round(length * share),
                    length,
                    ttft_seconds=(0.2 if is_steered else 0.3) * float(2.718281828**spread),
                    is_steered=is_steered,
                )
                found.append((at, len(found), outcome))
            if rng.random() < 1 / self.turns:
                return
            at += rng.expovariate(1 / self.pause_seconds)

    def drawn_share(self, which: int, rng: Random) -> float:
        """A random cached share of one prompt."""
        return _clipped(rng.gauss(_clipped(rng.gauss(self.shares[which], 0.2)), 0.05))

    def seconds_at(self, quantile: float, *, is_steered: bool) -> float:
        """The time in which this share of requests has its first byte, in the long run."""
        spread = NormalDist(0.0, (0.2**2 + 0.3**2 + 0.5**2) ** 0.5).inv_cdf(quantile)
        return (0.2 if is_steered else 0.3) * float(2.718281828**spread)

    def report(self, rng: Random) -> tuple[Report, float]:
        """The report of one run, and the time at its end."""
        report = Report(BEGIN)
        for at, outcome in self.outcomes(rng):
            report.feed(outcome, 1_000.0, at)
        return report, BEGIN + self.minutes * 60.0 - 1e-3
