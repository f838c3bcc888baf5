"""One cause, one fault: of an engine that does not run, every port refuses the connection."""

from collections.abc import Sequence

from kvtools.doctor.faults import OF_FEEDS
from kvtools.doctor.findings import Finding, Severity

# The codes of an engine's ports at which nothing listens.
_OF_PORTS = [code for kind in OF_FEEDS.values() for code in kind.of_nobody]

# The codes of ports at which something answers, so that the engine may run.
_OF_ANSWERS = [code for kind in OF_FEEDS.values() for code in kind.of_answers]


def _is_refused(finding: Finding) -> bool:
    return "connection refused" in finding.says.lower()


def without_repeats(findings: Sequence[Finding]) -> list[Finding]:
    """Returns a worker's findings; its ports are notes if its HTTP server refuses as they all do.

    If any of them answers, or hangs, the engine may run: then each is a fault of its own.
    """
    unreachable = [one for one in findings if one.code == "worker-unreachable"]
    ports = [one for one in findings if one.code in _OF_PORTS]
    answer = any(one.code in _OF_ANSWERS for one in findings)
    if answer or not unreachable or not all(map(_is_refused, (*unreachable, *ports))):
        return list(findings)
    return [
        one._replace(verdict=Severity.NOTE, code="", fix="") if one in ports else one
        for one in findings
    ]
