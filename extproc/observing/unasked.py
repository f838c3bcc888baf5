"""Whether any proxy asks the router, while workers compute prompts that others send them."""

from collections.abc import Callable, Iterator

from extproc.base.fault import ROUTER, Fault

# There is a fault if nobody has asked for so long, and workers have told of so many batches since
# the first seconds, in which the replays of a start may come.
SECONDS = 30.0
SETTLING_SECONDS = 10.0
BATCHES = 10
_LEAST_LOOKS = 5


class UnaskedRouter:
    """Watches that; `faults` has to be called every few seconds.

    decisions: returns how many requests were decided so far. connections: returns how many proxies
    are connected; a probe's connection is open at few looks. batches: returns how many batches of
    events workers have sent so far. monotonic: seconds.
    """

    def __init__(
        self,
        decisions: Callable[[], int],
        connections: Callable[[], int],
        batches: Callable[[], int],
        monotonic: Callable[[], float],
    ) -> None:
        self._decisions = decisions
        self._connections = connections
        self._batches = batches
        self._monotonic = monotonic
        self._decided = 0
        self._begin(monotonic())

    def _begin(self, now: float) -> None:
        self._since = now
        self._before: int | None = None
        self._looks = self._connected = 0

    def faults(self) -> Iterator[Fault]:
        """Yields a fault while nobody asks."""
        now, decided = self._monotonic(), self._decisions()
        if decided != self._decided:
            self._decided = decided
            self._begin(now)
        self._looks += 1
        self._connected += bool(self._connections())
        if self._before is None:
            if now - self._since >= SETTLING_SECONDS:
                self._before = self._batches()
            return
        batches = self._batches() - self._before
        is_alone = self._looks >= _LEAST_LOOKS and 2 * self._connected < self._looks
        if is_alone and batches >= BATCHES and now - self._since >= SECONDS:
            says = "no proxy asks this router, though its workers compute prompts"
            yield Fault("not-asked", ROUTER, f"{says}: nothing is steered")
