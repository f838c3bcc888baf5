"""Records of workers that have only outcomes."""

from extproc.observing.outcomes import WorkerOutcomes


class Record:
    """The record of one worker."""

    def __init__(self) -> None:
        self.outcomes = WorkerOutcomes()


def records(*names: str) -> dict[str, Record]:
    """The records of these workers, by name."""
    return {name: Record() for name in names}
