"""How many tokens a worker's cache has saved lately: which worker is missed least if it is stopped.

Counted by the minute, for an hour.
"""

MINUTES = 60
_MINUTE_SECONDS = 60.0


class SavedTokens:
    """The prompt tokens that a worker certainly held of the requests sent to it, for an hour."""

    __slots__ = ("_at", "_ends_at", "_minute", "_minutes")

    def __init__(self) -> None:
        self._minutes = [0] * MINUTES
        self._minute = self._at = 0  # the present one, and where it is counted
        self._ends_at = _MINUTE_SECONDS

    def note(self, tokens: int, now: float) -> None:
        """Notes the tokens of a request. now: seconds of a monotonic clock."""
        if now >= self._ends_at:
            self._pass_to(now)
        self._minutes[self._at] += tokens

    def total(self, now: float) -> int:
        """Returns the tokens of the last hour, to the minute."""
        if now >= self._ends_at:
            self._pass_to(now)
        return sum(self._minutes)

    def _pass_to(self, now: float) -> None:
        """Begins the minute of a later time."""
        minute = int(now // _MINUTE_SECONDS)
        for one in range(min(minute - self._minute, MINUTES)):
            self._minutes[(minute - one) % MINUTES] = 0
        self._minute, self._at = minute, minute % MINUTES
        self._ends_at = (minute + 1) * _MINUTE_SECONDS
