"""Keeps apart what changes stores and what copies one as a whole, both in short steps."""

from kvstate.steps import Result, Steps


class StoreGate:
    """Lets either many change stores, or one copy them; whoever has to wait does steps of nothing.

    A change that is under way ends before a copy begins, and no other begins until that has ended.
    """

    def __init__(self) -> None:
        self._changes = 0
        self._copies = 0

    def changing(self, steps: Steps[Result]) -> Steps[Result]:
        """Does a change in steps, and returns its result."""
        while self._copies:
            yield
        self._changes += 1
        try:
            return (yield from steps)
        finally:
            self._changes -= 1

    def copying(self, steps: Steps[Result]) -> Steps[Result]:
        """Copies in steps what nothing changes meanwhile, and returns its result."""
        while self._copies:
            yield
        self._copies += 1
        try:
            while self._changes:
                yield
            return (yield from steps)
        finally:
            self._copies -= 1
