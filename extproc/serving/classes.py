"""Gives requests the priority of their class, in the place of a client's own."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from extproc.base.engine import Engine
from extproc.base.headers import PRIORITY
from extproc.config.sections import Classes
from extproc.requests.added_fields import with_fields
from extproc.requests.request import Ask, may_compute
from extproc.requests.request_class import ClassTable, RequestClass, without_priority
from extproc.routing.priorities import PRIORITY_FIELD, priority_pin

# A body of this size is scanned within a millisecond.
INLINE_BYTES = 131_072

# The header to set, and the body that replaces the client's; None for each that there is not.
Named = tuple[tuple[str, str] | None, bytes | None]

UNNAMED: Named = (None, None)


class ClassStep:
    """Finds the classes of requests. header: the name of the one that names it, in lower case."""

    def __init__(self, rules: Classes) -> None:
        self._table = ClassTable(rules)
        self.header = self._table.header
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="classes")

    async def classify(self, ask: Ask, named: Sequence[bytes]) -> Ask:
        """Returns a request with its class, and without a priority of its own.

        named: the values of the header that names the class. It yields None before it waits, as
        `Router.route` does.
        """
        head, body = ask.head, ask.body
        if not may_compute(head.method, head.path):
            return ask
        found = self._table.find(named)
        if body is None or ask.wants_endpoint:
            return msgspec.structs.replace(ask, of_class=found)
        if len(body) > INLINE_BYTES:
            await asyncio.sleep(0)  # from here on, it must run in a task
            loop = asyncio.get_running_loop()
            body = await loop.run_in_executor(self._thread, without_priority, body)
        else:
            body = without_priority(body)
        return msgspec.structs.replace(ask, of_class=found, body=body)


def named_priority(
    of_class: RequestClass | None, engine: Engine | None, path: str, body: bytes | None
) -> Named:
    """Returns what tells an engine the priority of a class.

    engine: None if it is unknown; then nothing is told. body: None if it must not be changed.
    """
    if of_class is None or engine is None:
        return UNNAMED
    pin = priority_pin(engine, path)
    if pin is None:
        return UNNAMED
    priority = pin.sign * of_class.priority
    if not pin.in_body:
        return (PRIORITY, str(priority)), None
    return None, None if body is None else with_fields(body, {PRIORITY_FIELD: priority})
