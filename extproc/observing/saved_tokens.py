"""How many tokens a worker's cache has saved lately: which worker is missed least if it is stopped.

Counted by the minute, for an hour.
"""

MINUTES = 60
_MINUTE_SECONDS = 60.0


class SavedTokens:
    """The prompt tokens that a worker certainly held of the requests sent to it, for an hour."""

    __slots__ = ("_minute", "_minutes")

    def __init__(self) -> None:
        self._minutes = [0] * MINUTES
        self._minute = 0

    def note(self, tokens: int, now: float) -> None:
        """Notes the tokens of a request. now: seconds of a monotonic clock."""
        self._pass_to(now)
        self._minutes[self._minute % MINUTES] += tokens

    def total(self, now: float) -> int:
        """Returns the tokens of the last hour, to the minute."""
        self._pass_to(now)
        return sum(self._minutes)

    def _pass_to(self, now: float) -> None:
        minute = int(now // _MINUTE_SECONDS)
        passed = minute - self._minute
        if passed <= 0:
            return
        for one in range(min(passed, MINUTES)):
            self._minutes[(minute - one) % MINUTES] = 0
        self._minute = minute
