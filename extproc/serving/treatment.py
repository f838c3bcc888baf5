"""What POST /explain says of the steps before a pick: a request's tenant, its class, or a refusal.

No tenant is named: who asks has named it.
"""

from typing import Any

from extproc.base.engine import Engine
from extproc.base.headers import PRIORITY
from extproc.requests.refusals import Refusal
from extproc.requests.request_class import RequestClass
from extproc.routing.priorities import PRIORITY_FIELD, priority_pin
from extproc.serving.tenants import IsolationOutcome

_OF_TENANTS = {
    IsolationOutcome.SALTED: "it gets the salt of its tenant, so only this tenant's blocks count",
    IsolationOutcome.COMMON: "it names no tenant, so only the blocks of such requests count",
    IsolationOutcome.SHARED: "its model is shared, so the blocks of all tenants count",
}


def with_treatment(
    shown: dict[str, Any],
    isolated: IsolationOutcome | None,
    of_class: RequestClass | None,
    engine: Engine | None,
    path: str,
) -> dict[str, Any]:
    """Returns an explanation that says what was done with the request before the pick.

    isolated: None without tenants; of_class: None without classes. engine: of the pick, None if it
    is unknown.
    """
    said = _OF_TENANTS.get(isolated, "") if isolated is not None else ""
    priority = None if of_class is None else _priority(of_class, engine, path)
    if of_class is not None:
        queue = f"in class {of_class.name}, it counts only its own and higher classes as queued"
        said = "; ".join(filter(None, (said, queue, _of_priority(priority, engine))))
    treatment = {
        "isolation": None if isolated is None else isolated.value,
        "class": None if of_class is None else of_class.name,
        "priority": priority,
        "why": said,
    }
    return {**shown, "treatment": treatment}


def _priority(of_class: RequestClass, engine: Engine | None, path: str) -> dict[str, Any] | None:
    """Returns where the engine is told which priority, None if it is not told."""
    pin = None if engine is None else priority_pin(engine, path)
    if pin is None:
        return None
    where = ("field", PRIORITY_FIELD) if pin.in_body else ("header", PRIORITY)
    return {where[0]: where[1], "value": pin.sign * of_class.priority}


def _of_priority(priority: dict[str, Any] | None, engine: Engine | None) -> str:
    if priority is not None:
        place = "header" if "header" in priority else "field"
        return f"its engine gets priority {priority['value']} in the {place} {priority[place]}"
    if engine is None:
        return "the engine of its worker is not known, so it gets no priority"
    return f"{engine} reads no priority on this path"


def explain_refusal(refusal: Refusal, isolated: IsolationOutcome | None) -> dict[str, Any]:
    """Returns the explanation of a request that the router answers itself."""
    outcome = None if isolated is None else isolated.value
    return {
        "model": None,
        "prompt_tokens": 0,
        "weighed_tokens": 0,
        "policy": "",
        "candidates": [],
        "pick": [],
        "rank": None,
        "verdict": "refused",
        "class": None,
        "steered": True,
        "reason": "refused",
        "decided_by": "",
        "session": None,
        "why": f"the router answers it with {refusal.status}: {refusal.message}",
        "prefill": None,
        "source": None,
        "media": None,
        "treatment": {"isolation": outcome, "class": None, "priority": None, "why": ""},
    }
