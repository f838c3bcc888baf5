"""What the judge counts. Pure.

A request is held if the recorded engine had a part of its prompt cached. Each recording is played
twice. `kept`: all requests go through the router, so it knows what it sent where. `found`: a
request that nobody holds is computed by the workers in turn, as if another router had sent it; only
held ones go through the router, and if one reaches a wrong worker, a holder computes it all the
same. So the router has nothing but the events to find the holders.
"""

from collections import Counter
from dataclasses import dataclass, field

from judge_engines import Arrival
from judge_recordings import Recorded


@dataclass(slots=True)
class Score:
    """The counts of one play.

    held: requests of which some worker held a part. kept: those of them that reached a worker that
    held all that the recorded engine reused. wrong: those that reached another. failed: requests
    that reached none. told: requests, except wrong and failed ones, of which the router foretold
    how many tokens its worker has cached. predicted: those of them of which the engine reported
    just as many. sent: requests by worker.
    """

    held: int = 0
    kept: int = 0
    wrong: int = 0
    failed: int = 0
    told: int = 0
    predicted: int = 0
    sent: Counter[int] = field(default_factory=Counter)

    def note(self, request: Recorded, arrival: Arrival | None, foretold: int | None) -> None:
        """Counts a request that was sent through the router.

        arrival: None if no worker got it. foretold: the cached tokens, None if the router tells
        none.
        """
        is_held = request.cached > 0
        self.held += is_held
        if arrival is None:
            self.failed += 1
            return
        self.sent[arrival.worker] += 1
        if is_held and arrival.worker not in arrival.held_by:
            self.wrong += 1
            return
        self.kept += is_held
        if foretold is not None:
            self.told += 1
            self.predicted += foretold == arrival.reported

    @property
    def busiest(self) -> float:
        """The share of the requests that the worker with most of them got."""
        return max(self.sent.values(), default=0) / max(1, self.sent.total())


HEAD = f"{'kept':>12}{'busiest':>9}{'found':>12}{'wrong':>7}{'failed':>8}{'predicted':>13}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The scores of both plays."""

    kept: Score
    found: Score

    def __str__(self) -> str:
        kept, found = self.kept, self.found
        told = kept.told + found.told
        predicted = f"{kept.predicted + found.predicted} of {told}" if told else "tells none"
        return (
            f"{f'{kept.kept} of {kept.held}':>12}{kept.busiest:>9.0%}"
            f"{f'{found.kept} of {found.held}':>12}{kept.wrong + found.wrong:>7}"
            f"{kept.failed + found.failed:>8}{predicted:>13}"
        )
