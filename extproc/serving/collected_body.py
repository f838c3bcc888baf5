"""A request body as it comes in pieces: kept until the pick is known, then given back."""

from extproc.http2.limits import Budget

# Pieces below this are joined, so many at a time: a client may send a byte at a time, and a piece
# of one byte takes forty. What is joined fits into one echo (stream_answers.MAX_ECHO_BYTES).
SMALL_BYTES = 960
SMALL_PIECES = 64


class CollectedBody:
    """The pieces of one body, in order. budget: what all bodies together may keep."""

    def __init__(self, budget: Budget) -> None:
        self.size_bytes = 0
        self._budget = budget
        self._taken_bytes = 0
        self._pieces: list[bytes] = []
        self._small: list[bytes] = []

    def add(self, piece: bytes) -> bool:
        """Takes the next piece; False if there is no room, so that it is not to stay long."""
        self.size_bytes += len(piece)
        has_room = self._budget.take(len(piece))
        if has_room:
            self._taken_bytes += len(piece)
        self._keep(piece)
        return has_room

    def _keep(self, piece: bytes) -> None:
        if len(piece) < SMALL_BYTES:
            self._small.append(piece)
            if len(self._small) == SMALL_PIECES:
                self._join_small()
            return
        self._join_small()
        self._pieces.append(piece)

    def whole(self) -> bytes:
        """All of it, in one; copied only where it came in more than one piece."""
        self._join_small()
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    def take(self) -> list[bytes]:
        """All of it, in pieces; nothing is left here."""
        self._join_small()
        pieces, self._pieces = self._pieces, []
        self.size_bytes = 0
        self._budget.give_back(self._taken_bytes)
        self._taken_bytes = 0
        return pieces

    def _join_small(self) -> None:
        if self._small:
            joined = b"".join(self._small)
            self._small.clear()
            if joined:
                self._pieces.append(joined)
