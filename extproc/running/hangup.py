"""What SIGHUP means: that the terminal is gone in which a router was started, or a reload."""

import os

_STANDARD_INPUT = 0


class Hangup:
    """Tells both kinds of SIGHUP apart; made when the router starts."""

    def __init__(self) -> None:
        self._had_terminal = os.isatty(_STANDARD_INPUT)

    @property
    def is_end(self) -> bool:
        """Whether the terminal was closed, so that nobody can stop the router there any more."""
        return self._had_terminal and not os.isatty(_STANDARD_INPUT)
