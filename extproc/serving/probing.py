"""What POST /probe answers: what a request would find at the fleet of its model, or of several.

Each answer is the decision that the request would get, with its tenant's salt, without the names of
workers.
"""

from collections.abc import Callable, Sequence
from typing import Any

from extproc.base.errors import UnknownModelError
from extproc.requests.refusals import Refusal
from extproc.requests.request import Head, Models
from extproc.requests.trusted_headers import TrustedHeaders
from extproc.routing.load.loads import Load
from extproc.routing.warmth import warmth_as_json
from extproc.serving.other_models import foreseen_for
from extproc.serving.router import Foreseen, Refused, Router


class Probing:
    """Foresees requests for gateways; nothing is booked, counted or noted.

    models: the names that requests may use. load: returns the load of an endpoint now.
    tokens_per_second: a worker's, as configured.
    """

    def __init__(
        self,
        router: Router,
        models: Models,
        load: Callable[[str], Load],
        tokens_per_second: float,
    ) -> None:
        self._router = router
        self._models = models
        self._load = load
        self._tokens_per_second = tokens_per_second

    async def answer(
        self, head: Head, body: bytes, named: TrustedHeaders, models: Sequence[str] = ()
    ) -> list[dict[str, Any]]:
        """Returns an entry for each of these models, or for the one that the body names.

        named: the values of the trusted headers, by their names.

        Raises:
            UnknownModelError: one of them is not configured, or the body names none that is.
        """
        if not models:
            return [self._entry(None, await self._router.foresee(head, body, named))]
        for name in models:
            if self._models.find(name) is None:
                raise UnknownModelError(name)
        asked = foreseen_for(self._router, head, body, named, models)
        return [self._entry(name, seen) async for name, seen in asked]

    def _entry(self, name: str | None, seen: Foreseen | Refused) -> dict[str, Any]:
        """Returns the entry of a model. name: as it was asked for, None for the body's own."""
        if isinstance(seen, Refused):
            return _refused(name, seen.refusal)
        if seen.decision.model is None:
            raise UnknownModelError(name or "")
        return warmth_as_json(seen.decision, seen.query, self._load, self._tokens_per_second)


def _refused(name: str | None, refusal: Refusal) -> dict[str, Any]:
    """Returns the entry for a request that the router would answer itself."""
    return {
        "model": name,
        "prompt_tokens": 0,
        "keyed": False,
        "reason": "refused",
        "verdict": "refused",
        "status": refusal.status,
        "message": refusal.message,
        "pick": None,
        "best": None,
    }
