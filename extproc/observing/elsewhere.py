"""Whether requests are answered by the worker that they were steered to, as the proxy tells."""

from collections import deque
from collections.abc import Callable, Iterable
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
class Answers:
    """The answers to what was steered to one worker, as far as their server is known.

    recent: whether each of the last ones came from elsewhere.
    """

    looked_at: int = 0
    elsewhere: int = 0
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT))

    @property
    def share(self) -> float:
        """The share of the last ones that came from elsewhere."""
        return sum(self.recent) / len(self.recent)

    def note(self, *, is_elsewhere: bool) -> None:
        """Takes an answer to a request that was steered to the worker."""
        self.looked_at += 1
        self.elsewhere += is_elsewhere
        self.recent.append(is_elsewhere)

    def cause(self, fleet: Callable[[], Iterable["Answers"]], *, is_down: bool) -> str:
        """The likeliest cause why they come from elsewhere, "" if they do not lately.

        fleet: gives the answers of all workers, this one among them.
        """
        if sum(self.recent) < LEAST_ELSEWHERE:
            return ""
        if is_down:
            return IS_DOWN
        known = [one.share for one in fleet() if one.recent]
        if len(known) > 1 and all(share >= NOT_FOLLOWED for share in known):
            return NOBODY_FOLLOWED
        return NOT_LISTED if all(self.recent) else RETRIED


class WarningLimit:
    """Tells when one more warning about this is due."""

    def __init__(self) -> None:
        self._told_at = float("-inf")

    def may_warn(self, now: float) -> bool:
        """Whether one is due; it counts as given. now: seconds of a monotonic clock."""
        if now - self._told_at < WARNING_SECONDS:
            return False
        self._told_at = now
        return True
