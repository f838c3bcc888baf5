"""The last findings of one kind, which raise an alarm while most of them are bad."""

from collections import deque

# How many of the last findings of a kind count.
LAST_FINDINGS = 8


class Tally:
    """The last findings of one kind.

    bad: how many of them must be bad before it is raised. good: how many good ones in a row end
    that. is_raised: whether it is. has_bad: whether any of them is bad; read at every pick.
    """

    def __init__(self, bad: int, good: int) -> None:
        self._bad, self._good = bad, good
        self._last: deque[bool] = deque(maxlen=LAST_FINDINGS)
        self.is_raised = self.has_bad = False

    def add(self, *, is_good: bool) -> None:
        """Adds a finding."""
        self._last.append(is_good)
        self.has_bad = False in self._last
        if not self.is_raised:
            self.is_raised = self._last.count(False) >= self._bad
        elif len(self._last) >= self._good and all(list(self._last)[-self._good :]):
            self.clear()

    def alarm(self) -> None:
        """Raises it at once, by a finding that is proof by itself."""
        self._last.append(False)
        self.is_raised = self.has_bad = True

    def clear(self) -> None:
        """Forgets all findings."""
        self._last.clear()
        self.is_raised = self.has_bad = False
