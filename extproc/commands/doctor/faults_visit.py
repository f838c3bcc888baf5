"""Asks the running router what it finds wrong itself (GET /faults)."""

from collections.abc import Iterator

import msgspec

from extproc.commands.doctor.findings import ROUTER, Finding, Severity, Subject
from extproc.commands.doctor.steering_visit import local
from extproc.commands.doctor.worker_visit import Answer, Means
from extproc.observing.faults import MAX_SHOWN
from kvstate.errors import printable

MAX_SAID = 400


class _Fault(msgspec.Struct):
    """One of the router's answer."""

    code: str
    subject: str
    says: str
    fix: str


_FAULTS = msgspec.json.Decoder(list[_Fault])


async def visit(means: Means) -> list[Finding]:
    """Returns the faults that the router sees; none about a router that does not answer."""
    answer = await means.web.get(f"http://{local(means.config.admin.listen)}/faults")
    return list(judge(answer))


def judge(answer: Answer) -> Iterator[Finding]:
    """Yields the findings in an answer to GET /faults."""
    about = Subject("router")
    if not answer.is_ok:
        return
    try:
        told = _FAULTS.decode(answer.body)
    except msgspec.DecodeError:
        yield about.note(ROUTER, "GET /faults cannot be read: is the router of another version?")
        return
    for one in told[:MAX_SHOWN]:
        says, subject = printable(one.says, MAX_SAID), printable(one.subject, MAX_SAID)
        fix, code = printable(one.fix, MAX_SAID), printable(one.code, MAX_SAID)
        yield Finding(subject, ROUTER, Severity.WRONG, says, code, fix)
    if not told:
        yield about.right(ROUTER, "it sees no fault itself")
