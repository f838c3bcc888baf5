"""What a request would meet if it named another model: the same body, foreseen for each of several.

Each model has its own tokenizer, so each costs a tokenization. They are asked one after the other:
several at once would take the threads that other requests wait for.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

from extproc.base.errors import UnclearError
from extproc.base.headers import WARM
from extproc.requests import grpc_request
from extproc.requests.other_model import named_for
from extproc.requests.refusals import refused_body
from extproc.requests.request import Head, Models, RoutingRequest, model_of
from extproc.requests.trusted_headers import TrustedHeaders
from extproc.routing.decision import Decision
from extproc.routing.warmth import warm_share
from extproc.serving.preparation import INLINE_BYTES
from extproc.serving.router import Foreseen, Refused, Router
from extproc.serving.stream_answers import HeaderValues


async def foreseen_for(
    router: Router, head: Head, body: bytes, named: TrustedHeaders, models: Sequence[str]
) -> AsyncIterator[tuple[str, Foreseen | Refused]]:
    """Yields what becomes of a request if it names each of these models; see `Router.foresee`."""
    for name in models:
        try:
            renamed = await _renamed(head, body, name)
        except UnclearError:
            yield name, Refused(refused_body(head.path), None)
        else:
            yield name, await router.foresee(head, renamed, named)


async def _renamed(head: Head, body: bytes, name: str) -> bytes:
    """Returns a body that names a model; calls of gRPC name none."""
    if head.path in grpc_request.PATHS:
        return body
    if len(body) <= INLINE_BYTES:
        return named_for(body, name)
    await asyncio.sleep(0)  # from here on, it must run in a task
    return await asyncio.to_thread(named_for, body, name)


class OtherModels:
    """Asks about each request which share of its prompt the fleets of other models hold.

    models: all that requests may name. asked: those that are asked about.
    """

    def __init__(self, router: Router, models: Models, asked: Sequence[str]) -> None:
        self._router = router
        self._models = models
        self._asked = asked

    async def shares(self, request: RoutingRequest, named: TrustedHeaders) -> Mapping[str, float]:
        """Returns the share for each model that a request does not name itself.

        A model whose prompt is not known has none. It waits as `Router.route` does. request: as
        the client sent it, since each model's workers may get another salt.
        """
        body = request.body
        if body is None or request.reason or request.head.path in grpc_request.PATHS:
            return {}
        own = self._models.find(model_of(body))
        others = [name for name in self._asked if own is None or name != own.model]
        found: dict[str, float] = {}
        async for name, seen in foreseen_for(self._router, request.head, body, named, others):
            share = _share(seen)
            if share is not None:
                found[name] = share
        return found

    def header(self, decision: Decision, shares: Mapping[str, float]) -> HeaderValues:
        """Returns the header of a decided request; nothing if no model knows the prompt.

        shares: of the models that it does not name. Its own is that of the decision.
        """
        known = dict(shares)
        if decision.model is not None and decision.basis.prompt_tokens:
            known[decision.model] = warm_share(decision)
        named = [f"{name}={known[name]:.2f}" for name in self._asked if name in known]
        return ((WARM, ", ".join(named)),) if named else ()


def _share(seen: Foreseen | Refused) -> float | None:
    """Returns the share of a prompt that a fleet holds, None if its prompt is not known."""
    if isinstance(seen, Refused) or not (seen.query.prompts and seen.decision.pick):
        return None
    return warm_share(seen.decision)
