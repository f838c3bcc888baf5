"""Removes the router's fields from bodies: small ones at once, others in a thread."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from extproc.requests import grpc_request, reserved_fields, reserved_grpc_fields

# A body of this size is searched within a millisecond, whatever it holds.
INLINE_BYTES = 131_072


class Cleaning:
    """Removes a client's own fields that say where KV blocks come from.

    It has its own thread: bodies that wait for a tokenizer must not make others late, since what
    the router does not answer in time passes unchanged.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cleaning")

    async def clean(self, path: str, body: bytes) -> bytes | None:
        """Returns a body without such fields; the same object if it has none, None to refuse it.

        It yields None before it waits, as `Router.route` does.
        """
        if len(body) <= INLINE_BYTES:
            return _without_reserved(path, body)
        await asyncio.sleep(0)  # from here on, it must run in a task
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, _without_reserved, path, body)


def _without_reserved(path: str, body: bytes) -> bytes | None:
    if path in grpc_request.PATHS:
        return reserved_grpc_fields.without_reserved(path, body)
    return reserved_fields.without_reserved(body)
