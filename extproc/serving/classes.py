"""Gives requests the priority of their class, in the place of a client's own."""

from collections.abc import Collection, Sequence

import msgspec

from extproc.base.engine import Engine
from extproc.base.headers import PRIORITY
from extproc.config.sections import Classes
from extproc.requests.added_fields import Body, with_fields
from extproc.requests.request import RoutingRequest, may_compute
from extproc.requests.request_class import ClassTable, RequestClass
from extproc.routing.priorities import PRIORITY_FIELD, priority_pin

# The header to set, and the body that replaces the client's; None for each that there is not.
Named = tuple[tuple[str, str] | None, Body | None]

UNNAMED: Named = (None, None)


class ClassStep:
    """Finds the classes of requests. header: the name of the one that names it, in lower case."""

    def __init__(self, rules: Classes) -> None:
        self._table = ClassTable(rules)
        self.header = self._table.header

    def classify(self, request: RoutingRequest, named: Sequence[bytes]) -> RoutingRequest:
        """Returns a request with its class. named: the values of the header that names it."""
        if not may_compute(request.head.method, request.head.path):
            return request
        return msgspec.structs.replace(request, of_class=self._table.find(named))


def is_told_by_header(engines: Collection[Engine | None], path: str) -> bool:
    """Returns whether all of these engines are told a priority by a header.

    It overrides the body's (vLLM 0.28's `_get_priority`). engines: None for one that is not known.
    """
    pins = [None if one is None else priority_pin(one, path) for one in engines]
    return bool(pins) and all(pin is not None and not pin.in_body for pin in pins)


def named_priority(
    of_class: RequestClass | None, engine: Engine | None, path: str, body: Body | None
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
