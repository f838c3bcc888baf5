"""What `extproc._core.Budget` does, in Python."""

# A peer may hold so many times what it leaves to others.
PARTS = 3


class Budget:
    """A limit of bytes for all together: unfinished messages, and answers that peers do not read.

    A share of it is what one peer takes: at most `PARTS` times what is then left to the others. So
    a lone one may take three quarters, each of two that take all they can get three sevenths, and
    nobody the last byte.

    whole: of which this is a share; None if it is none.
    """

    def __init__(self, max_bytes: int, whole: "Budget | None" = None) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._whole = whole

    def share(self) -> "Budget":
        """Returns the share of one peer, which has nothing yet."""
        return Budget(self.max_bytes, self)

    def take(self, size: int) -> bool:
        """Reserves bytes; returns False, and reserves none, if there is no room for them."""
        whole = self._whole or self
        left = whole.max_bytes - whole.used_bytes - size
        if left < 0:
            return False
        if self._whole is not None:
            if self.used_bytes + size > PARTS * left:
                return False
            self.used_bytes += size
        whole.used_bytes += size
        return True

    def give_back(self, size: int) -> None:
        """Frees bytes that were reserved."""
        self.used_bytes -= size
        if self._whole is not None:
            self._whole.used_bytes -= size
