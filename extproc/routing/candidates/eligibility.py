"""Determines which workers a request may go to at all."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from extproc.config.sections import BOTH

# A subset hint with more endpoints is cut: no fleet behind one route has this many.
MAX_SUBSET = 10_000


class Candidate(msgspec.Struct, frozen=True):
    """One worker, for requests to one model.

    endpoint: ip:port; its configured name until that is resolved. excluded: why it cannot be
    picked, "" if it can. loras: the adapters it serves; None for all of its model's. role: which
    part of a request it takes. transfer_port: the port on which it hands over what it computed,
    None for the port configured for all.
    """

    name: str
    endpoint: str
    excluded: str = ""
    loras: frozenset[str] | None = None
    role: str = BOTH
    transfer_port: int | None = None


class Demand(NamedTuple):
    """What a request requires of a worker.

    lora: the adapter it names. subset: the allowed endpoints, None for all.
    """

    lora: str | None = None
    subset: frozenset[str] | None = None


ANY = Demand()


def why_excluded(worker: Candidate, demand: Demand, unfit: Mapping[str, str]) -> str:
    """Returns why a worker cannot be picked, "" if it can.

    unfit: endpoints that get no requests, and why.
    """
    if worker.excluded:
        return worker.excluded
    lora, subset = demand
    if lora is not None and worker.loras is not None and lora not in worker.loras:
        return f"does not serve the adapter {lora}"
    if subset is not None and worker.endpoint not in subset:
        return "not in the subset that the proxy allows"
    return unfit.get(worker.endpoint, "") if unfit else ""


def places_without(excluded: Sequence[str]) -> Sequence[int]:
    """Returns the indices of the workers that nothing excludes; a range if that is all of them."""
    if any(excluded):
        return [place for place, why in enumerate(excluded) if not why]
    return range(len(excluded))


class Roster:
    """Facts about a list of workers that do not depend on the request.

    places: the workers' indices by name. excluded: why each worker cannot be picked for any
    request. eligible: the indices of the others.
    """

    __slots__ = ("eligible", "excluded", "places", "workers")

    def __init__(self, workers: Sequence[Candidate]) -> None:
        self.workers = workers
        self.places = {worker.name: place for place, worker in enumerate(workers)}
        self.excluded = [worker.excluded for worker in workers]
        self.eligible = places_without(self.excluded)


def subset_of(hint: object) -> frozenset[str] | None:
    """Returns the endpoints of a subset hint; None if there is no hint.

    hint: the value of `x-gateway-destination-endpoint-subset` under the metadata key
    `envoy.lb.subset_hint` (Endpoint Picker Protocol 1.0.0): a list of ip:port, or a string of
    them separated by commas. Anything else names no endpoint.
    """
    if hint is None:
        return None
    if isinstance(hint, str):
        hint = hint.split(",")
    if not isinstance(hint, list | tuple):
        return frozenset()
    names = [name.strip() for name in hint[:MAX_SUBSET] if isinstance(name, str)]
    return frozenset(name for name in names if name)
