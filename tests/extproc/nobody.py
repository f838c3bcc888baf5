"""A fleet without workers, for tests of other metrics."""

from collections.abc import Callable, Iterator, Mapping

from extproc.observing.fleet_families import Shown
from extproc.observing.outcomes import Circumstances, HasOutcomes, Outcome
from extproc.routing.load.loads import Load


class Nobody:
    """No workers, but a test may make it show some."""

    def __init__(self) -> None:
        self.records: Mapping[str, HasOutcomes] = {}
        self.shown: list[Shown] = []
        self.loads = Load()

    def statuses(self) -> Iterator[Shown]:
        """The workers as GET /workers shows them."""
        yield from self.shown

    def load(self, _: str) -> Load:
        """The load of every endpoint."""
        return self.loads

    def index_bytes(self) -> int:
        """Memory of the block index."""
        return 7

    def tokens_per_second(self, _: str) -> float:
        """No speeds."""
        return 0.0

    def circumstances(self, _: Outcome) -> Circumstances:
        """No circumstances."""
        return Circumstances(block_size=16)

    def note_usage(self, _: Outcome, __: Callable[[], Circumstances]) -> None:
        """Nothing is counted."""
