"""Records of workers, as far as their outcomes go."""

from extproc.observing.outcomes import WorkerOutcomes


class Record:
    """Of one worker."""

    def __init__(self) -> None:
        self.outcomes = WorkerOutcomes()


def records(*names: str) -> dict[str, Record]:
    """By name, the records of these workers."""
    return {name: Record() for name in names}
