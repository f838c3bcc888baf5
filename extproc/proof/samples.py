"""Samples: requests that go without the ids of their prompts, so that what engines make shows.

An engine that gets the ids of a prompt answers whatever they say: a wrong one costs the answer. So
ids go with a request only as long as samples of its traits agree: the first request of each trait
goes without, and then one of so many. What its engine counts is compared with the ids here. The
first disagreement ends it for the worker, until that starts anew.

Counts miss other ids of equal number. Those show in what the engine reuses: of a conversation that
went with ids before, it finds fewer of the blocks that it is known to hold. It may have lost them
in between, so this only has golden requests asked at once; until they agree, nothing is proved.

A trait is a form of prompts, an API, or an adapter: what an engine may read in its own way. So few
are known that they are bounded by the configuration.

    step        when                                  what follows
    handed      all traits have agreed, and are not   one less may be handed before the next sample
                due
    sample      a trait has not agreed, or is due     agrees: so many more may be handed
                                                      disagrees: refuted
                                                      shows nothing: the next one is a sample
                                                      finds fewer: as if the worker started anew
    refuted     anything disagreed since the start    nothing, until the worker starts anew, or may
                                                      have: its feed was cut
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# What becomes of the ids of a request at a worker.
HANDED, SAMPLE, REFUTED = "handed", "sample", "refuted"

# What a sample shows; a request with ids can only disagree, since its engine counts these ids.
AGREED, DISAGREED, UNKNOWN, FEWER = "agreed", "disagreed", "unknown", "found_fewer"
RESULTS = (AGREED, DISAGREED, UNKNOWN, FEWER)


class Samples:
    """What samples have shown of one worker.

    refuted: what disagreed, in words; "" if nothing did. handed_requests, handed_tokens: how many
    requests ids went with, and how many ids. start: how often the worker started anew; what was
    sent before says nothing of it. results: of all samples, by what they showed.
    """

    __slots__ = ("_left", "handed_requests", "handed_tokens", "refuted", "results", "start")

    def __init__(self) -> None:
        self.refuted = ""
        self.start = self.handed_requests = self.handed_tokens = 0
        self.results: Counter[str] = Counter()
        self._left: dict[str, int] = {}  # how many may be handed before a trait's next sample

    def restart(self) -> None:
        """Forgets everything: the worker may have been started with other files."""
        self.begin_anew()
        self.refuted = ""

    def begin_anew(self) -> None:
        """Forgets what agreed: forms that are proved anew may not be as they were."""
        self.start += 1
        self._left.clear()

    def step(self, traits: Iterable[str]) -> str:
        """Returns what becomes of the ids of a request with some traits; without side effects."""
        if self.refuted:
            return REFUTED
        left = self._left
        return HANDED if all(left.get(trait, 0) > 0 for trait in traits) else SAMPLE

    def note_handed(self, traits: Iterable[str], tokens: int) -> None:
        """Notes that so many ids go with a request of some traits, all of which may be handed."""
        self.handed_requests += 1
        self.handed_tokens += tokens
        left = self._left
        for trait in traits:
            if trait in left:  # unless they were forgotten since it was decided
                left[trait] -= 1

    def note_result(
        self, result: str, traits: Iterable[str], every: int, start: int, says: str = ""
    ) -> bool:
        """Takes what a sample showed, or that a request with ids disagreed.

        every: one of so many requests is a sample. start: of the worker, when it was sent. says:
        what disagreed. Returns whether this refutes what was not refuted before.
        """
        if start != self.start:
            return False
        self.results[result] += 1
        if result == AGREED:
            self._left.update(dict.fromkeys(traits, every - 1))
        if result != DISAGREED or self.refuted:
            return False
        self.refuted = says
        self._left.clear()
        return True

    def as_json(self) -> dict[str, Any]:
        """Returns its fields for GET /workers."""
        handed = {"handed_requests": self.handed_requests, "handed_tokens": self.handed_tokens}
        return {"refuted": self.refuted, "traits": sorted(self._left), **handed, **self.results}


def step_among(
    picked: str, cluster: Mapping[str, Samples], traits: Sequence[str]
) -> tuple[str, str]:
    """Returns what becomes of the ids of a request, and the worker that refuted them, "" if none.

    The proxy sends a request elsewhere if its worker does not answer: so ids go along only if they
    are refuted nowhere. That samples agree is asked only of the worker that is picked.

    cluster: the samples of all workers that may get it, by name.
    """
    refuted = next((name for name, one in cluster.items() if one.refuted), "")
    return (REFUTED, refuted) if refuted else (cluster[picked].step(traits), "")
