"""What a request would meet if it named another model: the same body, foreseen for each of several.

Each model has its own tokenizer, so each costs a tokenization. They are asked one after the other:
several at once would take the threads that other requests wait for.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence

from extproc.base.errors import UnclearError
from extproc.requests import grpc_request
from extproc.requests.other_model import named_for
from extproc.requests.refusals import refused_body
from extproc.requests.request import Head
from extproc.requests.trusted_headers import TrustedHeaders
from extproc.serving.preparation import INLINE_BYTES
from extproc.serving.router import Foreseen, Refused, Router


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
