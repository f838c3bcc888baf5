"""Judges whether requests are steered now: by the router's own answers, and by Envoy's counters.

Envoy goes on without a router that does not answer, and every request still succeeds; so only its
counters show it. Sources: Envoy's statistics of the HTTP filter ext_proc (`streams_started`,
`stream_msgs_received`, `failure_mode_allowed`), from `GET /stats?format=json`; its listeners, from
`envoy.admin.v3.ConfigDump`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvstate.undecodable import UNDECODABLE
from kvtools.doctor.envoy_dump import (
    listing,
    mapping,
    nodes,
    number,
    place_of,
    type_of,
    typed,
)
from kvtools.doctor.findings import STEERING, Finding, Subject, name_list

ALL_PERCENT = 100

# The first words of the finding, which the last line of the doctor's text repeats.
STEERED = "requests are steered now"
NOT_STEERED = "requests are not steered now"
UNKNOWN = "it is not known whether requests are steered now"


class SteeringCounters(NamedTuple):
    """What Envoy has counted of all its ext_proc filters.

    asked: requests about which it asked a router. answered: messages that routers sent. bypassed:
    requests that went on without an answer (`failure_mode_allowed`).
    """

    asked: int = 0
    answered: int = 0
    bypassed: int = 0

    def since(self, before: "SteeringCounters") -> "SteeringCounters":
        """Returns what was counted since; all of it if Envoy was restarted meanwhile."""
        if any(now < earlier for now, earlier in zip(self, before, strict=True)):
            return self
        pairs = zip(self, before, strict=True)
        return SteeringCounters._make(now - earlier for now, earlier in pairs)


_COUNTER_NAMES = {
    "streams_started": "asked",
    "stream_msgs_received": "answered",
    "failure_mode_allowed": "bypassed",
}


def counters_in(answer: bytes) -> SteeringCounters | None:
    """Returns the counters in an answer of Envoy to /stats?format=json, None if it is none."""
    try:
        raw = msgspec.json.decode(answer)
    except UNDECODABLE:
        return None
    if not isinstance(raw, Mapping) or not isinstance(raw.get("stats"), list):
        return None
    totals = dict.fromkeys(_COUNTER_NAMES.values(), 0)
    for one in map(mapping, listing(raw["stats"])):
        scope, _, name = str(one.get("name")).rpartition(".")
        if scope.rpartition(".")[2] == "ext_proc" and name in _COUNTER_NAMES:
            totals[_COUNTER_NAMES[name]] += number(one.get("value"), 0)
    return SteeringCounters(**totals)


class SteeredListener(NamedTuple):
    """A listener of Envoy whose requests go through an ext_proc filter.

    address: ip:port, as Envoy binds it. speaks_tls: whether clients have to.
    """

    address: str
    speaks_tls: bool


def listeners_in(dump: bytes) -> list[SteeredListener] | None:
    """Returns the listeners with an ext_proc filter, from a /config_dump; None if it is none."""
    try:
        raw = msgspec.json.decode(dump)
    except UNDECODABLE:
        return None
    if not isinstance(raw, Mapping) or not isinstance(raw.get("configs"), list):
        return None
    # the bootstrap holds the static part a second time
    parts = [one for one in raw["configs"] if not type_of(one).endswith(".BootstrapConfigDump")]
    return list(dict.fromkeys(_listeners_of(parts)))


def _listeners_of(parts: object) -> Iterator[SteeredListener]:
    for listener in nodes(parts):
        if "filter_chains" not in listener:
            continue
        if any(True for _ in typed(listener, ".ext_proc.v3.ExternalProcessor")):
            chains = map(mapping, listing(listener["filter_chains"]))
            speaks_tls = any("transport_socket" in chain for chain in chains)
            yield SteeredListener(place_of(mapping(listener.get("address"))), speaks_tls)


class SteeringState(NamedTuple):
    """What the doctor saw of the router and of Envoy.

    routers: why each router is not ready, by its address; "" if it is. envoy: why Envoy could not
    be asked; "" if it was. listeners: its listeners with an ext_proc filter. counted: by Envoy,
    while the doctor watched, its own request among it. request: what came of that request. percent:
    the share of requests that the router steers, None if it could not be asked. fault: why too few
    steered requests reach their workers, "" if enough do or nobody knows.
    """

    routers: Mapping[str, str]
    envoy: str = ""
    listeners: Sequence[SteeredListener] = ()
    counted: SteeringCounters = SteeringCounters()
    request: str = ""
    percent: float | None = None
    fault: str = ""

    @property
    def is_down(self) -> bool:
        """Whether no router is ready."""
        return all(self.routers.values())

    @property
    def why_down(self) -> str:
        """Which routers are not ready, and why; "" if all are."""
        down = [f"{place}: {why}" for place, why in self.routers.items() if why]
        return name_list(down) if down else ""


def judge_steering(about: Subject, seen: SteeringState) -> Finding:
    """Returns the finding that says whether requests are steered now."""
    if seen.counted.bypassed:
        return _bypassed(about, seen)
    if seen.counted.answered:
        return _answered(about, seen)
    if seen.is_down:
        known = f"; {seen.envoy}" if seen.envoy else ""
        says = f"{NOT_STEERED}: no router is ready: {seen.why_down}{known}"
        return about.wrong("router-down", says)
    if seen.envoy:
        return about.note(STEERING, f"{UNKNOWN}: the router is ready, but {seen.envoy}")
    if not seen.listeners:
        says = f"{NOT_STEERED}: the router is ready, but Envoy has no ext_proc filter"
        return about.note(STEERING, says)
    says = f"{UNKNOWN}: the router is ready, but Envoy did not ask it; {seen.request}"
    return about.note(STEERING, says)


def _bypassed(about: Subject, seen: SteeringState) -> Finding:
    counted = seen.counted
    whole = max(counted.asked, counted.bypassed)
    share = NOT_STEERED if counted.bypassed == whole else "some requests are not steered now"
    says = f"{share}: Envoy let {counted.bypassed} of {whole} pass without the router"
    if seen.is_down:
        return about.wrong("router-down", f"{says}; no router is ready: {seen.why_down}")
    late = f"; these routers are not ready: {seen.why_down}" if seen.why_down else ""
    return about.wrong("router-bypassed", f"{says}, though a router is ready{late}")


def _answered(about: Subject, seen: SteeringState) -> Finding:
    count = seen.counted.asked
    by = f"a router answered Envoy about {count} request{'' if count == 1 else 's'}"
    if seen.fault:
        return about.wrong("steered-elsewhere", f"{STEERED}, but {seen.fault}")
    if seen.percent is not None and seen.percent < ALL_PERCENT:
        share = f"only {seen.percent:g} % of them are" if seen.percent else "none of them is"
        return about.note(STEERING, f"requests are observed now, and {share} steered: {by}")
    if seen.why_down:
        says = f"{STEERED}: {by}; from here, these routers are not ready: {seen.why_down}"
        return about.note(STEERING, says)
    return about.right(STEERING, f"{STEERED}: {by}")
