"""The workers as Envoy chooses among them by itself, one lane for each."""

from collections.abc import Callable

from extproc.config.sections import PREFILL, Disaggregation
from extproc.fleet.records.table import Table
from extproc.fleet.records.worker import Worker

# By model: ip:port of each worker, and whether it takes new requests.
ByModel = dict[str, list[tuple[str, bool]]]


class Lanes:
    """Which workers take new requests without a pick.

    model_of: returns the model that a worker serves, None while it is unknown.
    """

    def __init__(
        self,
        table: Table,
        disaggregation: Disaggregation,
        model_of: Callable[[Worker], str | None],
    ) -> None:
        self._table = table
        self._disaggregation = disaggregation
        self._model_of = model_of

    def answering(self) -> ByModel:
        """Returns, by model, ip:port of each answering worker, and whether it takes new requests.

        A worker that cannot answer without a prefill worker takes none.
        """
        return self._select(lambda role: role != PREFILL, self._disaggregation.answers_alone)

    def prefill(self) -> ByModel:
        """Returns the same for each worker that computes prompts for others."""
        return self._select(lambda role: role == PREFILL, lambda _: True)

    def _select(self, has: Callable[[str], bool], may_take: Callable[[str], bool]) -> ByModel:
        lanes: ByModel = {}
        for worker in self._table:
            role = worker.sighting.worker.role
            if worker.upstream is not None and has(role):
                is_closed = worker.is_draining or worker.sighting.excluded
                lane = (worker.endpoint, not is_closed and may_take(role))
                lanes.setdefault(self._model_of(worker) or "", []).append(lane)
        return lanes

    def unplaced(self) -> set[str] | None:
        """Returns ip:port of the workers of unknown model; None while any worker has no address."""
        if any(worker.upstream is None for worker in self._table):
            return None
        return {one.endpoint for one in self._table if self._model_of(one) is None}
