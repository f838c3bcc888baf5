"""Which outages of the way between routers are logged: the first, second, fourth, and so on.

A server that fails and recovers again and again would otherwise fill the log. With time, earlier
outages count less; an outage that lasts is logged in any case.
"""

from typing import NamedTuple

from kvstate.seldom import is_logged

# A recovery counts after this time without a fault: a slow engine or a busy machine may fail and
# recover several times a second.
SETTLED_SECONDS = 1.0

# After each such time without an outage, half as many count as came before.
HALVED_SECONDS = 600.0

# An outage is logged when it has lasted as long, however many there were.
LASTING_SECONDS = 60.0


class OutageNote(NamedTuple):
    """What is to be logged.

    fault: why there is an outage, "" if it is over. number: of the outages that count, this one.
    """

    fault: str
    number: int


class Outages:
    """The outages so far. is_going_on: whether there is one now."""

    def __init__(self) -> None:
        self.is_going_on = False
        self._number = 0
        self._has_warned = False
        self._began_at = self._faulty_at = 0.0

    def look(self, fault: str, now: float) -> OutageNote | None:
        """Returns what to log, None for nothing.

        fault: "" if there is none now. now: in seconds of any clock.
        """
        if not fault:
            return self._over(now)
        if not self.is_going_on:
            self._begin(now)
        self._faulty_at = now
        is_rare = self._began_at == now and is_logged(self._number)
        if self._has_warned or not (is_rare or now - self._began_at >= LASTING_SECONDS):
            return None
        self._has_warned = True
        return OutageNote(fault, self._number)

    def _begin(self, now: float) -> None:
        halvings = int((now - self._faulty_at) / HALVED_SECONDS)
        self._number = (self._number >> halvings) + 1
        self.is_going_on, self._has_warned, self._began_at = True, False, now

    def _over(self, now: float) -> OutageNote | None:
        if not self.is_going_on or now - self._faulty_at < SETTLED_SECONDS:
            return None
        self.is_going_on = False
        return OutageNote("", self._number) if self._has_warned else None
