"""Whether requests are answered by the worker that they were steered to, as the proxy tells."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

# Answers of one worker's requests that are looked back at.
RECENT = 16

# Fewer of them that came from elsewhere are chance: a connection that was closed, a retry.
LEAST_ELSEWHERE = 3

# From this share on, a worker's picks are not followed; so few, and they are.
NOT_FOLLOWED = 0.3

# Between two warnings, in seconds.
WARNING_SECONDS = 60.0

NOBODY_FOLLOWED = (
    "no pick is followed: Envoy's cluster has no override_host policy for envoy.lb, or ext_proc"
    " does not receive that namespace (metadata_options), or something removes the header"
)
IS_DOWN = "it does not answer, so Envoy goes on to the next one"
NOT_LISTED = "Envoy's cluster probably lacks this endpoint, or cannot connect to it"
RETRIED = "Envoy retried elsewhere: its connections to it are refused or closed now and then"


@dataclass(slots=True)
class _Answers:
    looked_at: int = 0
    elsewhere: int = 0
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT))

    @property
    def share(self) -> float:
        return sum(self.recent) / len(self.recent)


class Elsewhere:
    """The answers whose server is known, by the name of the worker that was picked."""

    def __init__(self) -> None:
        self._by_worker: dict[str, _Answers] = {}
        self._told_at = float("-inf")

    def note(self, worker: str, *, is_elsewhere: bool) -> None:
        """Takes an answer to a request that was steered to a worker."""
        answers = self._by_worker.setdefault(worker, _Answers())
        answers.looked_at += 1
        answers.elsewhere += is_elsewhere
        answers.recent.append(is_elsewhere)

    def cause(self, worker: str, *, is_down: bool) -> str:
        """The likeliest cause why its answers come from elsewhere, "" if they do not lately."""
        answers = self._by_worker.get(worker)
        if answers is None or sum(answers.recent) < LEAST_ELSEWHERE:
            return ""
        if is_down:
            return IS_DOWN
        known = self._by_worker.values()
        if len(known) > 1 and all(one.share >= NOT_FOLLOWED for one in known):
            return NOBODY_FOLLOWED
        return NOT_LISTED if all(answers.recent) else RETRIED

    def may_warn(self, now: float) -> bool:
        """Whether a warning is due; it counts as given. now: seconds of a monotonic clock."""
        if now - self._told_at < WARNING_SECONDS:
            return False
        self._told_at = now
        return True

    def counts(self) -> list[tuple[str, int, int]]:
        """Of every worker: the answers that were looked at, and those from elsewhere."""
        return [(name, one.looked_at, one.elsewhere) for name, one in self._by_worker.items()]

    def keep(self, workers: Collection[str]) -> None:
        """Forgets the workers that are not among these."""
        for name in self._by_worker.keys() - set(workers):
            del self._by_worker[name]
