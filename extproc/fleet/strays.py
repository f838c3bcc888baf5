"""Requests that were steered to one worker and answered by another server."""

from collections.abc import Callable

from extproc.fleet.records.table import Table
from extproc.observing.deliveries import NOBODY_FOLLOWED


class Strays:
    """Whether the requests steered to each worker reach it.

    monotonic: seconds.
    """

    def __init__(self, table: Table, monotonic: Callable[[], float]) -> None:
        self._table = table
        self._monotonic = monotonic

    def note(self, name: str, *, is_elsewhere: bool) -> None:
        """Notes who answered a request that was steered to a worker: itself, or another one."""
        worker = self._table.get(name)
        if worker is not None:
            worker.outcomes.answers.note(is_elsewhere=is_elsewhere)

    def cause(self, name: str) -> str:
        """Returns why requests steered to a worker are answered elsewhere, "" if they are not."""
        worker = self._table.get(name)
        if worker is None:
            return ""
        return worker.outcomes.answers.cause(
            lambda: (one.outcomes.answers for one in self._table),
            is_down=bool(self._table.upstreams.reason(worker.endpoint, self._monotonic())),
        )

    def worst(self) -> str:
        """Returns why requests are answered elsewhere, for the worker with the most of them."""
        strays = [one for one in self._table if self.cause(one.name)]
        worst = max(strays, key=lambda one: one.outcomes.answers.share, default=None)
        cause = "" if worst is None else self.cause(worst.name)
        if worst is None or cause == NOBODY_FOLLOWED:
            return cause
        return f"{worst.endpoint}{f' and {len(strays) - 1} more' * (len(strays) > 1)}: {cause}"
