"""Arrivals: when workers will have the KV blocks that they fetch for requests sent to them."""


class Arrivals:
    """The times at which blocks are expected, in seconds of one monotonic clock.

    expected: by endpoint; also those that passed since the last one was noted.
    """

    __slots__ = ("expected",)

    def __init__(self) -> None:
        self.expected: dict[str, list[float]] = {}

    def expect(self, endpoint: str, at: float, now: float) -> None:
        """Notes that a worker fetches blocks until a time, and forgets all times that passed."""
        left = {one: self.of(one, now) for one in self.expected}
        self.expected = {one: times for one, times in left.items() if times}
        self.expected.setdefault(endpoint, []).append(at)

    def of(self, endpoint: str, now: float) -> list[float]:
        """Returns when blocks are expected at a worker, in no order."""
        return [at for at in self.expected.get(endpoint, ()) if at > now]
