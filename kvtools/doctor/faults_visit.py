"""Asks the running router what it finds wrong itself (GET /faults)."""

from collections.abc import Iterator, Sequence

import msgspec

from extproc.base.fault import MAX_SHOWN
from extproc.commands.admin_json import Fault
from kvstate.errors import printable
from kvtools.doctor.faults import OF_FEEDS
from kvtools.doctor.findings import ROUTER, Finding, Severity, Subject
from kvtools.doctor.steering_visit import local
from kvtools.doctor.worker_visit import Answer, VisitTools

MAX_SAID = 400

# The codes of feeds that have one connection for all ranks.
_OF_CONNECTIONS = tuple(
    code
    for kind in OF_FEEDS.values()
    for code in (kind.refused, kind.unreachable, kind.shared)
    if code
)

# What the router calls by another name than the doctor, or sees only in general: by the router's
# code, the doctor's codes that say the same more precisely.
_SAME = {
    "block-size-differs": ("block-size",),
    "clock-differs": ("clock-skew",),
    "discovery-fault": ("discovery-fault",),
    "envoy-fails-open": ("envoy-fails-open",),
    "feed-degraded": ("replay-",),
    "feed-not-live": ("feed-", "events-", "rank", *_OF_CONNECTIONS),
    "not-delivered": ("envoy-worker-missing", "envoy-no-override", "envoy-namespaces"),
    "paths-unrecognized": ("envoy-path-rewritten",),
    "prefix-caching-off": ("prefix-caching-off",),
    "sharing-alone": ("sharing-unreachable",),
    "tls-ends": ("tls-expired",),
    "tls-files": ("tls-certificate", "tls-client-ca"),
    "tokens-differ": ("tokens-differ",),
    "worker-down": ("worker-unreachable", "worker-unhealthy"),
}


_FAULTS = msgspec.json.Decoder(list[Fault])


async def visit(tools: VisitTools) -> list[Finding]:
    """Returns the faults that the router sees; none about a router that does not answer."""
    answer = await tools.web.get(f"http://{local(tools.config.admin.listen)}/faults")
    return list(judge(answer))


def without_doubles(own: Sequence[Finding], others: Sequence[Finding]) -> list[Finding]:
    """Returns what the router sees, less what other findings say of the same cause.

    own: the findings of `visit`. others: those of all other checks. A cause is the same if it is
    about the same worker; those of the router, Envoy or a model are found only once.
    """
    wrong = [one for one in others if one.verdict is Severity.WRONG]

    def is_said(fault: Finding) -> bool:
        whose = fault.subject if fault.subject.startswith("worker ") else ""
        codes = _SAME.get(fault.code, ())
        return any(one.code.startswith(codes) and whose in ("", one.subject) for one in wrong)

    return [one for one in own if not (one.code and is_said(one))]


def judge(answer: Answer) -> Iterator[Finding]:
    """Yields the findings in an answer to GET /faults."""
    about = Subject("router")
    if not answer.is_ok:
        return
    try:
        faults = _FAULTS.decode(answer.body)
    except msgspec.DecodeError:
        yield about.note(ROUTER, "GET /faults cannot be read: is the router of another version?")
        return
    for one in faults[:MAX_SHOWN]:
        says, subject = printable(one.says, MAX_SAID), printable(one.subject, MAX_SAID)
        fix, code = printable(one.fix, MAX_SAID), printable(one.code, MAX_SAID)
        yield Finding(subject, ROUTER, Severity.WRONG, says, code, fix)
    if not faults:
        yield about.right(ROUTER, "it sees no fault itself")
