"""Classes of requests, as a feature: a trusted header names the class, whose priority engines get.

That a class counts only its own and higher ones as queued, and that it has a limit of its own, is
part of the decision (`extproc.routing.load`, `extproc.routing.limits`).
"""

import time
from collections.abc import Callable, Collection, Sequence

import msgspec
from prometheus_client.registry import Collector

from extproc.base.engine import Engine
from extproc.base.headers import PRIORITY
from extproc.config.schema import Config
from extproc.config.sections import Classes
from extproc.features.classes.class_figures import ClassFigures
from extproc.features.feature import NOTHING_WRITTEN, Feature, Written
from extproc.features.router_parts import RouterParts
from extproc.observing.outcomes import Outcome
from extproc.requests.added_fields import Body, with_fields
from extproc.requests.request import RoutingRequest, may_compute
from extproc.requests.request_class import ClassTable, RequestClass
from extproc.requests.trusted_headers import TrustedHeaders
from extproc.routing.decision import Decision, Verdict
from extproc.routing.priorities import PRIORITY_FIELD, priority_pin, priority_within


class ClassFeature(Feature):
    """Gives requests the priority of their class, in the place of a client's own, and counts them.

    engine: returns the engine of a worker, None if it is not known. engines_of: returns the names
    of the engines that a model's workers are known to run. note_shed: notes that a request of a
    class was refused, since all workers are busy. speed: returns the prompt tokens that an endpoint
    computes in a second. clock: seconds since 1970.
    """

    def __init__(
        self,
        rules: Classes,
        engine: Callable[[str], Engine | None],
        engines_of: Callable[[str], Collection[str]],
        note_shed: Callable[[str], None],
        speed: Callable[[str], float],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._rules = rules
        self._speed = speed
        self._clock = clock
        self._table = ClassTable(rules)
        self.headers = (self._table.header,)
        self._engine = engine
        self._engines_of = engines_of
        self._note_shed = note_shed
        self._figures = ClassFigures()

    def describe(self, request: RoutingRequest, named: TrustedHeaders) -> RoutingRequest:
        """Returns a request with its class, if it may call a model."""
        if not may_compute(request.head.method, request.head.path):
            return request
        found = self._table.find(named.get(self._table.header, ()))
        return msgspec.structs.replace(request, of_class=found)

    def note_placed(self, decision: Decision, verdict: Verdict, *, is_booked: bool) -> None:
        """Counts a request of a class, and those that were shed."""
        if decision.of_class is None:
            return
        name = decision.of_class.name
        self._figures.begin(name, verdict.value, is_booked=is_booked)
        if verdict is Verdict.SHED:
            self._note_shed(name)

    def write(self, decision: Decision, path: str, body: Body | None) -> Written:
        """Returns what tells the engine of the pick the priority of the class.

        Nothing if the proxy chooses among engines of several kinds: their signs may differ.
        """
        if not decision.is_steered and len(set(self._engines_of(decision.model or ""))) > 1:
            return NOTHING_WRITTEN
        of_class = decision.of_class
        if of_class is None:
            return NOTHING_WRITTEN
        priority = self._priority(decision, of_class)
        return written_priority(priority, self._engine(decision.worker), path, body)

    def _priority(self, decision: Decision, of_class: RequestClass) -> int:
        """Returns the number by which a request is sorted; lower ones go first."""
        if not self._rules.hits_first:
            return of_class.priority
        speed = self._speed(decision.pick[0]) if decision.pick else 0.0
        seconds = decision.uncached_tokens / speed if speed else 0.0
        return priority_within(of_class.priority, self._clock(), seconds)

    def note_end(
        self, decision: Decision, outcome: Outcome | None, *, is_booked: bool, is_sent: bool
    ) -> None:
        """Counts a request of a class that ended."""
        if decision.of_class is not None:
            seconds = None if outcome is None else outcome.ttft_seconds
            self._figures.end(decision.of_class.name, seconds, is_booked=is_booked)

    def collectors(self) -> Sequence[Collector]:
        """Returns what shows the figures of the classes."""
        return (self._figures,)


def classes(config: Config, parts: RouterParts) -> ClassFeature | None:
    """Returns the feature if classes are configured."""
    rules = config.policy.classes
    if rules is None:
        return None
    fleet = parts.workers.candidates
    speed = parts.loads.tokens_per_second
    return ClassFeature(rules, fleet.engine, fleet.engines_of, parts.metrics.note_shed, speed)


def is_told_by_header(engines: Collection[Engine | None], path: str) -> bool:
    """Returns whether all of these engines are told a priority by a header.

    It overrides the body's (vLLM 0.28's `_get_priority`). engines: None for one that is not known.
    """
    pins = [None if one is None else priority_pin(one, path) for one in engines]
    return bool(pins) and all(pin is not None and not pin.in_body for pin in pins)


def written_priority(priority: int, engine: Engine | None, path: str, body: Body | None) -> Written:
    """Returns what tells an engine a priority.

    priority: lower ones go first. engine: None if it is unknown; then nothing is told. body: None
    if it must not be changed.
    """
    if engine is None:
        return NOTHING_WRITTEN
    pin = priority_pin(engine, path)
    if pin is None:
        return NOTHING_WRITTEN
    signed = pin.sign * priority
    if not pin.in_body:
        return Written(((PRIORITY, str(signed)),))
    if body is None:
        return NOTHING_WRITTEN
    return Written(body=with_fields(body, {PRIORITY_FIELD: signed}))
