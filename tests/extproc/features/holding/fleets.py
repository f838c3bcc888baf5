"""Three workers whose caches live conversations fill, and those who wait for room there."""

from collections.abc import Iterable, Sequence

from extproc.config.sections import HoldSettings
from extproc.features.holding.hold import Hold
from extproc.routing.claims.claim_table import Holdings
from extproc.routing.claims.line import Place
from extproc.routing.claims.lines import Lines
from tests.extproc.routing.cost.test_room import CAPACITY, Fleet, conversation

BOUND = 20


class HeldFleet(Fleet):
    """A fleet of three workers, and the hold in front of it.

    limit: what the caches hold. draining: the worker that gets no requests, "" for none.
    """

    def __init__(self, most: int = 100, classes: Sequence[str] = ()) -> None:
        super().__init__()
        rules = HoldSettings(
            enabled=True, bound_seconds=BOUND, max_requests=most, classes=tuple(classes)
        )
        self.is_known, self.draining = True, ""
        self.lines = Lines(1, BOUND, most)
        self.hold = Hold(rules, self.records, self.homes, self.lines)
        self.limit = self.hold.limit("m")
        self.limit.share = 1.0

    def records(self, _: str) -> Iterable[Holdings] | None:
        known = [one for one in self.holdings.values() if one.worker != self.draining]
        return known if self.is_known else None

    def ask(self, tokens: Sequence[int]) -> Place | None:
        """Returns the place of a request that must wait, None if it goes on."""
        unfit = {f"{self.draining}:1": "draining"} if self.draining else {}
        return self.hold.place_of(self.decide(tokens, unfit=unfit), self.now)

    def steps(self) -> list[tuple[int, str]]:
        """Returns how waits end now: the key of each place, and the outcome."""
        return [(place.key, outcome) for _, place, outcome in self.hold.step(self.now)]

    def fill(self) -> None:
        """Has a conversation fill most of each cache."""
        for number, worker in enumerate("abc", 101):
            for prompt in conversation(number, (CAPACITY - 6_000) // 2, 2):
                self.send(prompt, worker)
