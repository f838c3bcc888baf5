"""A bound that several share by name: what one holds leaves room for the others."""

from typing import Final

# One may hold so many times what it leaves to others.
PARTS: Final = 3


class Shares:
    """An amount that is bounded, and who holds how much of it.

    Whoever takes more holds at most `PARTS` times what is left then: a lone one three quarters, and
    each of two that take turns three sevenths. None stands for all together where nobody asks who
    is who, and may take all.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0
        self._of: dict[bytes, int] = {}

    def take(self, whose: bytes | None, amount: int) -> bool:
        """Reserves an amount; returns False, and reserves none, if there is no room for it."""
        left = self.most - self.used - amount
        if left < 0:
            return False
        if whose is not None and amount:
            held = self._of.get(whose, 0) + amount
            if held > PARTS * left:
                return False
            self._of[whose] = held
        self.used += amount
        return True

    def give_back(self, whose: bytes | None, amount: int) -> None:
        """Frees an amount that was reserved for the same one."""
        self.used -= amount
        if whose is None or not amount:
            return
        held = self._of[whose] - amount
        if held:
            self._of[whose] = held
        else:
            del self._of[whose]
