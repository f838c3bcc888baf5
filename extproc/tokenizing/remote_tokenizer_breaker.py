"""Which worker is asked for tokens: one that answered lately, and none that keeps failing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstate.feeds.backoff import Backoff

# A worker that fails so often in a row is left alone until a probe finds it well.
MAX_FAILURES = 3

# When it is probed: first so soon, at last so seldom.
PROBE_SECONDS = (1.0, 30.0)


@dataclass(slots=True)
class _State:
    backoff: Backoff
    failures: int = 0
    probe_at: float = 0.0
    is_probed: bool = False

    @property
    def is_open(self) -> bool:
        return self.failures >= MAX_FAILURES


class Breaker:
    """What is known of the workers' tokenizers. Times are seconds of one monotonic clock.

    chance: 0 to 1, evenly.
    """

    def __init__(self, chance: Callable[[], float]) -> None:
        self._chance = chance
        self._states: dict[str, _State] = {}

    def __len__(self) -> int:
        """How many workers it remembers failures of."""
        return len(self._states)

    def choose(self, workers: Sequence[str]) -> str | None:
        """One to ask: any of those that failed least; None if all are left alone."""
        failures = {worker: self._failures(worker) for worker in workers}
        least = min(failures.values(), default=MAX_FAILURES)
        if least >= MAX_FAILURES:
            return None
        best = [worker for worker, count in failures.items() if count == least]
        return best[int(self._chance() * len(best)) % len(best)]

    def away(self, workers: Sequence[str]) -> int:
        """How many of them are left alone."""
        return sum(self._failures(worker) >= MAX_FAILURES for worker in workers)

    def to_probe(self, workers: Sequence[str], now: float) -> str | None:
        """One that was left alone for long enough; it counts as being asked until told."""
        for worker in workers:
            state = self._states.get(worker)
            if state and state.is_open and not state.is_probed and now >= state.probe_at:
                state.is_probed = True
                return worker
        return None

    def succeeded(self, worker: str) -> None:
        """It answered."""
        self._states.pop(worker, None)

    def forget(self, worker: str) -> None:
        """It is no more."""
        self._states.pop(worker, None)

    def failed(self, worker: str, now: float) -> None:
        """It did not answer, or nonsense."""
        state = self._states.get(worker)
        if state is None:
            state = self._states[worker] = _State(Backoff(*PROBE_SECONDS, self._chance))
        state.failures += 1
        state.is_probed = False
        if state.is_open:
            state.probe_at = now + state.backoff.next_seconds()

    def _failures(self, worker: str) -> int:
        state = self._states.get(worker)
        return state.failures if state else 0
