"""Asks workers whether they are well, where that is configured: GET /health."""

import logging
from collections.abc import Callable, Sequence

import aiohttp

from extproc.picking.placing import Placing
from extproc.picking.rounds import Place, Rounds

log = logging.getLogger("kvsteer.health")

# Probes in a row that must fail before a worker is left out; one success brings it back.
FAILURES_UNTIL_UNHEALTHY = 2

_UNHEALTHY = "fails its health probe"


class HealthProbe:
    """Keeps what is known of the workers' health current.

    places: of all workers, as they are resolved now. interval_seconds: between two questions to a
    worker; 0 asks none. chance: 0 to 1, for jitter. monotonic: the clock that the load is kept in.
    """

    def __init__(
        self,
        placing: Placing,
        places: Callable[[], Sequence[Place]],
        interval_seconds: float,
        chance: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._placing = placing
        self._monotonic = monotonic
        self._failures: dict[str, int] = {}
        self._rounds = Rounds(interval_seconds, places, self._forget_others, self.ask, chance)

    async def start(self) -> None:
        """Begins to ask, if that is configured."""
        await self._rounds.start()

    async def close(self) -> None:
        """Ends all questions."""
        await self._rounds.close()

    def _forget_others(self, endpoints: set[str]) -> None:
        for known in (self._failures, self._placing.unhealthy):
            for endpoint in known.keys() - endpoints:
                del known[endpoint]

    async def ask(self, session: aiohttp.ClientSession, place: Place) -> None:
        """Asks one worker; vLLM and SGLang answer 200 without a body where they are well."""
        name, endpoint = place
        try:
            url = f"http://{endpoint}/health"
            async with session.get(url, allow_redirects=False) as response:
                is_well = 200 <= response.status < 300  # noqa: PLR2004 - as HTTP has it
                fault = "" if is_well else f"HTTP status {response.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            fault = type(error).__name__
        if fault:
            self._note_failure(name, endpoint, fault)
            return
        self._failures.pop(endpoint, None)
        was_unhealthy = self._placing.unhealthy.pop(endpoint, None) is not None
        if was_unhealthy and endpoint not in self._placing.unfit:  # else its scrapes tell
            log.info("worker %s is well again", name)

    def _note_failure(self, name: str, endpoint: str, fault: str) -> None:
        failures = self._failures[endpoint] = self._failures.get(endpoint, 0) + 1
        if failures >= FAILURES_UNTIL_UNHEALTHY and endpoint not in self._placing.unhealthy:
            self._placing.unhealthy[endpoint] = _UNHEALTHY
            self._placing.sent.forget(name, self._monotonic())
            if endpoint not in self._placing.unfit:
                log.warning("worker %s %s: %s", name, _UNHEALTHY, fault)
