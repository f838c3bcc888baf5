"""Whether steered requests reach the workers that were picked, and the warnings if they do not."""

import logging
from collections.abc import Callable, Iterator

from extproc.base.fault import ROUTER, Fault
from extproc.fleet.workers import Workers
from extproc.observing.deliveries import DeliveryCounts, WarningLimit
from extproc.routing.decision import Decision

log = logging.getLogger("kvsteer.decision")


class DeliveryWatch:
    """Notes who answered each steered request.

    deliveries: the results. monotonic: seconds.
    """

    def __init__(
        self, workers: Workers, deliveries: DeliveryCounts, monotonic: Callable[[], float]
    ) -> None:
        self._workers = workers
        self._deliveries = deliveries
        self._monotonic = monotonic
        self._warnings = WarningLimit()

    def note(self, decision: Decision, endpoint: str) -> bool:
        """Notes the endpoint that answered; returns whether it is another one than the picked."""
        is_elsewhere, now = endpoint != decision.pick[0], self._monotonic()
        self._workers.strays.note(decision.worker, is_elsewhere=is_elsewhere)
        self._deliveries.note(decision.model, now, is_elsewhere=is_elsewhere)
        if self._deliveries.has_turned(now):
            log.warning("%s", self.fault() or "steered requests reach their workers again")
        return is_elsewhere

    def warn(self, decision: Decision, endpoint: str) -> None:
        """Warns that another server answered, if the worker is not down and the cause is known."""
        picked = decision.pick[0]
        cause = self._workers.strays.cause(decision.worker)
        is_down = self._workers.states.down(picked)
        if cause and not is_down and self._warnings.may_warn(self._monotonic()):
            log.warning(
                "requests steered to %s are answered by other servers, the last by %.80s: %s",
                picked,
                endpoint,
                cause,
            )

    def faults(self) -> Iterator[Fault]:
        """Yields a fault while too few steered requests reach their workers."""
        says = self.fault()
        if says:
            yield Fault("not-delivered", ROUTER, says)

    def fault(self) -> str:
        """Returns why too few steered requests reached their workers lately, "" if enough did."""
        return self._deliveries.fault(self._monotonic(), self._workers.strays.worst)
